#include <kernels/bucket/bucket.h>
#include <kernels/bucket/bucket_variants.h>
#include <kernels/common/fp_environment.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {
namespace {

std::int64_t run(const detail::BucketArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.bucket"};
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(is_trained(args.src_dtype), ErrorCode::kUsage, "gradients are fp64, fp32, bf16 or fp16", where);
  ZR_CHECK(args.dst_dtype == accumulation_dtype(args.src_dtype) || args.dst_dtype == args.src_dtype, ErrorCode::kUsage,
           "a bucket has the dtype of its gradients or of their sums", where);
  detail::require_supported(isa, "bucket");
  const detail::FpEnvironment environment;
  return detail::select(isa, detail::bucket_scalar, detail::bucket_avx2, detail::bucket_avx512)(args);
}

}  // namespace

std::int64_t bucket_store(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t n, Isa isa) {
  return run({.dst = dst, .dst_dtype = dst_dtype, .src = src, .src_dtype = src_dtype, .n = n, .add = false}, isa);
}

std::int64_t bucket_add(void* dst, const void* src, DType src_dtype, std::int64_t n, Isa isa) {
  const DType sum = accumulation_dtype(src_dtype);
  return run({.dst = dst, .dst_dtype = sum, .src = src, .src_dtype = src_dtype, .n = n, .add = true}, isa);
}

void fill_zero(void* dst, std::int64_t bytes, Isa isa) {
  ZR_CHECK(bytes >= 0, ErrorCode::kUsage, "negative byte count", ErrorContext{.where = "kernels.fill_zero"});
  detail::require_supported(isa, "fill_zero");
  detail::select(isa, detail::fill_zero_scalar, detail::fill_zero_avx2, detail::fill_zero_avx512)(dst, bytes);
}

}  // namespace zeroth::kernels
