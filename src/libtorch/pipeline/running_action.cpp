#include "libtorch/pipeline/running_action.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace zeroth::libtorch {
namespace {

// 5 bits of kind, 1 of an evaluation, 11 of the stage, 11 of their number, 14 of the chunk, 22 of the micro-batch. Kind
// and the last two are one more, so that 0 is none.
constexpr unsigned kKindBits = 5;
constexpr unsigned kStageBits = 11;
constexpr unsigned kChunkBits = 14;
constexpr unsigned kMicroBatchBits = 22;
static_assert(kKindBits + 1 + 2 * kStageBits + kChunkBits + kMicroBatchBits == 64);

constexpr std::array<std::string_view, static_cast<std::size_t>(ActionKind::kStep) + 1> kMeanings{
    "the forward of",
    "the backward of",
    "the backward to the input of",
    "the backward to the weights of",
    "sends the output of",
    "receives the input of",
    "sends the gradient of the input of",
    "receives the gradient of the output of",
    "gathers the parameters of",
    "gives back the parameters of",
    "sums the gradients of",
    "brings back what was moved away of",
    "moves away what is kept of",
    "computes again the forward of",
    "gets the input of the split output layer for",
    "computes its slice of the scores of",
    "combines the scores of",
    "computes the gradients of its slice of the output layer for",
    "sums the gradient of the input of the output layer for",
    "the update"};

class Packer {
 public:
  void put(int value, unsigned bits) noexcept {
    const ActionWord largest = (ActionWord{1} << bits) - 1;
    word_ = word_ << bits | std::min(static_cast<ActionWord>(std::max(value, 0)), largest);
  }
  [[nodiscard]] ActionWord word() const noexcept { return word_; }

 private:
  ActionWord word_ = 0;
};

int take(ActionWord& word, unsigned bits) noexcept {
  const auto value = static_cast<int>(word & ((ActionWord{1} << bits) - 1));
  word >>= bits;
  return value;
}

}  // namespace

ActionWord word_of(const RunningAction& running) noexcept {
  Packer packer;
  packer.put(static_cast<int>(running.action.kind) + 1, kKindBits);
  packer.put(running.trains ? 0 : 1, 1);
  packer.put(running.stage, kStageBits);
  packer.put(running.stages, kStageBits);
  packer.put(running.action.chunk + 1, kChunkBits);
  packer.put(running.action.micro_batch + 1, kMicroBatchBits);
  return packer.word();
}

RunningAction running_of(ActionWord word) noexcept {
  RunningAction running;
  running.action.micro_batch = take(word, kMicroBatchBits) - 1;
  running.action.chunk = take(word, kChunkBits) - 1;
  running.stages = take(word, kStageBits);
  running.stage = take(word, kStageBits);
  running.trains = take(word, 1) == 0;
  running.action.kind =
      static_cast<ActionKind>(std::clamp(take(word, kKindBits) - 1, 0, static_cast<int>(ActionKind::kStep)));
  return running;
}

ActionText text_of(ActionWord word) {
  const RunningAction running = running_of(word);
  const auto& [kind, chunk, micro_batch] = running.action;
  std::string about = "stage " + std::to_string(running.stage) + " of " + std::to_string(running.stages) + ": ";
  about += kMeanings[static_cast<std::size_t>(kind)];
  if (chunk >= 0) about += " chunk " + std::to_string(chunk);
  if (micro_batch >= 0) about += (chunk >= 0 ? ", " : " ") + ("micro-batch " + std::to_string(micro_batch));
  return {.name = to_text(running.action), .about = std::move(about), .trains = running.trains};
}

Phase phase_of(const RunningAction& running) noexcept {
  if (!running.trains) return Phase::kEvaluation;
  switch (running.action.kind) {
    case ActionKind::kForward:
    case ActionKind::kSendForward:
    case ActionKind::kRecvForward:
      return Phase::kForward;
    case ActionKind::kStep:
      return Phase::kStep;
    case ActionKind::kUnshard:
      return Phase::kForward;
    default:
      return Phase::kBackward;
  }
}

}  // namespace zeroth::libtorch
