#include "hosts/site_rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace zeroth {
namespace {

SiteBytes text_bytes(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

}  // namespace

SiteRounds::SiteRounds(int num_sites) : sites_(static_cast<std::size_t>(num_sites)) {}

std::vector<SiteAction> SiteRounds::take_actions() {
  return std::exchange(actions_, {});
}

bool SiteRounds::is_current(const SiteMember& member) const {
  const Site& site = at(member.site);
  return site.state != State::kAway && site.start == member.start;
}

SiteSet SiteRounds::missing() const {
  SiteSet sites = 0;
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    const State state = at(site).state;
    if (at(site).expected && (state == State::kAway || state == State::kComing)) sites |= site_bit(site);
  }
  return sites;
}

SiteSet SiteRounds::required(std::uint64_t round) const {
  SiteSet sites = 0;
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    if (at(site).state == State::kPresent && at(site).from <= round) sites |= site_bit(site);
  }
  return sites;
}

std::string SiteRounds::name_of(const SiteMember& member) const {
  const std::string& name = at(member.site).names[static_cast<std::size_t>(member.rank)];
  return fmt::format("rank {} ({})", member.rank, name);
}

void SiteRounds::say(int site, int rank, SiteHead head, SiteBytes payload) {
  actions_.push_back(
      {.to = {.site = site, .rank = rank, .start = at(site).start}, .head = head, .payload = std::move(payload)});
}

void SiteRounds::say_all(int site, const SiteHead& head, const SiteBytes& payload) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (!at(site).names[static_cast<std::size_t>(rank)].empty()) say(site, rank, head, payload);
  }
}

void SiteRounds::dismiss(int site, ErrorCode code, const std::string& text) {
  say_all(site, {.word = SiteWord::kDismissed, .value = static_cast<std::uint64_t>(code)}, text_bytes(text));
  Site& one = at(site);
  one.state = State::kAway;
  one.welcomed = false;
  one.giver = -1;
  one.states.clear();
}

SiteRounds::Arrival SiteRounds::come(const Hello& hello, TimePoint /*now*/) {
  const int num_sites = static_cast<int>(sites_.size());
  if (hello.site < 0 || hello.site >= num_sites)
    return {.refusal = fmt::format("there is no site {}: the hub has sites 0 to {}", hello.site, num_sites - 1)};
  const bool nobody = std::ranges::all_of(sites_, [](const Site& site) { return site.state == State::kAway; });
  if (hello.num_ranks < 1 || hello.rank < 0 || hello.rank >= hello.num_ranks ||
      (!nobody && hello.num_ranks != num_ranks_))
    return {.refusal =
                fmt::format("site {} has {} ranks, and the other sites {}", hello.site, hello.num_ranks, num_ranks_)};
  if (ended_) return {.refusal = "the other sites have ended this training"};
  Site& site = at(hello.site);
  if (site.state == State::kLeft) site.state = State::kAway;
  if (site.state != State::kAway && site.job != hello.job)
    lose(hello.site, "it has been started again", ErrorCode::kPeerLost, "this site has been started again");
  num_ranks_ = hello.num_ranks;
  timeout_ = std::max(timeout_, hello.timeout);
  if (site.state == State::kAway) {
    ++site.start;
    site.state = State::kComing;
    site.job = hello.job;
    site.names.assign(static_cast<std::size_t>(num_ranks_), "");
  }
  std::string& name = site.names[static_cast<std::size_t>(hello.rank)];
  if (!name.empty()) return {.refusal = fmt::format("rank {} of site {} came twice", hello.rank, hello.site)};
  name = hello.name;
  const Arrival arrival{.start = site.start};
  if (std::ranges::none_of(site.names, [](const std::string& one) { return one.empty(); })) {
    site.state = State::kReady;
    settle();
  }
  return arrival;
}

void SiteRounds::welcome(int site, bool joins) {
  at(site).welcomed = true;
  say_all(site, {.word = SiteWord::kWelcome, .round = next_, .sites = present_, .value = joins ? 1U : 0U});
}

