#include "program/checks.h"

#include <cstddef>

namespace zeroth {

std::optional<Refutation> refute(const StepProgram& program, const VerifyOptions& options) {
  if (auto refutation = refute_structure(program)) return refutation;
  if (auto refutation = refute_forwards(program)) return refutation;
  if (auto refutation = refute_vocabulary_counts(program)) return refutation;
  const ActionIndex index(program);
  if (auto refutation = refute_order(program, index, options.forwards_only)) return refutation;
  if (auto refutation = refute_messages(program, index)) return refutation;
  if (auto refutation = refute_vocabulary(program, index)) return refutation;
  if (auto refutation = refute_deadlock(program, index, options.dependences)) return refutation;
  if (auto refutation = refute_states(program)) return refutation;
  return refute_in_flight(program, options.in_flight);
}

void verify(const StepProgram& program, const VerifyOptions& options) {
  if (const auto refutation = refute(program, options)) throw_refutation(program, *refutation, "verify");
}

}  // namespace zeroth
