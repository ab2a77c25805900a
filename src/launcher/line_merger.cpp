#include "launcher/line_merger.h"

#include "hosts/rank_list.h"

#include <fmt/format.h>

#include <algorithm>

namespace zeroth::launcher {
namespace {

/// A flood of different lines must not be searched for ever.
constexpr std::size_t kMostWaiting = 1024;
/// Nor held: what waits here does not count as waiting to be written, so nobody would stop reading.
constexpr std::size_t kMostWaitingBytes = std::size_t{1} << 20;

}  // namespace

void LineMerger::add(int rank, std::string_view line, TimePoint now) {
  if (waiting_.add(rank, line, now + kMergeWindow)) waiting_bytes_ += line.size();
  while (waiting_.size() > kMostWaiting || waiting_bytes_ > kMostWaitingBytes) write_first();
}

void LineMerger::flush(TimePoint now) {
  while (!waiting_.empty() && (waiting_.first().due <= now || waiting_.first().by.size() == num_ranks_)) write_first();
}

void LineMerger::flush_all() {
  while (!waiting_.empty()) write_first();
}

void LineMerger::write_first() {
  auto [line, ranks, due] = waiting_.take_first();
  std::ranges::sort(ranks);
  waiting_bytes_ -= line.size();
  sink_->queue() += fmt::format("[{}{}{}] {}", mark_, ranks.size() > 1 ? "ranks " : "", describe_ranks(ranks), line);
}

}  // namespace zeroth::launcher
