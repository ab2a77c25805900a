// Memory access of cast_range; included once per instruction set.
#include <kernels/cast/cast_variants.h>
#include <kernels/common/loops.h>

namespace zeroth::kernels {
namespace {

/// Wide: the type of the vector, which loads In and stores Out.
template <template <class> class V, class Wide, class Out, class In>
void cast_typed(const detail::CastArgs& args) {
  Out* const dst = static_cast<Out*>(args.dst);
  const In* const src = static_cast<const In*>(args.src);
  for_each_written<V, Wide>(dst, args.n, [&](auto width, std::int64_t i, auto stores) {
    write<stores.kStream>(decltype(width)::Vector::load(src + i), dst + i);
  });
}

template <template <class> class V>
void cast_any(const detail::CastArgs& args) {
  const bool to_bf16 = args.dst_dtype == DType::kBFloat16;
  const bool to_fp32 = args.dst_dtype == DType::kFloat32;
  switch (args.src_dtype) {
    case DType::kFloat64:
      return cast_typed<V, double, float, double>(args);
    case DType::kBFloat16:
      return to_fp32 ? cast_typed<V, float, float, BFloat16>(args)
                     : cast_typed<V, double, double, BFloat16>(args);
    default:
      return to_bf16 ? cast_typed<V, float, BFloat16, float>(args)
                     : cast_typed<V, double, double, float>(args);
  }
}

}  // namespace
}  // namespace zeroth::kernels
