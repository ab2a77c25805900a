// Collects what is wrong with a document, so that it is told in one go.
#pragma once

#include <zeroth/engine/config.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::config {

class Problems {
 public:
  /// A document of nothing but errors must not make a report of its own size.
  static constexpr std::size_t kMaxListed = 50;

  explicit Problems(std::string_view origin) : origin_(origin) {}

  /// Whether the next problem will be listed; if not, its text need not be worked out.
  [[nodiscard]] bool lists_next() const { return listed_.size() < kMaxListed; }
  void add(ConfigProblem problem) {
    ++total_;
    if (lists_next()) listed_.push_back(std::move(problem));
  }
  [[nodiscard]] bool empty() const { return total_ == 0; }
  /// Whether a problem at or below `pointer` is listed; what depends on its value cannot be judged then.
  [[nodiscard]] bool touches(std::string_view pointer) const {
    return std::any_of(listed_.begin(), listed_.end(), [pointer](const ConfigProblem& problem) {
      return problem.pointer.starts_with(pointer) &&
             (problem.pointer.size() == pointer.size() || problem.pointer[pointer.size()] == '/');
    });
  }
  [[nodiscard]] const std::string& origin() const { return origin_; }
  /// Throws ConfigError if there are any.
  void raise() const {
    if (!empty()) throw ConfigError(origin_, listed_, total_);
  }

 private:
  std::string origin_;
  std::vector<ConfigProblem> listed_;
  std::size_t total_ = 0;
};

/// Text from a document made fit for a message: printable ASCII, other bytes as \xNN, at most `max_chars` and
/// "...".
[[nodiscard]] std::string printable(std::string_view text, std::size_t max_chars = 80);

}  // namespace zeroth::config
