#include "comm/control/coordinator.h"

#include "comm/control/early_end.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr std::size_t kSamples = 16;
constexpr std::size_t kMostDescribed = 4;

double seconds(Milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

/// How near an error is to what went wrong first, 0 nearest.
int distance_from_cause(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kMismatch:
      return 1;
    case ErrorCode::kPeerLost:
      return 2;
    case ErrorCode::kTimeout:
      return 3;
    default:
      return 0;
  }
}

/// How an ErrorOfJob ends what it says of the call of a rank.
std::array<std::string, 2> marks_of(int rank) {
  return {fmt::format(" (rank {})", rank), fmt::format(" on rank {}", rank)};
}

}  // namespace

bool awaits(const WaitStatus& wait, int rank) {
  const std::vector<int>& ranks = wait.report.ranks;
  return wait.id != 0 && (wait.lost == rank || ranks.empty() || std::ranges::find(ranks, rank) != ranks.end());
}

std::string rank_text(int rank, int pid, const std::string& host) {
  return fmt::format("rank {} (pid {} on {})", rank, pid, host);
}

std::string end_text(const std::string& how, const std::string& trouble) {
  if (!how.empty()) return how;
  return "is gone: its control connection ended without a goodbye" + (trouble.empty() ? "" : " (" + trouble + ")");
}

std::string silence_text(Milliseconds silent) {
  return fmt::format("has given no sign of life for {:.1f} s: it was stopped, or its host or the network hangs",
                     seconds(silent));
}

std::string last_action_text(const std::string& action, Milliseconds before) {
  if (action.empty()) return "";
  const bool just_before = before < Milliseconds{50};
  return ", last seen in " + action + (just_before ? "" : fmt::format(" {:.1f} s before", seconds(before)));
}

Coordinator::Coordinator(int size, CoordinatorOptions options)
    : size_(size), options_(options), ranks_(static_cast<std::size_t>(size)) {}

void Coordinator::joined(int rank, std::string host, int pid, TimePoint now) {
  Rank& known = at(rank);
  known.joined = true;
  known.host = std::move(host);
  known.pid = pid;
  known.heard = now;
}

void Coordinator::heard(int rank, TimePoint now) {
  at(rank).heard = now;
}

void Coordinator::seen_in(int rank, std::string action, TimePoint now) {
  at(rank).action = std::move(action);
  at(rank).action_at = now;
}

void Coordinator::left(int rank, std::optional<RankStatus> goodbye, TimePoint now, std::string trouble) {
  Rank& known = at(rank);
  if (known.gone) return;
  known.trouble = std::move(trouble);
  known.gone = true;
  known.goodbye = std::move(goodbye);
  known.gone_at = now;
  known.status.reset();
  known.samples.clear();
}

void Coordinator::told(Error error, TimePoint now, bool of_job) {
  if (!told_) told_at_ = now;
  if (!told_ || distance_from_cause(error) < distance_from_cause(*told_)) {
    told_.emplace(std::move(error));
    told_of_job_ = of_job;
  } else if (of_job && told_of_job_ && error.message() == told_->message()) {
    // The same seen from the other side, which knows more of its own call: what it is named.
    for (int rank = 0; rank < size_; ++rank) {
      for (const std::string& mark : marks_of(rank)) {
        if (!error.context().expected.ends_with(mark) || !told_->context().got.ends_with(mark)) continue;
        ErrorContext context = told_->context();
        context.got = error.context().expected;
        Error whole(told_->code(), told_->message(), std::move(context));
        told_.emplace(std::move(whole));
        return;
      }
    }
  }
}

Error Coordinator::with_places(const Error& error, std::uint32_t question) const {
  ErrorContext context = error.context();
  for (int rank = 0; rank < size_; ++rank) {
    const Rank& known = at(rank);
    if (known.answered < question || known.place.empty()) continue;
    for (std::string* const side : {&context.expected, &context.got}) {
      for (const std::string& mark : marks_of(rank)) {
        if (!side->ends_with(mark)) continue;
        side->insert(side->size() - (mark.ends_with(')') ? 1 : 0), " at " + known.place);
        break;
      }
    }
  }
  return Error(error.code(), error.message(), std::move(context));
}