void SiteRounds::begin() {
  rounds_.clear();
  news_.clear();
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    if (at(site).state != State::kReady) continue;
    at(site).state = State::kPresent;
    at(site).from = next_;
    present_ |= site_bit(site);
  }
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    if (has_site(present_, site)) welcome(site, false);
  }
}

void SiteRounds::settle() {
  if (present_ == 0) {
    bool any = false;
    for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
      if (at(site).state != State::kReady) continue;
      // It has been told that it joins a training, which is no more.
      if (at(site).welcomed || ended_)
        dismiss(site, ErrorCode::kPeerLost,
                ended_ ? "the other sites have ended this training" : "all sites that were training are lost");
      any = any || at(site).state == State::kReady;
    }
    if (any && missing() == 0) begin();
  } else {
    for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
      if (at(site).state == State::kReady && !at(site).welcomed) welcome(site, true);
    }
  }
  decide();
}

void SiteRounds::put(const SiteMember& from, std::uint64_t round, std::uint64_t about, SiteBytes message,
                     TimePoint now) {
  if (!is_current(from)) return;
  const Site& site = at(from.site);
  if (site.state != State::kPresent || round < next_ || round < site.from) {
    lose(from.site, name_of(from) + " has said what is not due", ErrorCode::kInternal, "this rank has said it");
    return settle();
  }
  const auto [found, is_new] = rounds_.try_emplace(round);
  Round& one = found->second;
  if (is_new) {
    one.about = about;
    one.messages.assign(sites_.size(), std::vector<SiteBytes>(static_cast<std::size_t>(num_ranks_)));
  }
  if (one.about != about) {
    return fail_all(ErrorCode::kMismatch,
                    fmt::format("sites make different exchanges: {} of site {} is in another one than the first",
                                name_of(from), from.site));
  }
  std::vector<SiteBytes>& own = one.messages[static_cast<std::size_t>(from.site)];
  own[static_cast<std::size_t>(from.rank)] = message;
  for (int other = 0; other < static_cast<int>(sites_.size()); ++other) {
    if (other == from.site || !has_site(required(round), other)) continue;
    say(other, from.rank, {.word = SiteWord::kMessage, .site = from.site, .round = round}, message);
  }
  if (std::ranges::all_of(own, [](const SiteBytes& bytes) { return bytes != nullptr; })) {
    if (one.complete == 0) one.since = now;
    one.complete |= site_bit(from.site);
    decide();
  }
}

void SiteRounds::ask_for_states(int giver, std::uint64_t round) {
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    Site& one = at(site);
    if (one.state != State::kReady || !one.welcomed || one.giver >= 0) continue;
    one.giver = giver;
    one.states.assign(static_cast<std::size_t>(num_ranks_), nullptr);
    say_all(giver, {.word = SiteWord::kJoiner, .site = site, .round = round, .value = one.start});
  }
}

void SiteRounds::decide() {
  while (present_ != 0) {
    const SiteSet awaited = required(next_);
    if (awaited == 0) {  // of sites that are lost; those that are here begin later
      rounds_.erase(next_++);
      continue;
    }
    const auto found = rounds_.find(next_);
    if (found == rounds_.end() || (found->second.complete & awaited) != awaited) return;
    int giver = 0;
    while (!has_site(awaited, giver)) ++giver;
    ask_for_states(giver, next_);
    const SiteBytes news = text_bytes(std::exchange(news_, ""));
    for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
      if (has_site(awaited, site))
        say_all(site, {.word = SiteWord::kRound, .round = next_, .sites = found->second.complete, .value = present_},
                news);
    }
    rounds_.erase(found);
    ++next_;
  }
}

