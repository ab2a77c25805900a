#include <zeroth/base/secret.h>

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

namespace zeroth {

void fill_random(std::span<std::byte> bytes, std::string_view purpose, ErrorContext context) {
  if (::getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size())) return;
  throw Error(ErrorCode::kResource, "no random bytes for " + std::string(purpose) + ": " + errno_text(errno),
              std::move(context));
}

bool same_secret(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  std::byte difference{a.size() == b.size() ? std::uint8_t{0} : std::uint8_t{1}};
  for (std::size_t index = 0; index < std::min(a.size(), b.size()); ++index) difference |= a[index] ^ b[index];
  return difference == std::byte{0};
}

}  // namespace zeroth
