// From the chosen experts of tokens to places for their rows: a stable counting sort by expert, with a capacity.
//
// Choice j of token t is the entry t * k + j. An entry whose expert is negative is not routed. Of an expert with more
// entries than its capacity C the following keep a place, the others are dropped:
//
//   by position   the first C in the order of (j, t): first choices of all tokens go before second ones (GShard)
//   by score      the C of the greatest weights; of equal ones, those first by position; NaN is below all
//   random        the C of the least priority(seed, first_token + t, j); of equal ones, those first by position
//                 (random token selection of Z-code: a token's place in the batch does not matter)
//
// priority: x = seed + 0x9e3779b97f4a7c15 * (token * 64 + j + 1), all modulo 2^64, then
// x ^= x >> 30; x *= 0xbf58476d1ce4e5b9; x ^= x >> 27; x *= 0x94d049bb133111eb; x ^= x >> 31. So the same seed drops
// the same everywhere.
//
// Kept entries have the slots 0, 1, ... in the order of (expert, t, j): those of expert e are [offsets[e], offsets[e +
// 1]). slot_of[entry] is -1 for what has none; source_of[slot] is the entry.
//
// Ref: Lepikhin et al., GShard, ICLR 2021, algorithm 1; Rajbhandari et al., DeepSpeed-MoE, ICML 2022; Kim et al.,
// Scalable and Efficient MoE Training for Multitask Multilingual Models, 2021, section 4 (random token selection);
// Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (the finalizer).
//
// All run on the calling thread and allocate nothing. dispatch() does all; or threads share the work by experts, each
// with a workspace of its own:
//   1. dispatch_check() once
//   2. dispatch_keep() for ranges of experts
//   3. dispatch_offsets() once
//   4. dispatch_place() for ranges of experts
// All throw Error{kUsage} for counts out of range, an expert that is E or above (its token and number are named), or
// weights that are missing or of a dtype other than float32 and float64.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>

namespace zeroth::kernels {

enum class DropPolicy : std::uint8_t { kByPosition, kByScore, kRandom };

inline constexpr std::int64_t kNoCapacity = -1;

struct DispatchArgs {
  const std::int32_t* chosen = nullptr;  ///< [tokens, k]
  std::int64_t tokens = 0;               ///< tokens * k is below 2^31
  std::int64_t k = 1;                    ///< 1 to 64
  std::int64_t experts = 1;              ///< E, 1 to 2^20
  std::int64_t capacity = kNoCapacity;   ///< C from 0 on, or none
  DropPolicy policy = DropPolicy::kByPosition;
  const void* weights = nullptr;  ///< [tokens, k], by score only
  DType weights_dtype = DType::kFloat32;
  std::uint64_t seed = 0;             ///< random only
  std::int64_t first_token = 0;       ///< number of token 0 in the batch; random only
  std::int64_t* counts = nullptr;     ///< [E]: entries that have a slot
  std::int64_t* offsets = nullptr;    ///< [E + 1]
  std::int32_t* slot_of = nullptr;    ///< [tokens, k]
  std::int32_t* source_of = nullptr;  ///< [tokens, k]: offsets[E] are written
  void* workspace = nullptr;          ///< dispatch_workspace_bytes(), of 8-byte alignment
};

/// Bytes of the workspace of a call for `num_experts` experts; all of them for dispatch(). Depends on counts and
/// capacity only.
[[nodiscard]] std::size_t dispatch_workspace_bytes(const DispatchArgs& args, std::int64_t num_experts);

void dispatch(const DispatchArgs& args);

void dispatch_check(const DispatchArgs& args);
/// Writes slot_of for entries of the experts [first, last): -1 if they are dropped, else 0; and counts of these
/// experts. The range with expert 0 also writes -1 for entries that are not routed.
void dispatch_keep(const DispatchArgs& args, std::int64_t first, std::int64_t last);
void dispatch_offsets(const DispatchArgs& args);
/// Writes slot_of and source_of for kept entries of the experts [first, last).
void dispatch_place(const DispatchArgs& args, std::int64_t first, std::int64_t last);

/// Noise on a router's input [tokens, width]: dst = src * (1 - eps + 2 eps u), with u = uniform_of(s, column) of
/// common/uniform.h and s the lower half of priority(seed, first_token + t, 0): the factor is fma(2 eps, u, 1 - eps) in
/// float, the product is rounded to the dtype. Ref: Fedus et al., Switch Transformers, JMLR 2022, section 2.2.
struct JitterArgs {
  void* dst = nullptr;  ///< may be src
  const void* src = nullptr;
  DType dtype = DType::kFloat32;  ///< float32, bfloat16 or float16
  std::int64_t tokens = 0;
  std::int64_t width = 0;  ///< below 2^32
  float epsilon = 0.01F;   ///< from 0 to 1
  std::uint64_t seed = 0;
  std::int64_t first_token = 0;
};
/// Any split into parts of tokens has the same bits; nor do they depend on `isa`. The gradient of src is the same call
/// on that of dst.
void jitter(const JitterArgs& args, Isa isa);

}  // namespace zeroth::kernels
