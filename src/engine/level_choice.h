// LevelChoice: a reduction of messages for each flat, chosen anew while a run goes on: those with the fewest bytes
// whose errors add up to no more than the error of one level for all (program/compression_plan.h).
//
// What a level misses is measured on the momenta, which every rank has and checkpoints keep. So ranks choose alike
// without a word, and a run that goes on from a checkpoint chooses as it would have, where it is of a step at which
// levels are chosen.
// Ref: Alimohammadi et al., "L-GreCo", MLSys 2024.
#pragma once

#include <zeroth/compute/kernels.h>
#include <zeroth/zero/message_reduction.h>
#include <zeroth/zero/model_layout.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// Of one flat, from the most exact one on.
inline constexpr std::array<std::string_view, 3> kCompressionLevels{"int8", "int4", "one_bit"};
/// That all flats would have: its error is the budget.
inline constexpr int kUniformLevel = 1;

class LevelChoice {
 public:
  /// For flats that train; others and those of float64 have one level. Borrows `model` and `kernels`, of the host.
  LevelChoice(const ModelLayout& model, Kernels& kernels, Stream stream);

  /// `momenta`: one a flat, [length] of the accumulation dtype; null where a flat does not train.
  void choose(std::span<const std::byte* const> momenta);
  /// One a flat, into kCompressionLevels.
  [[nodiscard]] const std::vector<int>& levels() const { return levels_; }

 private:
  /// The sum of squares of what the level misses of one flat.
  [[nodiscard]] double missed(const FlatLayout& flat, int level, const float* values);

  const ModelLayout& model_;
  Kernels& kernels_;
  Stream stream_;
  std::vector<int> levels_;
};

}  // namespace zeroth
