// The arithmetic of gradient buckets for one vector (or lane) of elements, and their types.
#pragma once

#include <kernels/common/lane.h>
#include <zeroth/base/dtype.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr bool is_bucketed(DType src, DType dst, bool add) {
  return is_trained(src) && (dst == accumulation_dtype(src) || (!add && dst == src));
}

/// SumType: the type of the lanes, which load In and store Out. Gradients are added to sums alone.
template <class SumType, class OutType, class InType>
struct BucketTypes {
  using Sum = SumType;
  using Out = OutType;
  using In = InType;
  static constexpr bool kAddable = sizeof(Out) == sizeof(Sum);
};

/// Calls body(BucketTypes<...>{}) for a pair of types that is_bucketed.
template <class Body>
ZR_INLINE auto with_bucket_types(DType src, DType dst, const Body& body) {
  switch (src) {
    case DType::kFloat64:
      return body(BucketTypes<double, double, double>{});
    case DType::kBFloat16:
      return dst == DType::kBFloat16 ? body(BucketTypes<float, BFloat16, BFloat16>{})
                                     : body(BucketTypes<float, float, BFloat16>{});
    case DType::kFloat16:
      return dst == DType::kFloat16 ? body(BucketTypes<float, Float16, Float16>{})
                                    : body(BucketTypes<float, float, Float16>{});
    default:
      return body(BucketTypes<float, float, float>{});
  }
}

/// The bucket's value after a gradient was added.
template <class W>
ZR_HOST_DEVICE ZR_INLINE W bucket_sum(W bucket, W gradient) {
  return canonical(bucket + gradient);
}

}  // namespace
}  // namespace zeroth::kernels