void Coordinator::answered(int rank, const StatusMessage& message, TimePoint now) {
  Rank& known = at(rank);
  if (known.gone) return;
  known.heard = now;
  const RankStatus& status = message.status;
  seen_in(rank, status.action, now);
  const bool same = known.status && status.wait.id != 0 && known.status->wait.id == status.wait.id &&
                    known.status->wait.report.ranks == status.wait.report.ranks;
  if (!same) known.samples.clear();
  if (status.wait.id != 0) known.samples.push_back({now, status.wait.looks});
  if (known.samples.size() > kSamples) known.samples.erase(known.samples.begin() + 1);  // the first one says since when
  if (message.question != 0) known.place = status.place;
  known.status = status;
  known.status->place = known.place;  // as it was when it was asked for
  known.answered = std::max(known.answered, message.question);
}

bool Coordinator::waits(int rank) const {
  return at(rank).status && at(rank).status->wait.id != 0;
}

bool Coordinator::busy() const {
  return told_ ||
         std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.status && rank.status->wait.id != 0; });
}

std::string Coordinator::name_of(int rank) const {
  const Rank& known = at(rank);
  return known.joined ? rank_text(rank, known.pid, known.host) : fmt::format("rank {}", rank);
}

Error Coordinator::loss_error(int rank, const std::string& what, int waiting, std::string hint) const {
  const WaitReport& report = wait_of(waiting);
  return Error(ErrorCode::kPeerLost, name_of(rank) + " " + what,
               {.where = "comm.control group=" + report.group,
                .expected = fmt::format("{} from rank {}", report.call, rank),
                .got = who_waits(),
                .hint = std::move(hint)});
}

Error Coordinator::left_error(int rank, const RankStatus& last, int waiting) const {
  EarlyEnd end = early_end(last, waiting, *at(waiting).status);
  return loss_error(rank, end.text, waiting, std::move(end.hint));
}

std::string Coordinator::loss_text(int rank, TimePoint now) const {
  const Rank& known = at(rank);
  const std::string text = known.gone ? end_text(known.end, known.trouble)
                                      : silence_text(std::chrono::duration_cast<Milliseconds>(now - known.heard));
  const TimePoint end = known.gone ? known.gone_at : known.heard;
  return text + last_action_text(known.action, std::chrono::duration_cast<Milliseconds>(end - known.action_at));
}

std::optional<Error> Coordinator::loss_of(int rank, int waiting, TimePoint now) const {
  const Rank& known = at(rank);
  if (known.gone) {
    // Its goodbye comes after whatever it has said of an error. Else what it did last may be on its way.
    const bool certain = (known.goodbye || !known.end.empty()) && at(waiting).status->wait.lost == rank;
    if (!certain && now - known.gone_at < options_.grace) return std::nullopt;
    if (known.goodbye) return left_error(rank, *known.goodbye, waiting);
  } else if (!known.joined || now - known.heard < options_.silent_after) {
    return std::nullopt;
  }
  return loss_error(rank, loss_text(rank, now), waiting, kLookThere);
}

int Coordinator::find_left() const {
  for (int waiting = 0; waiting < size_; ++waiting) {
    if (!waits(waiting) || !wait_of(waiting).direct) continue;  // of who lives, a connection that ends is no goodbye
    const int lost = at(waiting).status->wait.lost;
    if (lost >= 0 && lost < size_ && lost != waiting && at(lost).joined && !at(lost).gone) return waiting;
  }
  return -1;
}

std::optional<Error> Coordinator::find_loss(TimePoint now) const {
  std::vector<int> lost;
  for (int rank = 0; rank < size_; ++rank) {
    const Rank& known = at(rank);
    if (known.gone || (known.joined && now - known.heard >= options_.silent_after)) lost.push_back(rank);
  }
  for (int waiting = 0; waiting < size_ && !lost.empty(); ++waiting) {
    if (!waits(waiting)) continue;
    for (const int rank : lost) {
      if (rank == waiting || !awaits(at(waiting).status->wait, rank)) continue;
      if (std::optional<Error> loss = loss_of(rank, waiting, now)) return loss;
    }
  }
  return std::nullopt;
}

std::optional<Error> Coordinator::find_isolation(TimePoint now) const {
  int lost = 0;
  for (int rank = size_; --rank > 0;) {
    const Rank& known = at(rank);
    if (known.goodbye) continue;
    if (!known.joined || now - (known.gone ? known.gone_at : known.heard) < options_.silent_after) return std::nullopt;
    lost = rank;
  }
  if (lost == 0) return std::nullopt;
  return Error(ErrorCode::kPeerLost, name_of(lost) + " " + loss_text(lost, now),
               {.where = "comm.control",
                .expected = fmt::format("a sign of life from rank {}", lost),
                .got = size_ == 2 ? "" : "none from any other rank either",
                .hint = kLookThere});
}

