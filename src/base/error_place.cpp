#include <zeroth/base/error_place.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

namespace zeroth {
namespace {

template <class Number>
std::optional<Number> number_after(std::string_view text, std::string_view word) {
  const std::size_t at = text.find(word);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + word.size());
  Number number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  return parsed.ec == std::errc() ? std::optional(number) : std::nullopt;
}

/// The first "all_gather#841".
std::string call_in(std::string_view text) {
  constexpr std::string_view kName = "abcdefghijklmnopqrstuvwxyz_";
  constexpr std::string_view kDigits = "0123456789";
  for (std::size_t sign = text.find('#'); sign != std::string_view::npos; sign = text.find('#', sign + 1)) {
    const std::size_t before = text.substr(0, sign).find_last_not_of(kName);
    const std::size_t begin = before == std::string_view::npos ? 0 : before + 1;
    const std::size_t end = std::min(text.find_first_not_of(kDigits, sign + 1), text.size());
    if (begin < sign && end > sign + 1) return std::string(text.substr(begin, end - begin));
  }
  return "";
}

}  // namespace

ErrorPlace place_of(const ErrorContext& context) {
  std::string op = call_in(context.expected);
  if (op.empty()) op = call_in(context.where);
  return {.rank = number_after<int>(context.who, "rank "),
          .step = number_after<std::int64_t>(context.who, "step "),
          .op = std::move(op)};
}

}  // namespace zeroth
