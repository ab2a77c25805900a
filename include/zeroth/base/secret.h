// Random bytes and comparison of secrets.
#pragma once

#include <zeroth/base/error.h>

#include <cstddef>
#include <span>
#include <string_view>

namespace zeroth {

/// Fills `bytes` with random bytes of the kernel. Throws kResource if it gives none, with `purpose` ("the job id").
void fill_random(std::span<std::byte> bytes, std::string_view purpose, ErrorContext context = {});

/// Compares two secrets. The time depends on their length only.
[[nodiscard]] bool same_secret(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

}  // namespace zeroth