bool Coordinator::blocked_since(int rank, TimePoint since) const {
  const Rank& known = at(rank);
  // A later sample of one that lies after `since`, with two looks between them: it has looked after that moment, in
  // vain.
  for (const Sample& first : known.samples) {
    if (first.when < since) continue;
    return std::ranges::any_of(known.samples, [&](const Sample& later) { return later.looks >= first.looks + 2; });
  }
  return false;
}

bool Coordinator::needs(int rank, int other) const {
  const WaitReport& report = wait_of(rank);
  if (report.direct) return true;
  if (report.calls_of.empty()) return false;
  const auto& begun = at(other).status->calls_begun;
  const auto calls = begun.find(report.calls_of);
  return calls != begun.end() && calls->second <= report.sequence;
}

std::vector<int> Coordinator::find_circle() const {
  // A rank that runs one thread and waits does nothing for the others. Who waits for several needs all of them: one
  // circle is enough.
  const auto stuck = [&](int rank) { return waits(rank) && at(rank).status->one_thread && blocked_since(rank, {}); };
  const auto confirmed = [&](const std::vector<int>& ranks) {
    TimePoint all_wait{};
    for (const int rank : ranks) all_wait = std::max(all_wait, at(rank).samples.front().when);
    return std::ranges::all_of(ranks, [&](int rank) { return blocked_since(rank, all_wait); });
  };
  // Depth first along stuck ranks; one that is met again on the way closes a circle. Each is gone through once,
  // whatever the start: a circle that shares ranks with one that is not yet confirmed is found at a later look.
  enum class Seen : std::uint8_t { kNo, kOnTheWay, kDone };
  std::vector<Seen> seen(static_cast<std::size_t>(size_), Seen::kNo);
  const auto seen_of = [&](int rank) -> Seen& { return seen[static_cast<std::size_t>(rank)]; };
  struct Step {
    int rank;
    std::size_t next = 0;  ///< of those that it waits for
  };
  std::vector<Step> path;
  for (int start = 0; start < size_; ++start) {
    if (seen_of(start) != Seen::kNo || !stuck(start)) continue;
    path.assign(1, {start});
    seen_of(start) = Seen::kOnTheWay;
    while (!path.empty()) {
      const int rank = path.back().rank;
      const std::vector<int>& awaited = wait_of(rank).ranks;
      if (path.back().next == awaited.size()) {
        seen_of(rank) = Seen::kDone;
        path.pop_back();
        continue;
      }
      const int next = awaited[path.back().next++];
      if (next < 0 || next >= size_ || next == rank || seen_of(next) == Seen::kDone || !stuck(next) ||
          !needs(rank, next))
        continue;
      if (seen_of(next) == Seen::kNo) {
        seen_of(next) = Seen::kOnTheWay;
        path.push_back({next});
        continue;
      }
      std::vector<int> circle;
      for (auto step = std::ranges::find(path, next, &Step::rank); step != path.end(); ++step)
        circle.push_back(step->rank);
      if (confirmed(circle)) return circle;
    }
  }
  // Where it is not known who waits for whom: nobody is left who could come.
  std::vector<int> all(static_cast<std::size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) all[static_cast<std::size_t>(rank)] = rank;
  const auto direct = [&](int rank) { return wait_of(rank).direct; };
  if (size_ > 1 && std::ranges::all_of(all, stuck) && std::ranges::all_of(all, direct) && confirmed(all)) return all;
  return {};
}

std::vector<int> Coordinator::missing_for(int rank) const {
  std::vector<int> missing;
  for (int other = 0; other < size_; ++other) {
    if (other != rank && awaits(at(rank).status->wait, other) && !waits(other)) missing.push_back(other);
  }
  if (!missing.empty()) return missing;
  // Those it waits for wait themselves: somebody further on keeps all of them.
  for (int other = 0; other < size_; ++other) {
    if (other != rank && !waits(other)) missing.push_back(other);
  }
  return missing;
}

std::string Coordinator::who_waits() const {
  std::vector<std::string> texts;
  for (const auto& [call, ranks] : waiting_by_call()) texts.push_back(crowd_text(call, ranks));
  std::ranges::sort(texts);
  return first_of(std::move(texts));
}

std::string Coordinator::first_of(std::vector<std::string> texts) {
  if (texts.size() > kMostDescribed) {
    const std::size_t more = texts.size() - kMostDescribed;
    texts.resize(kMostDescribed);
    texts.push_back(fmt::format("and {} more", more));
  }
  return fmt::format("{}", fmt::join(texts, "; "));
}

