#include "program/checks.h"

#include <zeroth/program/passes.h>

#include <cstddef>

namespace zeroth {

namespace {

/// What is to be seen in the list of one step.
std::optional<Refutation> refute_late_step(const StepProgram& program) {
  if (auto refutation = refute_structure(program)) return refutation;
  return refute_forwards(program);
}

/// So many steps that each stands beside every other with which it shares micro-batches.
StepProgram with_late(const StepProgram& program) {
  return unrolled(program, program.most_late() + 2);
}

}  // namespace

std::optional<Refutation> refute(const StepProgram& program, const VerifyOptions& options) {
  if (!program.late.empty()) {
    if (auto refutation = refute_late_step(program)) return refutation;
    return refute(with_late(program), options);
  }
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
  if (!program.late.empty()) {
    if (const auto refutation = refute_late_step(program)) throw_refutation(program, *refutation, "verify");
    return verify(with_late(program), options);
  }
  if (const auto refutation = refute(program, options)) throw_refutation(program, *refutation, "verify");
}

}  // namespace zeroth
