// HMAC-SHA-256: proves knowledge of a secret without sending it (docs/decisions/0027-secrets-are-proved.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zeroth {

using Digest = std::array<std::uint8_t, 32>;

/// SHA-256, by libcrypto. Throws kEnvironment where that has been configured without it. Ref: FIPS 180-4.
[[nodiscard]] Digest sha256(std::string_view bytes);
/// HMAC with SHA-256; the same errors. Ref: RFC 2104.
[[nodiscard]] Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// The bytes of a digest, a secret or a nonce as a string_view; borrows `bytes`.
template <std::size_t Size>
[[nodiscard]] std::string_view as_text(const std::array<std::uint8_t, Size>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), Size};
}

}  // namespace zeroth