std::map<std::string, std::vector<int>> Coordinator::waiting_by_call() const {
  std::map<std::string, std::vector<int>> crowds;
  for (int rank = 0; rank < size_; ++rank) {
    if (waits(rank)) crowds[wait_of(rank).call].push_back(rank);
  }
  return crowds;
}

std::string Coordinator::crowd_text(const std::string& call, const std::vector<int>& ranks) const {
  std::string text = fmt::format("{} {} for {}", ranks_text(ranks), ranks.size() == 1 ? "waits" : "wait", call);
  const auto place_of = [&](int rank) { return at(rank).status->place; };
  const auto placed = std::ranges::find_if(ranks, [&](int rank) { return !place_of(rank).empty(); });
  if (placed == ranks.end()) return text;
  text += " at " + place_of(*placed);
  const bool same = std::ranges::all_of(
      ranks, [&](int rank) { return place_of(rank).empty() || place_of(rank) == place_of(*placed); });
  return same ? text : text + fmt::format(" (rank {})", *placed);
}

std::string Coordinator::explain(int about, TimePoint now) const {
  const std::vector<int> missing = missing_for(about);
  std::vector<std::string> texts;
  for (const int rank : missing) {
    const Rank& known = at(rank);
    const auto silent = std::chrono::duration_cast<Milliseconds>(now - known.heard);
    std::string text = name_of(rank) + " ";
    if (known.gone) {
      text += known.goodbye ? "has left" : "is gone";
    } else if (known.status && silent < 2 * options_.answer_within) {
      text += describe(*known.status);
      if (!known.status->last_call.empty()) text += ", its last call " + known.status->last_call;
    } else {
      text += fmt::format("does not answer, and has given no sign of life for {:.1f} s", seconds(silent));
    }
    texts.push_back(std::move(text));
  }
  return texts.empty() ? "every rank waits" : first_of(std::move(texts));
}

Error Coordinator::circle_error(const std::vector<int>& circle) const {
  // With the same words for all ranks, the odd ones out first: those in the smallest crowd.
  const std::map<std::string, std::vector<int>> by_call = waiting_by_call();
  std::vector<std::pair<std::string, std::vector<int>>> crowds(by_call.begin(), by_call.end());
  std::ranges::stable_sort(crowds, {}, [](const auto& crowd) { return crowd.second.size(); });
  const auto describe_crowd = [&](const auto& crowd) { return crowd_text(crowd.first, crowd.second); };
  ErrorContext context{.where = "comm.control group=" + wait_of(circle.front()).group,
                       .got = describe_crowd(crowds.front()),
                       .hint =
                           "all ranks must make the same calls in the same order: look for a call under a condition "
                           "that holds on some ranks only"};
  std::vector<std::string> rest;
  for (std::size_t index = 1; index < crowds.size(); ++index) rest.push_back(describe_crowd(crowds[index]));
  context.expected = first_of(std::move(rest));
  return Error(ErrorCode::kMismatch,
               crowds.size() > 1 ? "ranks wait for each other in different calls"
                                 : "ranks wait for each other, and nobody is left who could come",
               std::move(context));
}

void Coordinator::begin(Purpose purpose, int about, std::vector<int> circle, TimePoint now,
                        std::vector<CoordinatorAction>& actions) {
  inquiry_ = Inquiry{purpose, about, std::move(circle), ++questions_, now};
  actions.emplace_back(AskAction{{.question = questions_, .with_place = true}});
}

bool Coordinator::complete(const Inquiry& inquiry, TimePoint now) const {
  if (inquiry.purpose == Purpose::kLeft && now - inquiry.since < options_.unwind) return false;
  if (inquiry.purpose == Purpose::kTold) {
    // Who has found it waits no longer for more, see kWordOfCause.
    if (now - told_at_ < options_.gather) return false;
    if (now - told_at_ >= 2 * options_.gather) return true;
  }
  if (now - inquiry.since >= options_.answer_within) return true;
  return std::ranges::all_of(
      ranks_, [&](const Rank& rank) { return rank.gone || !rank.joined || rank.answered >= inquiry.question; });
}

