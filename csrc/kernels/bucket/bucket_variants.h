// The compiled variants of bucket_store, bucket_add and fill_zero, without checks and floating-point environment.
#pragma once

#include <kernels/bucket/bucket.h>

namespace zeroth::kernels::detail {

struct BucketArgs {
  void* dst;
  DType dst_dtype;
  const void* src;
  DType src_dtype;
  std::int64_t n;
  bool add;
};

std::int64_t bucket_scalar(const BucketArgs& args);
std::int64_t bucket_avx2(const BucketArgs& args);
std::int64_t bucket_avx512(const BucketArgs& args);

void fill_zero_scalar(void* dst, std::int64_t bytes);
void fill_zero_avx2(void* dst, std::int64_t bytes);
void fill_zero_avx512(void* dst, std::int64_t bytes);

}  // namespace zeroth::kernels::detail
