// TransferClock: how long transfers were on their way, and how long somebody waited for them.
//
//   transfer a   |-----------|
//   transfer b         |----------|              |------|
//   in flight    |================|              |======|      at least one is on its way
//   waits                      |##|                             a caller stands still
//
//   hidden share = 1 - waits / in flight
//
// Queues say when the transfers of a request begin and end (IoRequest::clock), stores when they wait. An end is the
// engine's own where it knows it (threads), or when who waits sees it. Else (io_uring, aio) it is the last look at the
// queue before the one that found it: so the time in flight is never too long, and the hidden share never too large.
#pragma once

#include <zeroth/base/deadline.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

enum class IoOp : std::uint8_t;

/// A piece of a timeline.
struct TransferSpan {
  enum class Kind : std::uint8_t { kRead, kWrite, kWait };
  Kind kind = Kind::kRead;
  SteadyClock::time_point begin{};
  SteadyClock::time_point end{};
  std::uint64_t bytes = 0;  ///< 0 for a wait
  std::string name{};       ///< IoRequest::name, or that of what was waited for
};

struct TransferTimes {
  std::chrono::nanoseconds in_flight{0};
  std::chrono::nanoseconds waited{0};

  /// The part of the time in flight in which nobody waited: 0 to 1; 1 where nothing was in flight.
  [[nodiscard]] double hidden_share() const;
  TransferTimes operator-(const TransferTimes& other) const {
    return {in_flight - other.in_flight, waited - other.waited};
  }
  bool operator==(const TransferTimes&) const = default;
};

/// One thread at a time.
class TransferClock {
 public:
  using Now = std::function<SteadyClock::time_point()>;

  explicit TransferClock(Now now = &SteadyClock::now);

  [[nodiscard]] SteadyClock::time_point now() const { return now_(); }
  /// A transfer is given to an engine.
  void began(SteadyClock::time_point at) { ++open_[at]; }
  /// It has ended; `begin`: as began() was told.
  void ended(IoOp op, SteadyClock::time_point begin, SteadyClock::time_point end, std::uint64_t bytes,
             const std::string& name);
  void waited(SteadyClock::time_point begin, SteadyClock::time_point end, const std::string& what);

  /// Until now; a transfer that is on its way counts until now.
  [[nodiscard]] TransferTimes times();

  /// Keeps spans from now on, the latest `most`; 0: none. What was kept is dropped.
  void keep_spans(std::size_t most);
  [[nodiscard]] bool keeps_spans() const { return most_spans_ > 0; }
  /// In the order of their ends, as the queues told them.
  [[nodiscard]] std::vector<TransferSpan> spans() const;

 private:
  using Interval = std::pair<SteadyClock::time_point, SteadyClock::time_point>;
  void count_until(SteadyClock::time_point horizon);
  void keep(TransferSpan span);

  Now now_;
  std::map<SteadyClock::time_point, int> open_;  ///< transfers on their way, by their begin
  std::vector<Interval> closed_;                 ///< not counted yet
  SteadyClock::time_point counted_until_{};      ///< what lies before is in times_
  TransferTimes times_{};
  std::size_t most_spans_ = 0;
  std::size_t next_span_ = 0;  ///< in spans_, once it is full
  std::vector<TransferSpan> spans_;
};

}  // namespace zeroth
