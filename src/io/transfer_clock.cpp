#include <zeroth/io/io_queue.h>
#include <zeroth/io/transfer_clock.h>

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

constexpr std::size_t kMostClosed = 1024;  // then what is over is summed up

}  // namespace

double TransferTimes::hidden_share() const {
  if (in_flight.count() <= 0) return 1.0;
  return std::clamp(1.0 - static_cast<double>(waited.count()) / static_cast<double>(in_flight.count()), 0.0, 1.0);
}

TransferClock::TransferClock(Now now) : now_(std::move(now)), counted_until_(now_()) {}

void TransferClock::ended(IoOp op, SteadyClock::time_point begin, SteadyClock::time_point end, std::uint64_t bytes,
                          const std::string& name) {
  if (const auto open = open_.find(begin); open != open_.end() && --open->second == 0) open_.erase(open);
  closed_.emplace_back(begin, end);
  // Later intervals begin with an open one at the earliest: what lies before is final.
  if (closed_.size() >= kMostClosed) count_until(open_.empty() ? now() : open_.begin()->first);
  if (keeps_spans()) {
    if (end == begin) end = now();  // nobody looked meanwhile: it is drawn to the look that found it
    keep({.kind = op == IoOp::kRead ? TransferSpan::Kind::kRead : TransferSpan::Kind::kWrite,
          .begin = begin,
          .end = end,
          .bytes = bytes,
          .name = name});
  }
}

void TransferClock::waited(SteadyClock::time_point begin, SteadyClock::time_point end, const std::string& what) {
  times_.waited += std::max(SteadyClock::duration{0}, end - begin);
  if (keeps_spans()) keep({.kind = TransferSpan::Kind::kWait, .begin = begin, .end = end, .bytes = 0, .name = what});
}

void TransferClock::count_until(SteadyClock::time_point horizon) {
  std::ranges::sort(closed_);
  SteadyClock::time_point counted = counted_until_;
  std::vector<Interval> rest;
  for (const auto& [begin, end] : closed_) {
    const auto from = std::max(begin, counted);
    const auto to = std::min(end, horizon);
    if (to > from) {
      times_.in_flight += to - from;
      counted = to;
    }
    if (end > horizon) rest.emplace_back(std::max(begin, horizon), end);
  }
  closed_ = std::move(rest);
  counted_until_ = std::max(counted_until_, horizon);
}

TransferTimes TransferClock::times() {
  const auto until = now();
  if (!open_.empty()) closed_.emplace_back(open_.begin()->first, until);
  count_until(until);
  return times_;
}

void TransferClock::keep_spans(std::size_t most) {
  most_spans_ = most;
  next_span_ = 0;
  spans_.clear();
}

void TransferClock::keep(TransferSpan span) {
  if (spans_.size() < most_spans_) {
    spans_.push_back(std::move(span));
    return;
  }
  spans_[next_span_] = std::move(span);
  next_span_ = (next_span_ + 1) % most_spans_;
}

std::vector<TransferSpan> TransferClock::spans() const {
  std::vector<TransferSpan> ordered(spans_.begin() + static_cast<std::ptrdiff_t>(next_span_), spans_.end());
  ordered.insert(ordered.end(), spans_.begin(), spans_.begin() + static_cast<std::ptrdiff_t>(next_span_));
  return ordered;
}

}  // namespace zeroth
