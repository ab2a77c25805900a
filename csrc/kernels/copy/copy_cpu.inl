// Memory access of copy_stream; included once per wide instruction set.
#include <kernels/common/loops.h>
#include <kernels/copy/copy.h>
#include <kernels/copy/copy_variants.h>

namespace zeroth::kernels {
namespace {

/// Bytes copied in one turn of the loop, and how far ahead the source is fetched.
constexpr std::int64_t kTurnBytes = 256;
constexpr std::int64_t kPrefetchBytes = 2048;

template <template <class> class V>
void copy_any(void* dst, const void* src, std::int64_t bytes) {
  using Vector = V<std::uint32_t>;
  constexpr auto kVectorBytes = static_cast<std::int64_t>(sizeof(Vector));
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  if (bytes < kCopyStreamBytes) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  const std::int64_t head = elements_until_aligned(to, bytes);
  __builtin_memcpy(to, from, static_cast<std::size_t>(head));
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kTurnBytes; bytes -= kTurnBytes) {
    for (std::int64_t line = 0; line < kTurnBytes; line += kStreamAlign) {
      __builtin_prefetch(from + kPrefetchBytes + line, 0, 0);
    }
    Vector turn[kTurnBytes / kVectorBytes];
    for (std::int64_t k = 0; k < kTurnBytes / kVectorBytes; ++k) {
      turn[k] = Vector::load(reinterpret_cast<const std::uint32_t*>(from + k * kVectorBytes));
    }
    for (std::int64_t k = 0; k < kTurnBytes / kVectorBytes; ++k) {
      turn[k].stream(reinterpret_cast<std::uint32_t*>(to + k * kVectorBytes));
    }
    to += kTurnBytes;
    from += kTurnBytes;
  }
  stream_fence();
  __builtin_memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace
}  // namespace zeroth::kernels
