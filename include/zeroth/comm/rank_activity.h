// RankActivity: the current activity of one rank, for questions of other ranks. The rank's threads write it. The thread
// of its control plane reads it while they compute, wait or hang. Transports, engines and the control plane share it.
//
// Normal cost: one store per event of the engine (enter()), less than 0.2 us per call and per action of a pipeline
// (benchmarks/comm/watch_bench.cpp), two clock reads per wait.
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
#include <utility>
#include <vector>

namespace zeroth {

/// The phase of the user's program in a step, from its last call of the engine. kEvaluation: a forward without a
/// backward.
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

/// A wait, as its transport describes it. `ranks` are numbers of the job.
struct WaitReport {
  std::string group{};         ///< "world/engine0"
  std::string call{};          ///< "all_gather#12 float32, 23 elements (92 B)", "parameters of unit block.3"
  std::vector<int> ranks{};    ///< ranks that must all come before the wait can end; empty: not known
  bool direct = false;         ///< calls of these ranks are visible at once: no message is in flight
  std::string calls_of{};      ///< otherwise: the group in RankActivity::calls_begun(); "": not known
  std::uint64_t sequence = 0;  ///< number of the call in that group, from 0
  Milliseconds waited{};
  Milliseconds timeout{};
};

/// A wait, as other ranks get it.
struct WaitStatus {
  std::uint64_t id = 0;     ///< number of the wait on this rank, from 1; 0: the rank does not wait
  std::uint64_t looks = 0;  ///< number of checks without success, about one per 100 ms
  bool expired = false;     ///< its deadline has passed
  int lost = -1;            ///< an awaited rank that has left its group or closed its connection; -1: none
  WaitReport report{};
};

/// An action of a pipeline as a word of whoever runs it; 0: none. RankActivity does not know what is in it.
using ActionWord = std::uint64_t;

/// What such a word says.
struct ActionText {
  std::string name{};   ///< "1B3"
  std::string about{};  ///< "stage 1 of 2: the backward of chunk 1, micro-batch 3"
  bool trains = true;   ///< false: of an evaluation
};

/// Memory in which other processes see the last action of a rank, also when the rank is no more. Zero at first.
struct ShownAction {
  std::atomic<ActionWord> action;
  std::atomic<std::int64_t> steps;  ///< finished at its beginning
};

/// The state of one rank at one moment.
struct RankStatus {
  Phase phase = Phase::kStarting;
  std::int64_t step = 0;    ///< finished steps
  std::string unit{};       ///< of the phase, or ""
  std::string action{};     ///< "action 1B3 of step 4 (stage 1 of 2: ...)", or ""
  std::string place{};      ///< "train.py:57 in load_batch"; "" if not requested or not known
  std::string last_call{};  ///< "all_gather#40 of world/engine0", or ""
  std::string end{};        ///< of a goodbye: how the program ends, "sys.exit(7) at train.py:57 in main", or ""
  bool one_thread = true;   ///< at most one thread has ever waited
  std::map<std::string, std::uint64_t> calls_begun{};  ///< by group, for transports with messages in flight
  WaitStatus wait{};
};

/// An error whose rank numbers are those of the job, as "(rank 1)" and "on rank 1": the control plane may say of each
/// where it is in its program.
class ErrorOfJob final : public Error {
 public:
  explicit ErrorOfJob(const Error& error) : Error(error) {}
};

/// The decision of the control plane about the job, as waits throw it. Its rank numbers are those of the job, for a
/// wait in any group.
class JobVerdict final : public Error {
 public:
  using Error::Error;
};

class RankActivity {
 public:
  RankActivity(int rank, int size) : rank_(rank), size_(size) {}
  RankActivity(const RankActivity&) = delete;
  RankActivity& operator=(const RankActivity&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] FlightRecorder& recorder() { return recorder_; }

