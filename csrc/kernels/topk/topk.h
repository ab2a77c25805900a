// The k elements of greatest magnitude, as places and values, and the error that the others leave.
//
//   message   c = source [+ error], NaN made the positive quiet NaN
//   taken     the k elements of greatest |c|; of equal ones those of lower index
//   error     0 where c was taken, else c
//   sum       dst[place] += value * factor, source by source
//
// Magnitudes are compared by their bits: NaN is above infinities, infinities are above all numbers. So what is not
// finite is sent first, and whoever sums sees it. Refs: Aji, Heafield, "Sparse Communication for Distributed Gradient
// Descent", EMNLP 2017; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (error feedback).
//
// The k-th greatest magnitude is found digit by digit, from the highest: counts of a digit among the elements that
// have the digits before it. Counts of parts of a range are added, so parts may be counted by several threads:
//
//   1. cut = topk_start(k)
//   2. for each level: topk_count() of every part, then cut = topk_next(cut, counts of all parts)
//   3. topk_take() of every part, with the ties that are its own
//
// topk() does this for one range. With room for more than k elements it guesses a magnitude below the k-th greatest
// from a sample, collects what is above in one pass, and finds the k among these; where the guess was none, it goes on
// with the digits of all. All run on the calling thread. The bits do not depend on the parts or on `isa`. All throw
// Error{kUsage} for n < 0 or above 2^31 - 1, a dtype other than float32, bfloat16 and float16, or an unsupported isa.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>
#include <span>

namespace zeroth::kernels {

/// Digits of a magnitude: 11, 10 and 10 bits.
inline constexpr int kTopkLevels = 3;
inline constexpr std::int64_t kTopkBins = 2048;

/// What is known of the k-th greatest magnitude. After kTopkLevels levels: all of it.
struct TopkCut {
  std::uint32_t prefix = 0;  ///< its digits so far, in place
  int level = 0;             ///< digits that are known
  std::int64_t left = 0;     ///< how many elements with the prefix are taken: at level kTopkLevels the ties
};
/// Throws Error{kUsage} for k < 0. At k = 0 all levels are known: nothing is taken.
[[nodiscard]] TopkCut topk_start(std::int64_t k);

struct TopkCountArgs {
  const void* src = nullptr;  ///< [n]
  DType src_dtype = DType::kFloat32;
  float* error = nullptr;  ///< [n] or null; at level 0 it becomes the message, which is `src` of all later calls
  std::int64_t n = 0;
  TopkCut cut{};
  std::int64_t* counts = nullptr;  ///< [kTopkBins]; added to
};
/// Counts the next digit of the elements that have the prefix. Throws Error{kUsage} where all digits are known, or for
/// an error at a level above 0.
void topk_count(const TopkCountArgs& args, Isa isa);

/// The cut with its next digit. Throws Error{kUsage} for counts of fewer elements than are taken.
[[nodiscard]] TopkCut topk_next(const TopkCut& cut, std::span<const std::int64_t> counts);

struct TopkTakeArgs {
  const void* message = nullptr;  ///< [n]
  DType dtype = DType::kFloat32;
  float* error = nullptr;  ///< `message`, or null
  std::int64_t n = 0;
  std::int32_t first = 0;          ///< place of element 0
  TopkCut cut{};                   ///< of level kTopkLevels; `left`: how many ties are taken here, from the first on
  std::int32_t* places = nullptr;  ///< ascending
  float* values = nullptr;         ///< beside them
  std::int64_t capacity = 0;       ///< of both: nothing is written beyond
};
/// Returns the number of elements taken. Throws Error{kUsage} where digits are missing.
std::int64_t topk_take(const TopkTakeArgs& args, Isa isa);

/// Room for the elements that a sample lets through: several times k, at most n.
[[nodiscard]] std::int64_t topk_room(std::int64_t n, std::int64_t k) noexcept;

struct TopkArgs {
  std::int32_t* places = nullptr;  ///< [max(k, room)]: k are the result, ascending; what is behind them is undefined
  float* values = nullptr;         ///< beside them
  const void* src = nullptr;       ///< [n]
  DType src_dtype = DType::kFloat32;
  float* error = nullptr;  ///< [n] or null
  std::int64_t n = 0;
  std::int64_t k = 0;     ///< 0 to n
  std::int64_t room = 0;  ///< of places and values, if they have topk_room(n, k) or more; 0: k
};
/// Throws Error{kUsage} for a k outside [0, n]. One pass over the range if there is room, else three or four. The
/// result does not depend on the room.
void topk(const TopkArgs& args, Isa isa);

struct TopkSource {
  const std::int32_t* places = nullptr;
  const float* values = nullptr;
  std::int64_t k = 0;
};

/// dst[place] = dst[place] + value * factor, for the sources in their order, each rounded once; NaN is the positive
/// quiet NaN.
struct TopkAddArgs {
  float* dst = nullptr;  ///< [n]
  const TopkSource* sources = nullptr;
  int num_sources = 0;  ///< 0 or more
  std::int64_t n = 0;
  float factor = 1.0F;
};
/// Throws Error{kUsage} for a place outside [0, n), before anything is added: places come from other ranks.
void topk_add(const TopkAddArgs& args);

}  // namespace zeroth::kernels
