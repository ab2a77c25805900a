// Ranks that somebody else started: each is a process that runs the same cases of the same suite, and meets the others
// in a new world for each body.
#pragma once

#include "support/rank_report.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace zeroth::test {

/// What makes groups of all ranks, each a new world; the ranks call it together.
struct StartedRank {
  std::function<std::shared_ptr<CommBackend>()> group{};  ///< for the body
  std::function<std::shared_ptr<CommBackend>()>
      group_of_report{};  ///< for what became of it, whatever that did to the body's world
};

/// Runs body(rank, backend) on this rank; every rank has the report of all.
[[nodiscard]] inline RankReport run_started_rank(const StartedRank& started, const RankBody& body,
                                                 bool abort_on_failure) {
  struct Outcome {
    std::int32_t failed = 0;
    std::int32_t code = -1;
    std::array<char, 4'088> text{};
  };
  Outcome own;
  const auto failed = [&](const char* text, int code) {
    own.failed = 1;
    own.code = code;
    std::strncpy(own.text.data(), text, own.text.size() - 1);
  };
  {
    const std::shared_ptr<CommBackend> backend = started.group();
    try {
      body(backend->rank(), backend);
    } catch (const Error& error) {
      if (abort_on_failure) backend->abort(error);
      failed(error.what(), static_cast<int>(error.code()));
    } catch (const std::exception& error) {
      if (abort_on_failure) backend->abort(Error(ErrorCode::kInternal, error.what()));
      failed(error.what(), -1);
    }
  }
  const Communicator comm(started.group_of_report());
  std::vector<Outcome> all(static_cast<std::size_t>(comm.size()));
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&own);
  comm.all_gather(std::span(bytes, sizeof own),
                  std::span(reinterpret_cast<std::uint8_t*>(all.data()), all.size() * sizeof own));
  RankReport report;
  for (int other = 0; other < comm.size(); ++other) {
    const Outcome& outcome = all[static_cast<std::size_t>(other)];
    if (outcome.failed == 0) continue;
    report.failures.push_back(
        {.rank = other,
         .text = outcome.text.data(),
         .code = outcome.code < 0 ? std::nullopt : std::optional(static_cast<ErrorCode>(outcome.code))});
  }
  return report;
}

}  // namespace zeroth::test