  /// Registers the names of an engine's units. Returns the `model` for enter().
  [[nodiscard]] int add_model(std::vector<std::string> units);
  /// Sets the current phase. Any thread; one store.
  void enter(Phase phase, int model = -1, int unit = -1) noexcept;
  /// The last value of enter(), for resume().
  [[nodiscard]] std::uint64_t entered() const noexcept { return phase_.load(std::memory_order_relaxed); }
  void resume(std::uint64_t entered) noexcept { phase_.store(entered, std::memory_order_relaxed); }
  /// Sets the current action of a pipeline and the phase that it is of. Any thread; some 20 ns.
  void enter_action(ActionWord action, Phase phase) noexcept;
  void leave_action(Phase phase) noexcept { enter_action(0, phase); }
  /// The current action has thrown. It stays the current one until the next.
  void fail_action() noexcept { failed_.store(true, std::memory_order_relaxed); }
  /// "action 1B3 of step 4 (stage 1 of 2: ...)"; "" if the last one has not thrown.
  [[nodiscard]] std::string failed_action() const;
  /// Sets the function that reads the words, of this rank and of the others. Any thread.
  void set_action_reader(ActionText (*reader)(ActionWord action)) noexcept { reader_.store(reader); }
  /// "action 1B3 of step 4 (stage 1 of 2: ...)"; "" for 0 and without a reader. `steps`: finished ones.
  [[nodiscard]] std::string action_text(ActionWord action, std::int64_t steps) const;
  /// The current action and the finished steps.
  [[nodiscard]] std::pair<ActionWord, std::int64_t> running_action() const noexcept {
    return {action_.load(std::memory_order_relaxed), steps_.load(std::memory_order_relaxed)};
  }
  /// Writes actions there too, until hide_at().
  void show_at(ShownAction& place);
  void hide_at(const ShownAction& place) noexcept;
  /// A step has ended. `steps`: those of the training, also of the processes before this one.
  void finish_step(std::int64_t steps) noexcept {
    begin_at(steps);
    has_stepped_.store(true, std::memory_order_relaxed);
  }
  /// The training goes on after so many steps.
  void begin_at(std::int64_t steps) noexcept { steps_.store(steps, std::memory_order_relaxed); }
  /// Sets the timeout of waits until the first step has ended. 0: twice the normal timeout.
  void set_first_timeout(Milliseconds timeout) noexcept {
    first_timeout_.store(timeout.count(), std::memory_order_relaxed);
  }
  [[nodiscard]] Milliseconds patience(Milliseconds timeout) const noexcept {
    if (has_stepped_.load(std::memory_order_relaxed)) return timeout;
    const std::int64_t first = first_timeout_.load(std::memory_order_relaxed);
    return first > 0 ? Milliseconds(first) : 2 * timeout;
  }

  /// Total time that this rank has waited for other ranks.
  [[nodiscard]] std::chrono::nanoseconds waited() const noexcept {
    return std::chrono::nanoseconds(waited_ns_.load(std::memory_order_relaxed));
  }
  void add_waited(std::chrono::nanoseconds time) noexcept {
    waited_ns_.fetch_add(time.count(), std::memory_order_relaxed);
  }

  /// The counter of calls that this rank has begun in a group. `group`: a name that is equal on all ranks of the group
  /// and used by no other group.
  [[nodiscard]] std::shared_ptr<std::atomic<std::uint64_t>> calls_begun(const std::string& group);

  /// Finds the user's current line in `thread`. Called on the control plane's thread. It must return within half a
  /// second and need no lock that `thread` may hold (the GIL). Returns "" if it does not know.
  using Locator = std::function<std::string(pid_t thread)>;
  void set_locator(Locator locator);
  /// For native programs without a locator: sets the program's current place, until the next call. Any thread; some 20
  /// ns. The default arguments are the caller's place (std::source_location needs clang 16).
  void at(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
          const char* function = __builtin_FUNCTION()) noexcept;
  [[nodiscard]] RankStatus status(bool with_place);
  /// The last status of this rank, for the other ranks: with the last place set by at(), without calling the locator.
  [[nodiscard]] RankStatus goodbye();
  /// Sets how the program ends, for the goodbye. Forgotten when the engine is called once more.
  void ends_by(std::string how);

  /// Sets the verdict of the control plane: from now on every watched wait and every check() throws it as a JobVerdict.
  /// Only the first verdict counts. Any thread.
  void judge(const Error& error);
  /// Throws the verdict, if there is one. One load.
  void check() const {
    if (judged_.load(std::memory_order_acquire)) [[unlikely]]
      throw_verdict();
  }
  /// The error with this rank's step added: "rank 0/4, step 120 (forward)". Unchanged if it already has a step, or is
  /// not about this rank alone.
  [[nodiscard]] Error dated(const Error& error) const;
  /// Writes a record of the end of this rank: the error, the last calls (FlightRecorder::write()), and `last`, the
  /// rank's status before the error came. Blocks. Throws kIo.
  void write_record(const std::string& path, const Error& error, const RankStatus& last) const;
  /// Notes that the user's program has received the end of the job: an error of a wait, of a call of all ranks, or its
  /// own. Any thread.
  void hear() const noexcept { heard_.store(true, std::memory_order_relaxed); }
  /// Counts the groups of the job that the program holds. Without a group, no other rank waits for it.
  void take_group() noexcept { groups_.fetch_add(1, std::memory_order_relaxed); }
  void give_group() noexcept { groups_.fetch_sub(1, std::memory_order_relaxed); }
  /// Marks this process as interactive: its control thread must not end it (see ControlOptions::end_stuck_after).
  void spare() noexcept { spared_.store(true, std::memory_order_relaxed); }
  /// True if there is a verdict that the program has not received, because it comes to no call that could throw it.
  [[nodiscard]] bool is_deaf() const noexcept {
    return judged_.load(std::memory_order_acquire) && groups_.load(std::memory_order_relaxed) > 0 &&
           !heard_.load(std::memory_order_relaxed) && !spared_.load(std::memory_order_relaxed);
  }
  /// Call it when another rank has stopped the job or is lost: waits at most `patience` for the control plane's
  /// verdict, and throws it. Returns at once without a control plane.
  void await_verdict(Milliseconds patience) const;
  /// Sets a function that is called when a wait begins to be watched or expires. It must not block. Null: none.
  void set_waker(std::function<void()> waker);
  /// Sets the function that tell() calls. It must not block. Null: none. On return no thread is inside the earlier one.
  void set_teller(std::function<void(const Error& error)> teller);
  /// Tells all ranks about an error that a transport has found and other ranks cannot see: with a control plane all
  /// ranks throw it. Any thread.
  void tell(const Error& error) const;
  /// Tells all ranks about an error whose rank numbers are those of the job, and throws the verdict about it. Returns
  /// if none comes within `patience`, and at once without a control plane.
  void tell_and_await(const Error& error, Milliseconds patience) const;

