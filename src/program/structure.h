// What every reader of a program asks first, and who talks to whom in it.
#pragma once

#include <zeroth/program/step_program.h>
#include <zeroth/program/verify.h>

#include <optional>

namespace zeroth {

/// Of all steps of a program with late gradients that are looked at together.
constexpr int kMostActions = 1 << 24;

/// What is wrong with the shape of a program: numbers out of range, actions on a rank that does not have their chunk.
[[nodiscard]] std::optional<Refutation> refute_structure(const StepProgram& program);
/// Throws kUsage with it; `function` stands in `where`.
void require_structure(const StepProgram& program, const char* function);
/// The error of a refutation.
[[noreturn]] void throw_refutation(const StepProgram& program, const Refutation& refutation, const char* function);

/// The messages of one direction from one rank to another, which arrive in the order of their sending.
struct Stream {
  int from = -1;
  int to = -1;
  bool forward = true;
  auto operator<=>(const Stream&) const = default;
};

[[nodiscard]] inline int rank_of(const StepProgram& program, int chunk) {
  return program.rank_of_chunk[static_cast<std::size_t>(chunk)];
}
/// The chunk at the other end of a message: SEND_F and RECV_B of chunk c have c + 1, the others c - 1.
[[nodiscard]] int other_chunk(const Action& message);
/// The stream of a message of a program with a valid structure.
[[nodiscard]] Stream stream_of(const StepProgram& program, const Action& message);
/// The action at the other end: of 0SEND_F1 it is 1RECV_F1.
[[nodiscard]] Action counterpart(const Action& message);

}  // namespace zeroth
