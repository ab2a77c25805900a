// How a wait for another rank begins: it looks for a while, and only then sleeps.
#pragma once

#include <chrono>
#include <optional>

namespace zeroth::detail {

/// Waking a sleeper takes some 50 us; a rank that looks finds what it waits for at once, and takes the time of whoever
/// else wants its processor.
struct Polling {
  std::chrono::microseconds time{};
  bool yields = false;  ///< there are more ranks than processors: perhaps it is the awaited rank that wants this one

  /// Between two looks.
  void pause() const noexcept;
};

/// `wanted`, else 20 us if each of `ranks_on_host` ranks has a processor (cores_of_this_rank), else 50 us in which it
/// yields its own.
[[nodiscard]] Polling polling_of(std::optional<std::chrono::microseconds> wanted, int ranks_on_host);

}  // namespace zeroth::detail