void SiteRounds::state_for(const SiteMember& from, int site, std::uint64_t start, std::uint64_t round,
                           const SiteBytes& state, TimePoint /*now*/) {
  if (!is_current(from) || site < 0 || site >= static_cast<int>(sites_.size())) return;
  Site& one = at(site);
  if (one.state != State::kReady || one.start != start || one.giver != from.site) return;  // it is no more
  if (round < next_) {
    lose(from.site, name_of(from) + " has said what is not due", ErrorCode::kInternal, "this rank has said it");
    return settle();
  }
  one.states[static_cast<std::size_t>(from.rank)] = state;
  if (std::ranges::any_of(one.states, [](const SiteBytes& bytes) { return bytes == nullptr; })) return;
  one.state = State::kPresent;
  one.from = round;
  present_ |= site_bit(site);
  news_ += fmt::format("site {} is back\n", site);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    say(site, rank, {.word = SiteWord::kState, .round = round, .sites = present_},
        std::exchange(one.states[static_cast<std::size_t>(rank)], nullptr));
  }
  for (const auto& [number, undecided] : rounds_) {
    for (int other = 0; number >= round && other < static_cast<int>(sites_.size()); ++other) {
      for (int rank = 0; rank < num_ranks_; ++rank) {
        const SiteBytes& message = undecided.messages[static_cast<std::size_t>(other)][static_cast<std::size_t>(rank)];
        if (message) say(site, rank, {.word = SiteWord::kMessage, .site = other, .round = number}, message);
      }
    }
  }
  decide();
}

void SiteRounds::leave_present(int site) {
  present_ &= ~site_bit(site);
  for (Site& one : sites_) {
    if (one.giver != site || one.state != State::kReady) continue;
    one.giver = -1;  // another one is asked
    one.states.clear();
  }
  if (present_ == 0) {
    rounds_.clear();
    news_.clear();
  }
}

void SiteRounds::lose(int site, const std::string& why, ErrorCode code, const std::string& to_itself) {
  Site& one = at(site);
  if (one.state == State::kAway) return;
  const bool was_present = one.state == State::kPresent;
  if (one.state != State::kLeft) dismiss(site, code, to_itself);
  one.state = State::kAway;
  if (!was_present) return;
  news_ += fmt::format("site {} is lost: {}\n", site, why);
  leave_present(site);
}

void SiteRounds::bye(const SiteMember& from, TimePoint /*now*/) {
  if (!is_current(from)) return;
  Site& site = at(from.site);
  const bool was_present = site.state == State::kPresent;
  site.state = State::kLeft;
  if (!was_present) return settle();
  news_ += fmt::format("site {} has ended its training\n", from.site);
  ended_ = present_ == site_bit(from.site);
  leave_present(from.site);
  settle();
}

void SiteRounds::closed(const SiteMember& from, const std::string& why, TimePoint /*now*/) {
  if (!is_current(from) || at(from.site).state == State::kLeft) return;
  const std::string text = "its " + name_of(from) + " " + why;
  at(from.site).names[static_cast<std::size_t>(from.rank)].clear();
  lose(from.site, text, ErrorCode::kPeerLost, "this site is lost to the others: " + text);
  settle();
}

void SiteRounds::gone(int site, TimePoint /*now*/) {
  at(site).expected = false;
  lose(site, "it has ended", ErrorCode::kPeerLost, "this site has ended");
  settle();
}

void SiteRounds::fail_all(ErrorCode code, const std::string& text) {
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    if (at(site).state != State::kAway && at(site).state != State::kLeft) dismiss(site, code, text);
  }
  present_ = 0;
  rounds_.clear();
  news_.clear();
}

std::optional<SiteRounds::TimePoint> SiteRounds::due() const {
  const auto first = rounds_.find(next_);
  if (first == rounds_.end() || first->second.complete == 0) return std::nullopt;
  return first->second.since + timeout_;
}

void SiteRounds::tick(TimePoint now) {
  const std::optional<TimePoint> end = due();
  if (!end || now < *end) return;
  const SiteSet late = required(next_) & ~rounds_.at(next_).complete;
  const double seconds = static_cast<double>(timeout_.count()) / 1000;
  for (int site = 0; site < static_cast<int>(sites_.size()); ++site) {
    if (!has_site(late, site)) continue;
    lose(site, fmt::format("it has not come to the exchange within {:g} s of another site", seconds),
         ErrorCode::kTimeout,
         fmt::format("the other sites have gone on without this one, which came to no exchange for {:g} s", seconds));
  }
  settle();
}

}  // namespace zeroth
