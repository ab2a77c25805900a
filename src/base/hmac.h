// HMAC-SHA-256: how who has a secret shows it without saying it (docs/decisions/0027-secrets-are-proved.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zeroth {

using Digest = std::array<std::uint8_t, 32>;

/// SHA-256. Ref: FIPS 180-4.
[[nodiscard]] Digest sha256(std::string_view bytes);
/// HMAC with SHA-256. Ref: RFC 2104.
[[nodiscard]] Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// Of a digest, a secret or a nonce.
template <std::size_t Size>
[[nodiscard]] std::string_view as_text(const std::array<std::uint8_t, Size>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), Size};
}

}  // namespace zeroth