 private:
  friend class WatchedWait;
  /// Makes a wait visible to other ranks from its first check on. `id` 0: the first check.
  std::uint64_t look(std::uint64_t id, WaitReport report, bool expired, int lost = -1);
  void end_wait(std::uint64_t id) noexcept;
  [[noreturn]] void throw_verdict() const;
  [[nodiscard]] std::string step_text() const;

  const int rank_;
  const int size_;
  FlightRecorder recorder_;
  std::atomic<std::uint64_t> phase_{0};  ///< phase, model + 1, unit + 1
  std::atomic<std::int64_t> steps_{0};
  std::atomic<bool> has_stepped_{false};  ///< in this process
  std::atomic<ActionWord> action_{0};
  std::atomic<bool> failed_{false};  ///< the action
  std::atomic<ActionText (*)(ActionWord)> reader_{nullptr};
  std::mutex shown_mutex_;
  std::vector<ShownAction*> shown_;
  std::atomic<std::int64_t> first_timeout_{0};
  std::atomic<std::int64_t> waited_ns_{0};
  std::atomic<bool> judged_{false};
  mutable std::atomic<bool> heard_{false};
  std::atomic<bool> spared_{false};
  std::atomic<int> groups_{0};
  mutable std::mutex mutex_;  ///< of all members below
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
  std::string end_{};
  std::uint64_t end_at_ = 0;    ///< entered() then
  std::int64_t end_after_ = 0;  ///< steps_ then
  std::shared_ptr<const std::function<void()>> waker_;
  mutable std::mutex teller_mutex_;  ///< held while teller_ is called
  std::function<void(const Error& error)> teller_;
  std::optional<Error> verdict_;
  std::map<std::uint64_t, WaitStatus> waits_;
  std::set<pid_t> threads_;  ///< that have waited
  pid_t last_thread_ = 0;
  std::uint64_t next_wait_ = 0;
};

/// One wait of a transport. No cost until it has lasted one slice. `activity`: borrowed; null: not watched.
class WatchedWait {
 public:
  explicit WatchedWait(RankActivity* activity)
      : activity_(activity),
        exceptions_(std::uncaught_exceptions()),
        begun_(activity == nullptr ? SteadyClock::time_point{} : SteadyClock::now()) {}
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;
  ~WatchedWait() {
    if (activity_ == nullptr) return;
    if (id_ != 0) activity_->end_wait(id_);
    if (std::uncaught_exceptions() > exceptions_) activity_->hear();
    activity_->add_waited(SteadyClock::now() - begun_);
  }

  /// Call it after each slice. Throws the verdict, if there is one.
  template <class Report>
  void look(const Report& report) {
    if (activity_ == nullptr) return;
    activity_->check();
    id_ = activity_->look(id_, report(), false);
  }
  /// Call it when the deadline has passed: gives the control plane at most kLastWord to name the missing rank, and
  /// throws its verdict.
  template <class Report>
  void expire(const Report& report) {
    if (activity_ == nullptr) return;
    look(report);
    id_ = activity_->look(id_, report(), true);
    activity_->await_verdict(kLastWord);
  }

  /// Reports that `rank`, a number of the job, can no longer come. The control plane then finds the reason.
  template <class Report>
  void lose(const Report& report, int rank) {
    if (activity_ == nullptr) return;
    look(report);
    id_ = activity_->look(id_, report(), false, rank);
  }

  static constexpr Milliseconds kLastWord{2'000};

 private:
  RankActivity* activity_;
  int exceptions_;
  SteadyClock::time_point begun_;
  std::uint64_t id_ = 0;
};

/// "is between steps, after step 3, at train.py:57 in load_batch".
[[nodiscard]] std::string describe(const RankStatus& status);
/// "is in the forward of unit blocks.1 of step 4", also for a rank that waits there. In a pipeline "is in action 1B3 of
/// step 4 (stage 1 of 2: the backward of chunk 1, micro-batch 3), in unit blocks.1".
[[nodiscard]] std::string describe_phase(const RankStatus& status);

}  // namespace zeroth
