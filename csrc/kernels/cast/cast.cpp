#include <kernels/cast/cast.h>
#include <kernels/cast/cast_math.h>
#include <kernels/cast/cast_variants.h>
#include <kernels/common/fp_environment.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {

void cast_range(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t n, Isa isa) {
  ZR_CHECK(n >= 0, ErrorCode::kUsage, "negative element count", ErrorContext{.where = "kernels.cast"});
  ZR_CHECK(is_castable(src_dtype, dst_dtype), ErrorCode::kUsage, "no conversion between these element types",
           ErrorContext{.where = "kernels.cast",
                        .got = std::string(name_of(src_dtype)) + " -> " + std::string(name_of(dst_dtype))});
  detail::require_supported(isa, "cast");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::cast_scalar, detail::cast_avx2,
                 detail::cast_avx512)({.dst = dst, .dst_dtype = dst_dtype, .src = src, .src_dtype = src_dtype, .n = n});
}

}  // namespace zeroth::kernels
