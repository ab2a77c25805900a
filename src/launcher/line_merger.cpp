#include "launcher/line_merger.h"

#include <fmt/format.h>

#include <algorithm>

namespace zeroth::launcher {
namespace {

/// A flood of different lines must not be searched for ever.
constexpr std::size_t kMostWaiting = 1024;
/// Nor held: what waits here does not count as waiting to be written, so nobody would stop reading.
constexpr std::size_t kMostWaitingBytes = std::size_t{1} << 20;

}  // namespace

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t begin = 0; begin < ranks.size();) {
    std::size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", ranks[begin]);
    if (end - begin > 1) text += fmt::format("-{}", ranks[end - 1]);
    begin = end;
  }
  return text;
}

void LineMerger::add(int rank, std::string_view line, TimePoint now) {
  // After everything that this rank has written before: so its lines stay in order.
  auto from = waiting_.end();
  while (from != waiting_.begin() && std::ranges::find(std::prev(from)->ranks, rank) == std::prev(from)->ranks.end()) --from;
  const auto same = std::find_if(from, waiting_.end(), [line](const Entry& entry) { return entry.line == line; });
  if (same != waiting_.end()) {
    same->ranks.push_back(rank);
  } else {
    waiting_bytes_ += line.size();
    waiting_.push_back({.line = std::string(line), .ranks = {rank}, .due = now + kMergeWindow});
  }
  while (waiting_.size() > kMostWaiting || waiting_bytes_ > kMostWaitingBytes) write_first();
}

void LineMerger::flush(TimePoint now) {
  while (!waiting_.empty() && (waiting_.front().due <= now || waiting_.front().ranks.size() == num_ranks_)) write_first();
}

void LineMerger::flush_all() {
  while (!waiting_.empty()) write_first();
}

std::optional<LineMerger::TimePoint> LineMerger::next() const {
  if (waiting_.empty()) {
    return std::nullopt;
  }
  return waiting_.front().due;
}

void LineMerger::write_first() {
  Entry& entry = waiting_.front();
  std::ranges::sort(entry.ranks);
  waiting_bytes_ -= entry.line.size();
  sink_->queue() += fmt::format("[{}{}] {}", entry.ranks.size() > 1 ? "ranks " : "", describe_ranks(entry.ranks), entry.line);
  waiting_.pop_front();
}

}  // namespace zeroth::launcher
