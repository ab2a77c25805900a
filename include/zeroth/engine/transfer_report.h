// What moved between memory and files, beside what the plan says, and how much of it the training waited for.
#pragma once

#include <zeroth/io/transfer_clock.h>
#include <zeroth/offload/state_store.h>
#include <zeroth/zero/file_traffic.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// One set of states that has blocks in files.
struct TransferRow {
  std::string set{};  ///< "optimizer" (with masters), "parameters", "activations"
  /// The formula of a step, see plan_file_traffic(): needed_bytes and changed_bytes of a step are equal to it. Of
  /// activations there is none: the model decides what it saves.
  std::optional<FileTraffic> planned{};
  StoreCounters last_step{};
  StoreCounters all{};  ///< since the engine was made, or its counters were reset
};

/// Of one rank. Sets without files have no row. Waits and times of activations are apart: they have a queue of their
/// own.
struct TransferReport {
  std::vector<TransferRow> rows{};
  TransferTimes last_step{};  ///< of optimizer and parameters, which have one queue
  TransferTimes all{};
  TransferTimes activations_last_step{};
  TransferTimes activations_all{};

  [[nodiscard]] const TransferRow* row(std::string_view set) const;
};

/// A table. Several lines, no trailing newline; "" without rows.
[[nodiscard]] std::string to_text(const TransferReport& report);

}  // namespace zeroth
