// Sums over the sources of a reduction, strictly in their order, in one pass over memory.
//
//   accumulate == false:  dst[i] = (((s0[i] + s1[i]) + s2[i]) + ...)
//   accumulate == true:   dst[i] = dst[i] + (((s0[i] + s1[i]) + s2[i]) + ...)     the sum of the sources comes first
//
// With groups there are two levels: first the sum of each group of consecutive sources, then the sum of the groups in
// order.
//
// Each "+" rounds once in the type of the sum: fp32 for fp32, bf16 and fp16 sources, fp64 for fp64; integers wrap.
// A bf16 or fp16 result is the fp32 sum rounded once, to nearest even.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

struct SumSourcesArgs {
  void* dst = nullptr;  ///< [n] of `dst_dtype`; may be exactly one of the sources, else overlaps none
  DType dst_dtype = DType::kFloat32;
  bool accumulate = false;
  const void* const* sources = nullptr;  ///< [num_sources] pointers to [n] of `src_dtype`, any alignment of that type
  int num_sources = 0;                   ///< >= 1, no upper limit
  DType src_dtype = DType::kFloat32;
  const DType* src_dtypes = nullptr;  ///< [num_sources], instead of `src_dtype`: all equal, or fp32 and bf16 mixed,
                                      ///< which costs a copy in the cache
  const int* groups =
      nullptr;  ///< [num_groups] sizes of consecutive groups of sources, together num_sources; null: one group
  int num_groups = 0;
  bool read_soon = false;  ///< keep dst of any size in the caches, because it is read at once
  std::int64_t n = 0;
};

/// Sums on the calling thread. src -> dst dtypes: fp32 -> fp32 | bf16 | fp16, bf16 -> fp32 | bf16, fp16 -> fp32 | fp16,
/// fp64 -> fp64, int64 -> int64, int32 -> int32. Memory traffic: every source is read once, dst is written once (and
/// read, if accumulating); groups cost one more pass through the cache. Without accumulation and without read_soon, a
/// dst of 256 KiB and more is written with streaming stores, fenced before the return. The bits do not depend on the
/// split of a range into calls or on `isa`. A bf16 or fp16 source has the bits of its values in fp32. A NaN result is
/// the positive quiet NaN. Throws Error{kUsage} for other dtypes, num_sources < 1, n < 0, groups that do not cover all
/// sources, or an unsupported isa.
void sum_sources(const SumSourcesArgs& args, Isa isa);

}  // namespace zeroth::kernels
