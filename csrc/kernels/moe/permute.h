// Rows of tokens to the slots of their experts and back. Slots and entries (t * k + j) are those of dispatch.h.
//
//   permute            out[slot] = in[source_of[slot] / k], or that times weights[source_of[slot]]
//   unpermute          out[t] = sum of weights[t, j] * in[slot_of[t, j]] for j = 0, 1, ... with a slot; without weights
//                      they are 1
//
// and their gradients:
//
//   of permute         d_in = unpermute(d_out) with the same weights; d weights = unpermute_weights(d_out as `in`, in
//   as
//                      `d_out`)
//   of unpermute       d_in[slot] = weights[t, j] * d_out[t]: permute(d_out) with the weights;
//                      d_weights[t, j] = sum over the row of d_out[t] * in[slot]: unpermute_weights; 0 without a slot
//
// Arithmetic is in float, for float64 rows in double. A sum of unpermute starts at +0 and is rounded once by each
// fused multiply-add, then to the dtype. A sum of unpermute_weights has 16 lanes: lane l takes the columns l, l + 16,
// ... by a fused multiply-add, then a_l += a_(l + 8), and so on with 4, 2, 1. Missing columns are zeros. Rows without
// weights are moved as bytes; elsewhere NaN becomes the positive quiet NaN.
//
// All run on the calling thread. The bits depend neither on `isa` nor on the split: permute of parts of slots (with
// `out` and `source_of` of the part), the others of parts of tokens. All throw Error{kUsage} for counts out of range, a
// dtype that is not floating, an unsupported isa, or, before anything is written, a place outside the rows.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

struct PermuteArgs {
  void* out = nullptr;       ///< [slots, width]
  const void* in = nullptr;  ///< [tokens, width]
  DType dtype = DType::kFloat32;
  std::int64_t width = 0;
  std::int64_t tokens = 0;
  std::int64_t k = 1;
  std::int64_t slots = 0;
  const std::int32_t* source_of = nullptr;  ///< [slots]
  const void* weights = nullptr;            ///< [tokens, k] or null, float; double for float64 rows
};
void permute(const PermuteArgs& args, Isa isa);

struct UnpermuteArgs {
  void* out = nullptr;  ///< [tokens, width]; of unpermute_weights(): the weights' gradient [tokens, k], of their type
  const void* in = nullptr;  ///< [slots, width]
  DType dtype = DType::kFloat32;
  std::int64_t width = 0;
  std::int64_t tokens = 0;
  std::int64_t k = 1;
  std::int64_t slots = 0;
  const std::int32_t* slot_of = nullptr;  ///< [tokens, k]; negative: none
  const void* weights = nullptr;          ///< [tokens, k] or null, float; double for float64 rows
  const void* d_out = nullptr;            ///< [tokens, width], of unpermute_weights() only
};
void unpermute(const UnpermuteArgs& args, Isa isa);
void unpermute_weights(const UnpermuteArgs& args, Isa isa);

}  // namespace zeroth::kernels
