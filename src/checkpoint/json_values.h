// Values of JSON that somebody else may have written: whole numbers are whole, and fit.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeroth::detail {

/// What is thrown becomes an error with the file's name.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

/// nlohmann's own conversion takes 1.5, true and 2^63 as well.
template <class Json>
[[nodiscard]] std::int64_t whole_number(const Json& json) {
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  require(json.is_number_integer() && (!json.is_number_unsigned() || json.template get<std::uint64_t>() <= kMost),
          "a number is none, or not whole, or too large");
  return json.template get<std::int64_t>();
}

template <class Json>
[[nodiscard]] int small_number(const Json& json) {
  const std::int64_t number = whole_number(json);
  require(number >= std::numeric_limits<int>::min() && number <= std::numeric_limits<int>::max(),
          "a number is too large");
  return static_cast<int>(number);
}

template <class Json>
[[nodiscard]] std::uint64_t count_of(const Json& json) {
  const std::int64_t number = whole_number(json);
  require(number >= 0, "a count is negative");
  return static_cast<std::uint64_t>(number);
}

template <class Json>
[[nodiscard]] std::vector<std::int64_t> whole_numbers(const Json& json) {
  require(json.is_array(), "a list is none");
  std::vector<std::int64_t> numbers;
  for (const Json& one : json) numbers.push_back(whole_number(one));
  return numbers;
}

}  // namespace zeroth::detail
