#include <zeroth/base/secret.h>

#include <openssl/crypto.h>
#include <sys/random.h>

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
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace zeroth
