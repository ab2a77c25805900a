#include "sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

namespace gpt {

std::size_t sample_index(std::span<const double> logits, double temperature, double random) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  const auto best = static_cast<std::size_t>(std::distance(logits.begin(), largest));
  if (temperature <= 0.0) {
    return best;
  }
  std::vector<double> weights(logits.size());
  double total = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weights[i] = std::exp((logits[i] - *largest) / temperature);
    total += weights[i];
  }
  double left = random * total;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    left -= weights[i];
    if (left < 0.0) {
      return i;
    }
  }
  return best;  // rounding left a crumb
}

std::string printable(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n' || c == '\t' || (byte >= 0x20 && byte < 0x7f)) {
      text += c;
    } else {
      fmt::format_to(std::back_inserter(text), "\\x{:02x}", byte);
    }
  }
  return text;
}

}  // namespace gpt
