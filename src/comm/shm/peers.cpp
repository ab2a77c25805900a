#include "comm/shm/peers.h"

#include "comm/control/end_of_job.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <optional>
#include <utility>

namespace zeroth::detail {
namespace {

static_assert(sizeof(SharedFlag) == 4, "a futex word has 32 bits");

std::string rank_list(const std::vector<int>& ranks) {
  if (ranks.empty()) return "the other ranks";
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// Who has not come, as far as the wait knows.
std::vector<int> missing_of(const WaitContext& context) {
  std::vector<int> missing = context.missing ? context.missing() : context.ranks;
  return missing.empty() ? context.ranks : missing;
}

bool awaits(const WaitContext& context, int rank) {
  return context.ranks.empty() || std::ranges::find(context.ranks, rank) != context.ranks.end();
}

/// Counts this rank among the sleepers as long as it lives.
class SleeperMark {
 public:
  explicit SleeperMark(SharedFlag& waiting) : waiting_(waiting) { waiting_.fetch_add(1); }
  SleeperMark(const SleeperMark&) = delete;
  SleeperMark& operator=(const SleeperMark&) = delete;
  ~SleeperMark() { waiting_.fetch_sub(1); }

 private:
  SharedFlag& waiting_;
};

}  // namespace

void futex_wait(SharedFlag& word, std::uint32_t value, Milliseconds timeout) noexcept {
  const auto count = timeout.count();
  const timespec limit{.tv_sec = static_cast<time_t>(count / 1000),
                       .tv_nsec = static_cast<long>(count % 1000) * 1'000'000};
  // Wake-ups, timeouts and signals all mean the same to the caller: look again.
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake_all(SharedFlag& word) noexcept {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

Peers::Peers(Setup setup) : setup_(std::move(setup)) {
  if (RankActivity* const activity = setup_.watched.activity()) activity->show_at(own_action());
}

Peers::~Peers() {
  if (RankActivity* const activity = setup_.watched.activity()) activity->hide_at(own_action());
}

ShownAction& Peers::own_action() const {
  return setup_.controls[static_cast<std::size_t>(setup_.rank)]->action;
}

std::string Peers::last_action_of(int world_rank) const {
  const RankActivity* const activity = setup_.watched.activity();
  const ShownAction& shown = setup_.controls[static_cast<std::size_t>(world_rank)]->action;
  const std::string action =
      activity == nullptr ? ""
                          : activity->action_text(shown.action.load(std::memory_order_acquire), shown.steps.load());
  return action.empty() ? "" : ", in " + action;
}

void Peers::wait(const GroupView& view, FunctionRef<bool()> predicate, FunctionRef<WaitContext()> context) {
  if (predicate()) return;
  const Deadline deadline(setup_.watched.patience(setup_.timeout));
  WatchedWait watched(setup_.watched.activity());
  WaitProgress owed(progress);
  if (setup_.polling.time.count() > 0) {
    const auto end = SteadyClock::now() + setup_.polling.time;
    do {
      setup_.polling.pause();
      if (predicate()) return;  // it may be long: so the clock is looked at after each
      owed.advance();
    } while (SteadyClock::now() < end);
  }
  JobControl& own = *setup_.controls[static_cast<std::size_t>(setup_.rank)];
  const SleeperMark mark(own.waiting);
  const auto report = [&] { return report_of(view, deadline, context); };
  auto look_up = SteadyClock::now() + kWaitSlice;
  for (;;) {
    const std::uint32_t rung = own.doorbell.load();
    if (predicate()) return;
    if (!owed.idle()) {  // after the doorbell was read: news that come from now on ring it
      owed.advance();
      if (predicate()) return;
    }
    if (const std::optional<Failure> failure = find_failure(view, deadline, context)) {
      // The peer may have done what we wait for and left in the meantime.
      if (predicate()) return;
      if (failure->error.code() == ErrorCode::kTimeout) watched.expire(report);
      if (failure->departed >= 0) watched.lose(report, setup_.watched.job_rank(failure->departed));
      raise(view, context, *failure);
    }
    if (!owed.idle()) owed.sleeps_for(awaited(view, context));
    futex_wait(own.doorbell, rung, deadline.slice());
    if (SteadyClock::now() < look_up) continue;
    check_interrupt();
    watched.look(report);
    look_up = SteadyClock::now() + kWaitSlice;
  }
}

int Peers::awaited(const GroupView& view, FunctionRef<WaitContext()> context) const {
  const std::vector<int> missing = missing_of(context());
  if (missing.empty()) return Progress::kAnyRank;
  return setup_.watched.job_rank(view.world_ranks[static_cast<std::size_t>(missing.front())]);
}

void Peers::check(const GroupView& view, const Deadline& deadline, FunctionRef<WaitContext()> context) {
  check(view, deadline, [] { return false; }, context);
}

void Peers::check(const GroupView& view, const Deadline& deadline, FunctionRef<bool()> predicate,
                  FunctionRef<WaitContext()> context) {
  const std::optional<Failure> failure = find_failure(view, deadline, context);
  if (failure && !predicate()) raise(view, context, *failure);
  check_interrupt();
}

void Peers::raise(const GroupView& view, FunctionRef<WaitContext()> context, const Failure& failure) {
  ZR_FAILPOINT("abort.hear");
  check_interrupt();  // Ctrl-C goes to all ranks: who hears it later must not call the others' end a loss
  if (failure.error.code() == ErrorCode::kAborted) setup_.watched.await_verdict(kWordOfCause);
  if (failure.departed >= 0) {  // a stack that unwinds leaves groups, and stops the job at its end
    setup_.watched.await_verdict(kWordOfCause);
    throw_if_aborted(view, context);
  }
  if (!failure.loss.empty()) tell_loss(failure.loss);
  throw setup_.watched.dated(failure.error.code() == ErrorCode::kAborted ? cause_of_stop(failure.error)
                                                                         : failure.error);
}

void Peers::throw_if_aborted(const GroupView& view, FunctionRef<WaitContext()> context) const {
  const std::optional<Error> error = find_abort(view, context);
  if (!error) return;
  setup_.watched.await_verdict(kWordOfCause);
  throw setup_.watched.dated(cause_of_stop(*error));
}

WaitReport Peers::report_of(const GroupView& view, const Deadline& deadline, FunctionRef<WaitContext()> context) const {
  const WaitContext waited = context();
  WaitReport report{.group = std::string(view.group),
                    .call = waited.what,
                    .ranks = {},
                    .direct = true,
                    .waited = deadline.timeout() - deadline.remaining(),
                    .timeout = deadline.timeout()};
  if (!waited.unit.empty() && waited.what.find(waited.unit) == std::string::npos) report.call += ", " + waited.unit;
  for (const int rank : missing_of(waited)) {
    report.ranks.push_back(setup_.watched.job_rank(view.world_ranks[static_cast<std::size_t>(rank)]));
  }
  return report;
}

std::optional<Error> Peers::find_abort(const GroupView& view, FunctionRef<WaitContext()> context) const {
  const std::uint32_t first = setup_.controls.front()->first_abort.load();
  if (first == 0) return std::nullopt;
  const WaitContext waited = context();
  const ErrorContext here{.where = fmt::format("{} group={}", view.where, view.group),
                          .who = fmt::format("rank {}/{}", view.rank, view.world_ranks.size()),
                          .which = waited.unit};
  // The word lies in memory that every rank can write.
  if (first > setup_.controls.size()) {
    ErrorContext damaged = here;
    damaged.expected = fmt::format("a rank below {}", setup_.controls.size());
    damaged.got = fmt::format("{}", first - 1);
    damaged.hint = "something wrote where it should not: run the program under an address sanitizer";
    return Error(ErrorCode::kAborted, "the job was stopped, and the word that says by whom is damaged",
                 std::move(damaged));
  }
  const std::size_t rank = first - 1;
  const JobControl& cause = *setup_.controls[rank];
  const std::string text(cause.abort_text, ::strnlen(cause.abort_text, kAbortTextBytes));
  ErrorContext stopped = here;
  stopped.expected = waited.what;
  return Error(ErrorCode::kAborted, fmt::format("rank {} stopped the job: {}", rank, text), std::move(stopped));
}

std::optional<Peers::Failure> Peers::find_failure(const GroupView& view, const Deadline& deadline,
                                                  FunctionRef<WaitContext()> context) const {
  if (std::optional<Error> abort = find_abort(view, context)) return Failure{*std::move(abort)};
  WaitContext waited;        // filled once something is wrong
  std::vector<int> missing;  // likewise
  const auto describe = [&](ErrorCode code, const std::string& message, std::string hint) {
    return Error(
        code, message,
        {.where = fmt::format("{} group={}", view.where, view.group),
         .who = fmt::format("rank {}/{}", view.rank, view.world_ranks.size()),
         .which = waited.unit,
         .expected = waited.names_ranks ? waited.what : fmt::format("{} from {}", waited.what, rank_list(missing)),
         .got = fmt::format("{}{}nothing for {:.1f} s", waited.progress ? waited.progress() : "",
                            waited.progress ? ", " : "",
                            std::chrono::duration<double>(deadline.timeout() - deadline.remaining()).count()),
         .hint = std::move(hint)});
  };
  const auto name = [&](int rank) {
    const std::string identity =
        setup_.liveness ? setup_.liveness->identity(view.world_ranks[static_cast<std::size_t>(rank)]) : "";
    return fmt::format("rank {}{}{}{}", rank, identity.empty() ? "" : " (", identity, identity.empty() ? "" : ")");
  };
  const auto lost = [&](int group_rank, const std::string& what, std::string hint) {
    // A rank that stops the job says so before it goes.
    if (std::optional<Error> abort = find_abort(view, context)) return Failure{*std::move(abort)};
    // Not whom alone it waits for at the moment, where the lost one would have been next.
    missing = awaits(waited, group_rank) ? std::vector{group_rank} : missing_of(waited);
    const std::string sentence =
        name(group_rank) + " " + what + last_action_of(view.world_ranks[static_cast<std::size_t>(group_rank)]);
    const std::string told = told_loss(view.world_ranks[static_cast<std::size_t>(group_rank)]);
    if (told.empty()) {
      return Failure{describe(ErrorCode::kPeerLost, sentence, std::move(hint)),
                     fmt::format("in group {} {}", view.group, sentence)};
    }
    return Failure{describe(ErrorCode::kPeerLost, told + ": " + sentence + " after it saw that",
                            "look at the rank that was lost first"),
                   told};
  };
  bool anybody_departed = false;
  for (std::size_t rank = 0; rank < view.controls.size(); ++rank) {
    const int group_rank = static_cast<int>(rank);
    if (group_rank == view.rank) continue;
    const bool departed = view.controls[rank]->departed.load() != 0;
    anybody_departed = anybody_departed || departed;
    if (departed || !setup_.liveness) continue;
    if (const std::string death = setup_.liveness->death(view.world_ranks[rank]); !death.empty()) {
      if (view.controls[rank]->departed.load() != 0) {  // it left in order between our two looks
        anybody_departed = true;
        continue;
      }
      waited = context();
      return lost(group_rank, death, "look at the output of that rank");
    }
    if (const std::string freeze = setup_.liveness->freeze(view.world_ranks[rank]); !freeze.empty()) {
      waited = context();
      if (awaits(waited, group_rank)) {
        return lost(group_rank, freeze, "the process was stopped or its host hangs");
      }
    }
  }
  if (anybody_departed) {
    waited = context();
    for (std::size_t rank = 0; rank < view.controls.size(); ++rank) {
      const int group_rank = static_cast<int>(rank);
      if (group_rank == view.rank || !awaits(waited, group_rank)) continue;
      if (view.controls[rank]->departed.load() != 0) {
        Failure failure = lost(group_rank, "left early",
                               "every rank must make the same calls; see where that rank returned or threw");
        if (failure.error.code() == ErrorCode::kPeerLost) failure.departed = view.world_ranks[rank];
        return failure;
      }
    }
  }
  if (deadline.passed()) {
    waited = context();
    missing = missing_of(waited);
    return Failure{describe(ErrorCode::kTimeout,
                            fmt::format("no answer within {:.1f} s, and every peer is alive",
                                        std::chrono::duration<double>(deadline.timeout()).count()),
                            "another rank computes longer than the timeout, hangs, or takes another path")};
  }
  return std::nullopt;
}

void Peers::tell_loss(const std::string& loss) noexcept {
  JobControl& own = *setup_.controls[static_cast<std::size_t>(setup_.rank)];
  if (own.loss_told.load() != 0) return;  // the first one explains the others
  std::strncpy(own.loss_text, loss.c_str(), kLossTextBytes - 1);
  own.loss_told.store(1);
}

std::string Peers::told_loss(int world_rank) const {
  const JobControl& peer = *setup_.controls[static_cast<std::size_t>(world_rank)];
  return peer.loss_told.load() == 0 ? "" : std::string(peer.loss_text, ::strnlen(peer.loss_text, kLossTextBytes));
}

void Peers::notify(std::span<const int> world_ranks) noexcept {
  for (const int rank : world_ranks) {
    JobControl& peer = *setup_.controls[static_cast<std::size_t>(rank)];
    if (peer.waiting.load() == 0 || rank == setup_.rank) continue;
    peer.doorbell.fetch_add(1);
    futex_wake_all(peer.doorbell);
  }
}

void Peers::abort(const Error& error) noexcept {
  JobControl& own = *setup_.controls[static_cast<std::size_t>(setup_.rank)];
  if (own.abort_claimed.exchange(1) != 0) return;
  ZR_FAILPOINT("abort.tell");
  own.abort_code = static_cast<std::int32_t>(error.code());
  std::strncpy(own.abort_text, error.what(), kAbortTextBytes - 1);
  std::uint32_t none = 0;
  setup_.controls.front()->first_abort.compare_exchange_strong(none, static_cast<std::uint32_t>(setup_.rank) + 1);
  ZR_FAILPOINT("abort.wake");
  for (JobControl* peer : setup_.controls) {
    peer->doorbell.fetch_add(1);
    futex_wake_all(peer->doorbell);
  }
}

}  // namespace zeroth::detail
