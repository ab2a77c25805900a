// StepProgram: what every rank of a pipeline does in one step, in order. A value: schedules make it, passes add to it,
// verify() refutes it, simulate() times it, and the engine runs no other.
//
//   zeroth-program 1 schedule=1f1b ranks=2 micro_batches=2 chunks=0,1
//   0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE STEP
//   1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP
//
// The first line of a program that trains with gradients of older parameters ends with the word "inexact". It has one
// of two forms:
//   - several steps in a list, also between a forward and its backward: what unrolled() gives; it is simulated, not run
//   - one step, as above, that the engine runs again and again, with "late=" before that word: a number for each chunk.
//     Backwards of a chunk with late=d are of the micro-batches of d steps before, see lateness()
//
//   zeroth-program 1 schedule=ouroboros ranks=2 micro_batches=1 chunks=0,1 late=1,0 inexact
//   0: 0F0 0SEND_F0 0RECOMPUTE0 0B0 0REDUCE 0RECV_B0 STEP
//   1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE STEP
#pragma once

#include <zeroth/program/action.h>

#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct StepProgram {
  std::string schedule{};  ///< its name, for messages
  int micro_batches = 1;
  std::vector<int> rank_of_chunk{};            ///< one entry a chunk
  std::vector<std::vector<Action>> actions{};  ///< one list a rank of the pipeline
  bool inexact = false;                        ///< steps lie between forwards and their backwards
  std::vector<int> late{};                     ///< so many, one entry a chunk; empty: the list has them all

  [[nodiscard]] int ranks() const { return static_cast<int>(actions.size()); }
  [[nodiscard]] int chunks() const { return static_cast<int>(rank_of_chunk.size()); }
  /// The chunks of a rank, in order.
  [[nodiscard]] std::vector<int> chunks_of(int rank) const;
  /// It has V_ actions.
  [[nodiscard]] bool shares_head() const;
  /// The largest number of `late`; 0 without.
  [[nodiscard]] int most_late() const;
  /// By how many steps the action's micro-batch is older than the step that runs it. What a chunk receives for a
  /// backward is as old as what the next chunk sends in this step: messages do not cross a STEP.
  [[nodiscard]] int lateness(const Action& action) const;
  bool operator==(const StepProgram&) const = default;
};

/// An order that is not in the program's messages: `then` starts after `first` is over. Both are computations, on any
/// ranks. Chunks of a graph that need each other's values have them, for example.
struct Dependence {
  Action first{};
  Action then{};
  bool operator==(const Dependence&) const = default;
};

/// The form above, with a line a rank.
[[nodiscard]] std::string to_text(const StepProgram& program);
/// Throws kUsage with line and word.
[[nodiscard]] StepProgram parse_program(std::string_view text);

}  // namespace zeroth
