// The text of a pipeline's program. What is accepted reads back as itself; what the verifier passes is simulated, and
// ends; what is refused says where.
#include "fuzz/fuzz_target.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/simulate.h>
#include <zeroth/program/step_program.h>
#include <zeroth/program/verify.h>

#include <exception>
#include <string>

using zeroth::Error;
using zeroth::ErrorCode;
using zeroth::StepProgram;
using zeroth::fuzz::expect;

namespace {

void check_refusal(const Error& error) {
  expect(error.code() == ErrorCode::kUsage, "refused with another code", error.what());
  expect(zeroth::fuzz::is_printable(error.what()), "a refusal with control characters", error.what());
  expect(!error.context().expected.empty(), "refused without what is expected", error.what());
}

void try_program(const StepProgram& program) {
  const std::string text = to_text(program);
  expect(zeroth::parse_program(text) == program, "a program that does not read back as itself", text);
  const auto refutation = zeroth::refute(program);
  if (!refutation) {
    const StepProgram steps = zeroth::unrolled(program, 2);  // of late gradients
    const zeroth::Simulation simulation = zeroth::simulate(steps);
    for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
      expect(simulation.ranks[rank].actions.size() == steps.actions[rank].size(), "a rank that does not end", text);
      expect(simulation.ranks[rank].bubble >= 0, "a wait that is less than none", text);
    }
    return;
  }
  expect(!refutation->what.empty() && !refutation->expected.empty(), "refuted without a reason", text);
  for (const auto& place : refutation->places)
    expect(place.rank >= 0 && place.rank < program.ranks() && place.index >= 0, "refuted at no place", text);
  try {
    zeroth::verify(program);
    expect(false, "refuted and verified", text);
  } catch (const Error& error) {
    check_refusal(error);
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = zeroth::fuzz::text_of(data, size);
  try {
    try_program(zeroth::parse_program(text));
  } catch (const Error& error) {
    check_refusal(error);
    expect(error.context().which.starts_with("line "), "refused without a place", error.what());
  } catch (const std::exception& error) {
    expect(false, "refused with something that is no Error", error.what());
  }
  return 0;
}
