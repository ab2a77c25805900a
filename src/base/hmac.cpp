#include "base/hmac.h"

#include <zeroth/base/error.h>

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <limits>
#include <tuple>

namespace zeroth {
namespace {

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

void check(bool done) {
  ZR_CHECK(done, ErrorCode::kEnvironment, "libcrypto does not compute SHA-256",
           {.hint = "look which providers OPENSSL_CONF or the system's openssl.cnf loads"});
}

}  // namespace

Digest sha256(std::string_view bytes) {
  static_assert(std::tuple_size_v<Digest> == SHA256_DIGEST_LENGTH);
  Digest digest{};
  check(::SHA256(bytes_of(bytes), bytes.size(), digest.data()) != nullptr);
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  ZR_CHECK(key.size() <= static_cast<std::size_t>(std::numeric_limits<int>::max()), ErrorCode::kUsage,
           "a key of more than 2 GiB");
  if (key.empty()) key = "";  // HMAC() takes a null pointer for no key at all
  Digest digest{};
  check(::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes_of(bytes), bytes.size(), digest.data(),
               nullptr) != nullptr);
  return digest;
}

}  // namespace zeroth
