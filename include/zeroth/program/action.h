// Action: one thing that a rank does in a step of a pipeline, as a value that people can read.
//
// A model is cut into chunks, numbered in the order of its layers; a batch is cut into micro-batches. Chunk c of micro-
// batch m is computed by the rank that has the chunk.
//
//   text          meaning
//   2F0           forward of chunk 2, micro-batch 0
//   2B0           backward: gradients of its input and of its weights
//   2I0           the part of the backward that gives the gradient of the input
//   2W0           the part that gives the gradients of the weights
//   2SEND_F0      sends the output of chunk 2 to the rank that has chunk 3
//   2RECV_F0      receives the input of chunk 2
//   2SEND_B0      sends the gradient of the input of chunk 2 to the rank that has chunk 1
//   2RECV_B0      receives the gradient of the output of chunk 2
//   2UNSHARD      gathers the parameters of chunk 2 and keeps them; 2RESHARD gives them back
//   2REDUCE       the gradients of chunk 2 are complete: their sums over the data-parallel ranks begin
//   2RECOMPUTE0   computes again what the backward of chunk 2, micro-batch 0, needs
//   2FLUSH0       moves the activations of chunk 2, micro-batch 0, to the host; 2FETCH0 brings them back
//   2FETCH        brings the offloaded states of chunk 2; 2FLUSH moves them away
//   STEP          all ranks judge the step and update their parameters
//
// Where the output layer is split over all ranks (passes.h, add_vocabulary()), every rank also has, of no chunk:
//   V_INPUT0      gets the output of the last chunk, micro-batch 0, from its rank
//   V_S0          its slice of the logits, their largest value and their sum
//   V_SUM0        combines those of all ranks
//   V_T0          the gradients of its slice of the weights; of the layer's input too where V_GRAD follows
//   V_GRAD0       the gradient of the layer's input, summed over all ranks, goes to the rank of the last chunk
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace zeroth {

enum class ActionKind : std::uint8_t {
  kForward,
  kBackward,
  kBackwardInput,
  kBackwardWeight,
  kSendForward,
  kRecvForward,
  kSendBackward,
  kRecvBackward,
  kUnshard,
  kReshard,
  kReduce,
  kFetch,      ///< brings what an offloaded chunk needs: of a micro-batch its activations, else its states
  kFlush,      ///< the reverse
  kRecompute,  ///< forward again, of what a backward needs
  kVocabInput,
  kVocabScores,
  kVocabSum,
  kVocabGradients,
  kVocabInputGradient,
  kStep,
};

/// "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE", "FETCH", "FLUSH",
/// "RECOMPUTE", "V_INPUT", "V_S", "V_SUM", "V_T", "V_GRAD", "STEP".
[[nodiscard]] std::string_view name_of(ActionKind kind) noexcept;

struct Action {
  ActionKind kind = ActionKind::kForward;
  int chunk = -1;        ///< -1: of none (kStep)
  int micro_batch = -1;  ///< -1: of none
  bool operator==(const Action&) const = default;
};

/// "2F0", "0UNSHARD", "STEP".
[[nodiscard]] std::string to_text(const Action& action);
/// Throws kUsage, with the text, for one that is not in the table above: with a number too much, too few or too large.
[[nodiscard]] Action parse_action(std::string_view text);

/// F, B, I and W.
[[nodiscard]] bool is_computation(ActionKind kind) noexcept;
/// F, B, I and RECOMPUTE. W has all that it needs from its I.
[[nodiscard]] bool reads_parameters(ActionKind kind) noexcept;
/// B, I and W.
[[nodiscard]] bool is_backward(ActionKind kind) noexcept;
/// SEND_F, RECV_F, SEND_B and RECV_B.
[[nodiscard]] bool is_message(ActionKind kind) noexcept;
[[nodiscard]] bool is_send(ActionKind kind) noexcept;
/// V_INPUT, V_S, V_SUM, V_T and V_GRAD.
[[nodiscard]] bool is_vocabulary(ActionKind kind) noexcept;
/// Whether an action has a chunk and a micro-batch exactly where its kind has them.
[[nodiscard]] bool has_its_numbers(const Action& action) noexcept;

}  // namespace zeroth
