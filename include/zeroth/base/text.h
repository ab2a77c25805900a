// Text helpers of several rooms: readable sizes, nearest name for misspelt keys, joins.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// "512 B", "12.3 KiB", "102.2 MiB", "1.50 GiB": at least three digits, and never "1024.0" if there is a larger unit.
[[nodiscard]] std::string format_bytes(std::uint64_t bytes);
/// "0x1.8p+1": the exact value of a double as C hexadecimal floating-point text.
[[nodiscard]] std::string hex_float(double value);
/// With as many digits as tell it from its neighbours: "0.25", "1e-04".
[[nodiscard]] std::string shortest_text(double value);
/// A name of a parameter without the component `_orig_mod`, which torch.compile(module) puts before those of the
/// module.
[[nodiscard]] std::string unwrapped_name(std::string_view name);
/// The candidate with the least edit distance, the first among equal ones; "" if none is near. The distance may be at
/// most a third of the longer name, and 1 is always allowed.
[[nodiscard]] std::string nearest_name(std::string_view name, std::span<const std::string> candidates);
[[nodiscard]] std::string join(std::span<const std::string> parts, std::string_view separator);
/// "[2, 3]", "[]".
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);
/// The first ten of a list, for a message: "a, b and 12 more".
[[nodiscard]] std::string few(std::span<const std::string> parts);
/// "rank 3", "ranks 1, 2", "ranks 0-7, 9"; sorted. Very many runs are shortened: "ranks 0, 2, 4, ... and 490 more".
[[nodiscard]] std::string ranks_text(std::vector<int> ranks);
/// 64-bit xxHash3 of a byte range: digests of structure, not security.
[[nodiscard]] std::uint64_t digest64(std::string_view bytes, std::uint64_t seed = 0);

}  // namespace zeroth
