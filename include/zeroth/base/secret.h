// Bytes that others must not guess.
#pragma once

#include <zeroth/base/error.h>

#include <cstddef>
#include <span>
#include <string_view>

namespace zeroth {

/// From the kernel. `purpose`: "the job id", for the kResource error where it gives none.
void fill_random(std::span<std::byte> bytes, std::string_view purpose, ErrorContext context = {});

/// Takes as long for a good guess as for a bad one of the same length.
[[nodiscard]] bool same_secret(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

}  // namespace zeroth
