// What went wrong on the ranks of a test, collected in one place.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

struct RankFailure {
  int rank = 0;
  std::string text{};               ///< what() of the exception, or how the process ended
  std::optional<ErrorCode> code{};  ///< if it was a zeroth::Error
};

struct RankReport {
  std::vector<RankFailure> failures{};
  std::vector<Milliseconds> ended{};  ///< by rank, since the start; of processes only

  [[nodiscard]] bool ok() const { return failures.empty(); }
  [[nodiscard]] std::string text() const {
    std::string lines;
    for (const RankFailure& failure : failures)
      lines += "rank " + std::to_string(failure.rank) + ": " + failure.text + "\n";
    return lines;
  }
  [[nodiscard]] const RankFailure* of(int rank) const {
    for (const RankFailure& failure : failures) {
      if (failure.rank == rank) return &failure;
    }
    return nullptr;
  }
  /// Throws with all texts if a rank failed.
  void require_ok() const {
    if (!ok()) throw std::runtime_error(text());
  }
};

/// Stops a rank's body with a text; works in threads and in forked processes, where GoogleTest's macros do
/// not.
inline void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

}  // namespace zeroth::test
