// StepProgram: what every rank of a pipeline does in one step, in order. A value: schedules make it, passes add to it,
// verify() refutes it, simulate() times it, and the engine runs no other.
//
//   zeroth-program 1 schedule=1f1b ranks=2 micro_batches=2 chunks=0,1
//   0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE STEP
//   1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP
//
// The first line of a program that trains with gradients of older parameters ends with the word "inexact": there each
// rank steps several times, by itself, also between a forward and its backward (schedule "ouroboros").
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

  [[nodiscard]] int ranks() const { return static_cast<int>(actions.size()); }
  [[nodiscard]] int chunks() const { return static_cast<int>(rank_of_chunk.size()); }
  /// The chunks of a rank, in order.
  [[nodiscard]] std::vector<int> chunks_of(int rank) const;
  /// It has V_ actions.
  [[nodiscard]] bool shares_head() const;
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
