#include "doctor/units.h"

#include <fmt/format.h>

#include <array>
#include <cstddef>

namespace zeroth::doctor {
namespace {

/// Three digits, whatever comes before the point.
std::string three_digits(double value) {
  return value < 9.995   ? fmt::format("{:.2f}", value)
         : value < 99.95 ? fmt::format("{:.1f}", value)
                         : fmt::format("{:.0f}", value);
}

}  // namespace

std::string rate_text(double bytes_per_s) {
  constexpr std::array kUnits{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  std::size_t unit = 0;
  for (; bytes_per_s >= 999.5 && unit + 1 < kUnits.size(); ++unit) bytes_per_s /= 1000;
  return three_digits(bytes_per_s) + " " + kUnits.at(unit);
}

std::string latency_text(double microseconds) {
  return microseconds < 999.5 ? three_digits(microseconds) + " us" : three_digits(microseconds / 1000) + " ms";
}

std::string seconds_text(double seconds) {
  return seconds < 0.1 ? three_digits(seconds * 1000) + " ms" : three_digits(seconds) + " s";
}

}  // namespace zeroth::doctor
