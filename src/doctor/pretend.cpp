#include "doctor/pretend.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace zeroth::doctor {
namespace {

[[noreturn]] void refuse(std::string_view rule) {
  throw Error(ErrorCode::kEnvironment, "no rule of what the doctor can pretend",
              {.which = "ZEROTH_DOCTOR_PRETEND",
               .expected = "version=RANK:TEXT, clock=RANK:MS, slow=A-B:BYTES or silent=RANK",
               .got = "\"" + std::string(rule) + "\""});
}

template <typename Number>
Number number_of(std::string_view text, std::string_view rule) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) refuse(rule);
  return value;
}

int rank_of(std::string_view text, std::string_view rule) {
  const int rank = number_of<int>(text, rule);
  if (rank < 0) refuse(rule);
  return rank;
}

}  // namespace

double Pretence::slow(int a, int b) const {
  const auto found = slow_bytes_per_s.find(std::minmax(a, b));
  return found == slow_bytes_per_s.end() ? 0 : found->second;
}

Pretence parse_pretence(std::string_view text) {
  Pretence pretence;
  while (!text.empty()) {
    const std::string_view rule = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), rule.size() + 1));
    const std::size_t equals = rule.find('=');
    if (equals == std::string_view::npos) refuse(rule);
    const std::string_view what = rule.substr(0, equals);
    const std::string_view rest = rule.substr(equals + 1);
    if (what == "silent") {
      pretence.silent[rank_of(rest, rule)] = true;
      continue;
    }
    const std::size_t colon = rest.find(':');
    if (colon == std::string_view::npos || colon + 1 == rest.size()) refuse(rule);
    const std::string_view who = rest.substr(0, colon);
    const std::string_view value = rest.substr(colon + 1);
    if (what == "version") {
      pretence.versions[rank_of(who, rule)] = value;
    } else if (what == "clock") {
      pretence.clocks_ms[rank_of(who, rule)] = number_of<double>(value, rule);
    } else if (what == "slow") {
      const std::size_t dash = who.find('-');
      if (dash == std::string_view::npos) refuse(rule);
      const int a = rank_of(who.substr(0, dash), rule);
      const int b = rank_of(who.substr(dash + 1), rule);
      const auto rate = number_of<double>(value, rule);
      if (a == b || !std::isfinite(rate) || rate <= 0) refuse(rule);
      pretence.slow_bytes_per_s[std::minmax(a, b)] = rate;
    } else {
      refuse(rule);
    }
  }
  return pretence;
}

}  // namespace zeroth::doctor