std::vector<CoordinatorAction> Coordinator::conclude(const Inquiry& inquiry, TimePoint now) {
  std::vector<CoordinatorAction> actions;
  if (inquiry.purpose == Purpose::kCircle) {
    if (std::ranges::any_of(inquiry.circle, [&](int rank) { return !waits(rank); }) || find_circle().empty())
      return actions;
    actions.emplace_back(VerdictAction{circle_error(inquiry.circle)});
    return actions;
  }
  if (inquiry.purpose == Purpose::kTold) {
    actions.emplace_back(VerdictAction{with_places(*told_, inquiry.question)});
    return actions;
  }
  if (inquiry.purpose == Purpose::kLeft) {
    const int waiting = find_left();
    if (waiting < 0) return actions;
    const int lost = at(waiting).status->wait.lost;
    if (at(lost).status) actions.emplace_back(VerdictAction{left_error(lost, *at(lost).status, waiting)});
    return actions;
  }
  if (!waits(inquiry.about)) return actions;  // it has come in the meantime
  const WaitReport& report = wait_of(inquiry.about);
  const std::string line = explain(inquiry.about, now);
  if (inquiry.purpose == Purpose::kTimeout) {
    actions.emplace_back(VerdictAction{Error(
        ErrorCode::kTimeout, fmt::format("no answer within {:.1f} s: {}", seconds(report.timeout), line),
        {.where = "comm.control group=" + report.group,
         .expected = who_waits(),
         .hint = "that rank computes longer than the timeout (zeroth.timeout_ms), hangs, or takes another path"})});
    return actions;
  }
  for (Rank& rank : ranks_) {
    if (rank.status) rank.noted_wait = rank.status->wait.id;
  }
  actions.emplace_back(NoteAction{fmt::format("{}; {}, for {:.1f} s of {:.1f} s", line, who_waits(),
                                              seconds(report.waited), seconds(report.timeout))});
  return actions;
}

std::vector<CoordinatorAction> Coordinator::tick(TimePoint now) {
  std::vector<CoordinatorAction> actions;
  if (judged_) return actions;
  const std::optional<Error> isolation = told_ || waits(0) ? std::nullopt : find_isolation(now);
  if (!busy() && !isolation) {
    inquiry_.reset();
    return actions;
  }
  if (isolation) {
    actions.emplace_back(VerdictAction{*isolation});
  } else if (told_ && told_of_job_) {
    if (!inquiry_ || inquiry_->purpose != Purpose::kTold) {
      begin(Purpose::kTold, 0, {}, now, actions);
    } else if (complete(*inquiry_, now)) {
      const Inquiry inquiry = *std::exchange(inquiry_, std::nullopt);
      actions = conclude(inquiry, now);
    }
  } else if (told_) {
    if (distance_from_cause(*told_) == 0 || now - told_at_ >= options_.gather)
      actions.emplace_back(VerdictAction{*told_});
  } else if (const std::optional<Error> loss = find_loss(now)) {
    actions.emplace_back(VerdictAction{*loss});
  } else if (inquiry_) {
    if (complete(*inquiry_, now)) {
      const Inquiry inquiry = *std::exchange(inquiry_, std::nullopt);
      actions = conclude(inquiry, now);
    }
  } else if (const int left = find_left(); left >= 0) {
    begin(Purpose::kLeft, left, {}, now, actions);
  } else if (std::vector<int> circle = find_circle(); !circle.empty()) {
    const int about = circle.front();
    begin(Purpose::kCircle, about, std::move(circle), now, actions);
  } else {
    int expired = -1;
    int slow = -1;
    for (int rank = 0; rank < size_; ++rank) {
      if (!waits(rank)) continue;
      const WaitStatus& wait = at(rank).status->wait;
      if (wait.expired && expired < 0) expired = rank;
      const bool long_ago = wait.report.waited >= std::min(options_.note_after, wait.report.timeout / 4);
      if (long_ago && at(rank).noted_wait != wait.id && slow < 0) slow = rank;
    }
    if (expired >= 0) {
      begin(Purpose::kTimeout, expired, {}, now, actions);
    } else if (slow >= 0) {
      begin(Purpose::kNote, slow, {}, now, actions);
    }
  }
  judged_ = std::ranges::any_of(
      actions, [](const CoordinatorAction& action) { return std::holds_alternative<VerdictAction>(action); });
  const bool suspicious = std::ranges::any_of(ranks_, [&](const Rank& rank) {
    return rank.status && rank.status->wait.id != 0 && rank.status->wait.report.waited >= options_.suspicious_after;
  });
  if (!judged_ && suspicious && actions.empty() && now - asked_ >= options_.ask_every) {
    asked_ = now;
    actions.emplace_back(AskAction{{.question = 0, .with_place = false}});
  }
  return actions;
}

}  // namespace zeroth::detail
