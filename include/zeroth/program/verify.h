// Verifier: refutes a program that would hang, compute in a wrong order or lose a message, before any rank runs it.
//
// What a program means. Every rank does its actions in order. Sends never wait: what is sent is kept until it is
// received. Receives wait. The messages of one direction (F or B) from one rank to another arrive in the order in which
// they are sent. All else of an action is the business of its own rank.
//
// The collectives of a split output layer (V_INPUT, V_SUM, V_GRAD) do not wait either: what needs their result does.
// The same holds for UNSHARD, REDUCE, FETCH and FLUSH, which concern one rank alone as far as a pipeline goes.
//
// What holds in a program that is not refuted:
//   - every chunk has every micro-batch once: F, then B, or F, then I, then W; of forwards alone, F
//   - what a computation needs is there: the chunk before, on this rank or received; backwards the chunk after
//   - every send is received, every receive has its send, in the same order; none goes to the rank itself
//   - no ranks wait for each other, the given dependences included
//   - parameters: UNSHARD and RESHARD of a chunk alternate and begin with UNSHARD; where a chunk has them, it is
//     unsharded at every computation but W, which reads none
//   - activations are there at the backward: after a FLUSH comes the FETCH; RECOMPUTE lies between F and B or I
//   - FETCH and FLUSH of the states of a chunk alternate, with STEP between them
//   - REDUCE of a chunk comes after its last B or W, once a step; if one chunk has it, all have it
//   - STEP is the last action of every rank or of none, but for FLUSH of states; a program that is inexact has several,
//     or late gradients: then all this holds of several steps one after the other, see unrolled(), and places are there
//   - a split output layer: every rank has V_INPUT, V_S, V_SUM and V_T of every micro-batch, in this order, and either
//     all have V_GRAD or none; all ranks have the three collectives in the same order; the backward of the last chunk
//     comes after V_GRAD, or after V_SUM without it
//   - a rank never holds the activations of more (chunk, micro-batch) pairs than it may; a pair is held from its F to
//     its B or W, but not between FLUSH and FETCH
#pragma once

#include <zeroth/program/step_program.h>

#include <optional>
#include <string>
#include <vector>

namespace zeroth {

struct VerifyOptions {
  bool forwards_only = false;             ///< no backwards, as in an evaluation
  std::vector<int> in_flight{};           ///< largest number of held pairs, one entry a rank; empty: any
  std::vector<Dependence> dependences{};  ///< more that computations wait for
};

struct Refutation {
  struct Place {
    int rank = -1;
    int index = -1;  ///< of the action in its rank's list; its length if an action is missing at the end
    std::string action{};
    bool operator==(const Place&) const = default;
  };
  std::string what{};           ///< one line
  std::vector<Place> places{};  ///< one, or the two in conflict
  std::string expected{};
};

/// The first reason why this program must not run; none if it may. Time: linear in the number of actions.
[[nodiscard]] std::optional<Refutation> refute(const StepProgram& program, const VerifyOptions& options = {});
/// Throws kUsage with what refute() finds: who has the ranks, got has the actions with their neighbours.
void verify(const StepProgram& program, const VerifyOptions& options = {});

}  // namespace zeroth
