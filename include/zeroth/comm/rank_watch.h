// RankWatch: what one rank is doing, for others to ask. Its threads write it; the thread of its control plane reads it
// while they compute, wait or hang. Shared by everything of the rank: transports, engines, the control plane.
//
// Cost where nothing is wrong: one store an event of the engine (enter()), less than 0.2 us a call
// (benchmarks/comm/watch_bench.cpp), two looks at a clock a wait.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/comm/flight_recorder.h>

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace zeroth {

/// Where the user's program is in a step, as its last call of the engine shows. kEvaluation: in a forward that no
/// backward follows.
enum class Phase : std::uint8_t {
  kStarting,
  kForward,
  kBackward,
  kAfterBackward,
  kStep,
  kBetweenSteps,
  kSyncPoint,
  kEvaluation
};
inline constexpr std::uint8_t kNumPhases = 8;

/// A wait as its transport describes it. `ranks` are those of the job.
struct WaitReport {
  std::string group{};         ///< "world/engine0"
  std::string call{};          ///< "all_gather#12 float32, 23 elements (92 B)", "parameters of unit block.3"
  std::vector<int> ranks{};    ///< not one of which may be missing for the wait to end; empty: not known
  bool direct = false;         ///< what these ranks do is seen at once: nothing can be on its way
  std::string calls_of{};      ///< else: the group in RankWatch::calls_begun(), "" if that does not tell
  std::uint64_t sequence = 0;  ///< and the number of the call there, from 0
  Milliseconds waited{};
  Milliseconds timeout{};
};

/// A wait as others hear of it.
struct WaitStatus {
  std::uint64_t id = 0;     ///< of this rank's waits, from 1; 0: it does not wait
  std::uint64_t looks = 0;  ///< how often it has looked in vain, about every 100 ms
  bool expired = false;     ///< its deadline has passed
  int lost =
      -1;  ///< a rank of the job that it waits for and that has given its group up or closed its connection; -1: none
  WaitReport report{};
};

/// One rank at one moment.
struct RankStatus {
  Phase phase = Phase::kStarting;
  std::int64_t step = 0;    ///< steps finished
  std::string unit{};       ///< of the phase, or ""
  std::string place{};      ///< "train.py:57 in load_batch", or "" where it was not asked for or is not known
  std::string last_call{};  ///< "all_gather#40 of world/engine0", or ""
  bool one_thread = true;   ///< no more than one thread has ever waited
  std::map<std::string, std::uint64_t> calls_begun{};  ///< by group, of transports where messages can be on their way
  WaitStatus wait{};
};

/// What the control plane has decided, as waits throw it. Its ranks are those of the job, in whatever group the wait
/// was.
class JobVerdict final : public Error {
 public:
  using Error::Error;
};

class RankWatch {
 public:
  RankWatch(int rank, int size) : rank_(rank), size_(size) {}
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] FlightRecorder& recorder() { return recorder_; }

  /// Names of an engine's units; what enter() takes as `model`.
  [[nodiscard]] int add_model(std::vector<std::string> units);
  /// Any thread; one store.
  void enter(Phase phase, int model = -1, int unit = -1) noexcept;
  /// What enter() has last been told, for resume().
  [[nodiscard]] std::uint64_t entered() const noexcept { return phase_.load(std::memory_order_relaxed); }
  void resume(std::uint64_t entered) noexcept { phase_.store(entered, std::memory_order_relaxed); }
  void finish_step(std::int64_t steps) noexcept { steps_.store(steps, std::memory_order_relaxed); }
  /// How long a wait may take: until the first step has ended, when everything is slow, another time. 0: twice as long.
  void set_first_timeout(Milliseconds timeout) noexcept {
    first_timeout_.store(timeout.count(), std::memory_order_relaxed);
  }
  [[nodiscard]] Milliseconds patience(Milliseconds timeout) const noexcept {
    if (steps_.load(std::memory_order_relaxed) > 0) return timeout;
    const std::int64_t first = first_timeout_.load(std::memory_order_relaxed);
    return first > 0 ? Milliseconds(first) : 2 * timeout;
  }

  /// All the time that this rank has waited for others.
  [[nodiscard]] std::chrono::nanoseconds waited() const noexcept {
    return std::chrono::nanoseconds(waited_ns_.load(std::memory_order_relaxed));
  }
  void add_waited(std::chrono::nanoseconds time) noexcept {
    waited_ns_.fetch_add(time.count(), std::memory_order_relaxed);
  }

  /// Where a group counts the calls that this rank has begun. `group` is the same on all its ranks, and no other
  /// group's.
  [[nodiscard]] std::shared_ptr<std::atomic<std::uint64_t>> calls_begun(const std::string& group);

  /// How to find the user's line: called on the control plane's thread with the thread that is asked about, must come
  /// back within half a second and not need what that thread may hold (the GIL). Returns "" where it does not know.
  using Locator = std::function<std::string(pid_t thread)>;
  void set_locator(Locator locator);
  /// Where there is no locator, in native programs: the program says that it is here, until it says that it is
  /// elsewhere. Any thread; some 20 ns. The arguments are the caller's place: std::source_location needs clang 16.
  void at(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
          const char* function = __builtin_FUNCTION()) noexcept;
  [[nodiscard]] RankStatus status(bool with_place);
  /// The last one, for the others: with the program's own last word of where it is, but asking nobody.
  [[nodiscard]] RankStatus goodbye();

  /// What the control plane has decided about the job: every wait that is watched, and every check(), throws it from
  /// now on as a JobVerdict. The first one stays. Any thread.
  void judge(const Error& error);
  /// Throws the verdict, if there is one. One load.
  void check() const {
    if (judged_.load(std::memory_order_acquire)) [[unlikely]]
      throw_verdict();
  }
  /// The error with the step in which this rank has it: "rank 0/4, step 120 (forward)"; as it is where that is known,
  /// or it is not of this rank alone.
  [[nodiscard]] Error dated(const Error& error) const;
  /// Writes what is known of the end of this rank: the error, `last`, how the rank was before it heard of it, and the
  /// last calls (FlightRecorder::write()). Throws kIo.
  void write_record(const std::string& path, const Error& error, const RankStatus& last) const;
  /// The user's program has been told that the job is over: an error of a wait, of a call of all ranks, or of its own.
  /// Any thread.
  void hear() const noexcept { heard_.store(true, std::memory_order_relaxed); }
  /// Groups of the job that the program has in its hands: without one it owes the others nothing.
  void take_group() noexcept { groups_.fetch_add(1, std::memory_order_relaxed); }
  void give_group() noexcept { groups_.fetch_sub(1, std::memory_order_relaxed); }
  /// A person sits in front of this process, and it must not end by itself (see ControlOptions::end_stuck_after).
  void spare() noexcept { spared_.store(true, std::memory_order_relaxed); }
  /// There is a verdict of which the program has not heard, because it does not come to a call that could throw it.
  [[nodiscard]] bool is_deaf() const noexcept {
    return judged_.load(std::memory_order_acquire) && groups_.load(std::memory_order_relaxed) > 0 &&
           !heard_.load(std::memory_order_relaxed) && !spared_.load(std::memory_order_relaxed);
  }
  /// Another rank has stopped the job or is lost, and the control plane may know why: for at most so long lets it say
  /// that, and throws what it says. Comes back at once where there is none.
  void await_verdict(Milliseconds patience) const;
  /// Called when a wait begins to be watched or expires; must not block. Null: nobody listens.
  void set_waker(std::function<void()> waker);
  /// What tell() calls; must not block. Null: nobody carries it on. When this has come back, nobody is in the one
  /// before.
  void set_teller(std::function<void(const Error& error)> teller);
  /// A transport has found what other ranks wait in vain to see: where there is a control plane, all of them throw it.
  /// Any thread.
  void tell(const Error& error) const;

 private:
  friend class WatchedWait;
  /// A wait is seen by others from its first look on: one of which nobody knows what for is no news. `id` 0: the first.
  std::uint64_t look(std::uint64_t id, WaitReport report, bool expired, int lost = -1);
  void end_wait(std::uint64_t id) noexcept;
  [[noreturn]] void throw_verdict() const;
  [[nodiscard]] std::string step_text() const;

  const int rank_;
  const int size_;
  FlightRecorder recorder_;
  std::atomic<std::uint64_t> phase_{0};  ///< phase, model + 1, unit + 1
  std::atomic<std::int64_t> steps_{0};
  std::atomic<std::int64_t> first_timeout_{0};
  std::atomic<std::int64_t> waited_ns_{0};
  std::atomic<bool> judged_{false};
  mutable std::atomic<bool> heard_{false};
  std::atomic<bool> spared_{false};
  std::atomic<int> groups_{0};
  mutable std::mutex mutex_;  ///< of all below
  std::vector<std::vector<std::string>> models_;
  std::map<std::string, std::weak_ptr<std::atomic<std::uint64_t>>> calls_begun_;
  std::shared_ptr<const Locator> locator_;
  struct Line {
    const char* file = "";
    int line = 0;  ///< 0: none
    const char* function = "";
  };
  [[nodiscard]] static std::string place_text(const Line& here);
  Line here_;
  std::shared_ptr<const std::function<void()>> waker_;
  mutable std::mutex teller_mutex_;  ///< held while it is called
  std::function<void(const Error& error)> teller_;
  std::optional<Error> verdict_;
  std::map<std::uint64_t, WaitStatus> waits_;
  std::set<pid_t> threads_;  ///< that have waited
  pid_t last_thread_ = 0;
  std::uint64_t next_wait_ = 0;
};

