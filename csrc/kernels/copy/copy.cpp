#include <kernels/copy/copy.h>
#include <kernels/copy/copy_variants.h>
#include <zeroth/base/error.h>

#include <cstring>

namespace zeroth::kernels {

void detail::copy_scalar(void* dst, const void* src, std::int64_t bytes) {
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
}

void copy_stream(void* dst, const void* src, std::int64_t bytes, Isa isa) {
  ZR_CHECK(bytes >= 0, ErrorCode::kUsage, "negative byte count", ErrorContext{.where = "kernels.copy_stream"});
  detail::require_supported(isa, "copy_stream");
  if (bytes == 0) {
    return;
  }
  detail::select(isa, detail::copy_scalar, detail::copy_avx2, detail::copy_avx512)(dst, src, bytes);
}

}  // namespace zeroth::kernels
