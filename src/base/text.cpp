#include <zeroth/base/text.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zeroth {
namespace {

constexpr std::size_t kMostRuns = 16;

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row.back();
}

}  // namespace

std::string format_bytes(std::uint64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 1023.95 and more would be printed as 1024.0.
  while (value >= (unit == 0 ? 1024.0 : 1023.95) && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : (value < 9.995 ? "%.2f %s" : "%.1f %s"), value,
                kUnits[unit]);
  return text.data();
}

std::string hex_float(double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%a", value);
  return text.data();
}

std::string shortest_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

std::string unwrapped_name(std::string_view name) {
  static constexpr std::string_view kCompiled = "_orig_mod";
  std::string plain;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part != kCompiled) {
      if (!plain.empty()) plain += '.';
      plain += part;
    }
    begin = end + 1;
  }
  return plain.empty() ? std::string(name) : plain;
}

std::string nearest_name(std::string_view name, std::span<const std::string> candidates) {
  std::string best;
  std::size_t best_distance = ~std::size_t{0};
  for (const std::string& candidate : candidates) {
    const std::size_t shorter = std::min(name.size(), candidate.size());
    const std::size_t longer = std::max(name.size(), candidate.size());
    const std::size_t allowed = std::max<std::size_t>(1, longer / 3);
    if (longer - shorter > allowed) continue;  // it takes at least so many edits
    const std::size_t distance = edit_distance(name, candidate);
    if (distance < best_distance && distance <= allowed) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string join(std::span<const std::string> parts, std::string_view separator) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty() || &part != parts.data()) text += separator;
    text += part;
  }
  return text;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::vector<std::string> extents;
  for (const std::int64_t extent : shape) extents.push_back(std::to_string(extent));
  return "[" + join(extents, ", ") + "]";
}

std::string few(std::span<const std::string> parts) {
  constexpr std::size_t kMost = 10;
  const std::string first = join(parts.first(std::min(kMost, parts.size())), ", ");
  return parts.size() > kMost ? first + " and " + std::to_string(parts.size() - kMost) + " more" : first;
}

std::string ranks_text(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  std::vector<std::string> runs;
  for (std::size_t begin = 0; begin < ranks.size();) {
    std::size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - begin < 3) end = begin + 1;
    const std::string first = std::to_string(ranks[begin]);
    if (runs.size() == kMostRuns)
      return "ranks " + join(runs, ", ") + " and " + std::to_string(ranks.size() - begin) + " more";
    runs.push_back(end - begin == 1 ? first : first + "-" + std::to_string(ranks[end - 1]));
    begin = end;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + join(runs, ", ");
}

std::uint64_t digest64(std::string_view bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace zeroth
