// The compiled variants behind topk.h: contracts as there, without its checks and its floating-point environment.
#pragma once

#include <kernels/topk/topk.h>

namespace zeroth::kernels::detail {

void topk_count_scalar(const TopkCountArgs& args);
void topk_count_avx2(const TopkCountArgs& args);
void topk_count_avx512(const TopkCountArgs& args);
std::int64_t topk_take_scalar(const TopkTakeArgs& args);
std::int64_t topk_take_avx2(const TopkTakeArgs& args);
std::int64_t topk_take_avx512(const TopkTakeArgs& args);
/// All messages of a range, as topk_count() at level 0 makes them, and those of them whose magnitude has at least the
/// bits of `least`: their number, of which `capacity` are written.
struct TopkCollectArgs {
  const void* src = nullptr;
  DType src_dtype = DType::kFloat32;
  float* error = nullptr;
  std::int64_t n = 0;
  std::uint32_t least = 0;
  std::int32_t* places = nullptr;
  float* values = nullptr;
  std::int64_t capacity = 0;
};
std::int64_t topk_collect_scalar(const TopkCollectArgs& args);
std::int64_t topk_collect_avx2(const TopkCollectArgs& args);
std::int64_t topk_collect_avx512(const TopkCollectArgs& args);
/// One for all: it goes from place to place.
void topk_add_scalar(const TopkAddArgs& args);

}  // namespace zeroth::kernels::detail
