// Memory access of cast_range; included once per instruction set.
#include <kernels/cast/cast_math.h>
#include <kernels/cast/cast_variants.h>
#include <kernels/common/loops.h>

namespace zeroth::kernels {
namespace {

template <template <class> class V, class Types>
void cast_typed(const detail::CastArgs& args) {
  auto* const dst = static_cast<typename Types::Out*>(args.dst);
  const auto* const src = static_cast<const typename Types::In*>(args.src);
  for_each_written<V, typename Types::Wide>(dst, args.n, [&](auto width, std::int64_t i, auto stores) {
    write<stores.kStream>(decltype(width)::Vector::load(src + i), dst + i);
  });
}

template <template <class> class V>
void cast_any(const detail::CastArgs& args) {
  with_cast_types(args.src_dtype, args.dst_dtype, [&](auto types) { cast_typed<V, decltype(types)>(args); });
}

}  // namespace
}  // namespace zeroth::kernels