/// One wait of a transport. Costs nothing until it has lasted a slice. `watch` null: nobody watches.
class WatchedWait {
 public:
  explicit WatchedWait(RankWatch* watch)
      : watch_(watch),
        exceptions_(std::uncaught_exceptions()),
        begun_(watch == nullptr ? SteadyClock::time_point{} : SteadyClock::now()) {}
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;
  ~WatchedWait() {
    if (watch_ == nullptr) return;
    if (id_ != 0) watch_->end_wait(id_);
    if (std::uncaught_exceptions() > exceptions_) watch_->hear();
    watch_->add_waited(SteadyClock::now() - begun_);
  }

  /// After each slice: throws the verdict, if there is one.
  template <class Report>
  void look(const Report& report) {
    if (watch_ == nullptr) return;
    watch_->check();
    id_ = watch_->look(id_, report(), false);
  }
  /// The deadline has passed: lets the control plane find out who is missing, for at most kLastWord, and throws what it
  /// says.
  template <class Report>
  void expire(const Report& report) {
    if (watch_ == nullptr) return;
    look(report);
    id_ = watch_->look(id_, report(), true);
    watch_->await_verdict(kLastWord);
  }

  /// This rank of the job cannot come any more: lets the control plane say why, to who awaits its verdict.
  template <class Report>
  void lose(const Report& report, int rank) {
    if (watch_ == nullptr) return;
    look(report);
    id_ = watch_->look(id_, report(), false, rank);
  }

  static constexpr Milliseconds kLastWord{2'000};

 private:
  RankWatch* watch_;
  int exceptions_;
  SteadyClock::time_point begun_;
  std::uint64_t id_ = 0;
};

/// "is between steps, after step 3, at train.py:57 in load_batch".
[[nodiscard]] std::string describe(const RankStatus& status);
/// "is in the forward of unit blocks.1 of step 4", whether it waits there or not.
[[nodiscard]] std::string describe_phase(const RankStatus& status);

}  // namespace zeroth
