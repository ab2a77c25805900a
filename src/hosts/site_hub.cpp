#include "hosts/site_hub.h"

#include "hosts/secret.h"
#include "hosts/sockets.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

namespace zeroth {
namespace {

constexpr Milliseconds kStrangerMay{10'000};
constexpr Milliseconds kFarewell{5'000};
constexpr std::size_t kProofBytes = 32;
constexpr Milliseconds kNoticeEvery{10'000};
/// This process itself was stopped.
constexpr Milliseconds kOwnGap{5'000};

int port_of(int socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) != 0) return 0;
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                         : reinterpret_cast<const sockaddr_in&>(own).sin_port);
}

}  // namespace

struct SiteHub::Link {
  Link(UniqueFd connection, std::string peer)
      : socket(std::move(connection)), stream(socket.get()), address(std::move(peer)), nonce(random_nonce()) {}

  UniqueFd socket;
  SiteStream stream;
  std::string address;
  std::string nonce;
  TimePoint begun = SteadyClock::now();
  TimePoint heard = begun;
  bool known = false;  ///< it has shown the secret
  std::uint64_t session = 0;
  SiteMember member{};
  std::string proof{};                   ///< that it gets with its welcome
  std::optional<TimePoint> dismissed{};  ///< since then only what waits to be sent is left
  bool ended = false;
};

SiteHub::SiteHub(int num_sites, const Endpoint& at, std::string secret)
    : num_sites_(num_sites), secret_(std::move(secret)), listening_(listen_at(at)), port_(port_of(listening_.get())) {}

SiteHub::~SiteHub() = default;

void SiteHub::add_polled(std::vector<pollfd>& polled) const {
  polled.push_back({.fd = listening_.get(), .events = POLLIN, .revents = 0});
  for (const auto& link : links_) {
    const int out = link->stream.wants_to_write() ? POLLOUT : 0;
    polled.push_back({.fd = link->socket.get(), .events = static_cast<short>(POLLIN | out), .revents = 0});
  }
}

SiteRounds& SiteHub::rounds_of(std::uint64_t session) {
  const auto [found, is_new] = sessions_.try_emplace(session, num_sites_);
  if (is_new) {
    for (const int site : gone_) found->second.gone(site, SteadyClock::now());
  }
  return found->second;
}

void SiteHub::accept_all() {
  for (;;) {
    std::string address;
    UniqueFd socket = accept_one(listening_.get(), address);
    if (!socket) return;
    links_.push_back(std::make_unique<Link>(std::move(socket), std::move(address)));
    Link& link = *links_.back();
    link.stream.send_text({.word = SiteWord::kChallenge}, link.nonce);
  }
}

void SiteHub::refuse(Link& link, const std::string& why) {
  link.stream.send_text({.word = SiteWord::kDismissed, .value = static_cast<std::uint64_t>(ErrorCode::kPeerLost)}, why);
  link.dismissed = SteadyClock::now();
}

void SiteHub::admit(Link& link, const SiteHead& head, const std::string& payload) {
  const bool whole = head.word == SiteWord::kHello && payload.size() > kNonceBytes + kProofBytes;
  const std::string nonce = whole ? payload.substr(0, kNonceBytes) : "";
  if (!whole ||
      !same_proof(payload.substr(kNonceBytes, kProofBytes), proof_of(ProofSide::kNode, secret_, link.nonce, nonce))) {
    ++strangers_;
    link.ended = true;
    return;
  }
  link.known = true;
  link.stream.trust();
  link.proof = proof_of(ProofSide::kHead, secret_, link.nonce, nonce);
  link.session = head.round;
  const std::string said = payload.substr(kNonceBytes + kProofBytes);  // "job name"
  const std::size_t space = said.find(' ');
  SiteRounds& rounds = rounds_of(link.session);
  const bool in_range = head.site >= 0 && head.rank >= 0;
  link.member = {.site = head.site, .rank = head.rank};
  // Whoever comes may complete a site: the words to it need the link.
  const SiteRounds::Hello hello{.site = head.site,
                                .rank = head.rank,
                                .num_ranks = static_cast<int>(head.sites),
                                .timeout = Milliseconds(head.value),
                                .job = said.substr(0, space),
                                .name = space == std::string::npos ? "unnamed" : said.substr(space + 1)};
  const SiteRounds::Arrival arrival =
      in_range ? rounds.come(hello, SteadyClock::now()) : SiteRounds::Arrival{.refusal = "there is no such rank"};
  link.member.start = arrival.start;
  if (arrival.refusal.empty()) members_[{link.session, link.member}] = &link;
  act();
  if (!arrival.refusal.empty()) refuse(link, arrival.refusal);
}

void SiteHub::take(Link& link, const SiteHead& head, std::string payload) {
  link.heard = SteadyClock::now();
  if (link.dismissed || link.ended) return;
  if (!link.known) return admit(link, head, payload);
  SiteRounds& rounds = rounds_of(link.session);
  const TimePoint now = link.heard;
  switch (head.word) {
    case SiteWord::kPut:
      rounds.put(link.member, head.round, head.value, std::make_shared<const std::string>(std::move(payload)), now);
      break;
    case SiteWord::kStateFor:
      rounds.state_for(link.member, head.site, head.value, head.round,
                       std::make_shared<const std::string>(std::move(payload)), now);
      break;
    case SiteWord::kBye:
      rounds.bye(link.member, now);
      break;
    default:
      return;
  }
  act();
}

void SiteHub::act() {
  for (auto& [session, rounds] : sessions_) {
    for (SiteAction& action : rounds.take_actions()) {
      const auto found = members_.find({session, action.to});
      if (found == members_.end()) continue;  // it has gone
      Link& link = *found->second;
      if (action.head.word == SiteWord::kWelcome) action.payload = std::make_shared<const std::string>(link.proof);
      if (action.head.word == SiteWord::kDismissed) link.dismissed = SteadyClock::now();
      link.stream.send(action.head, std::move(action.payload));
    }
  }
}

void SiteHub::lose(Link& link, const std::string& why) {
  link.ended = true;
  const auto found = members_.find({link.session, link.member});
  if (!link.known || found == members_.end() || found->second != &link) return;
  members_.erase(found);
  if (!link.dismissed) rounds_of(link.session).closed(link.member, why, SteadyClock::now());
  act();
}

void SiteHub::gone(int site) {
  gone_.push_back(site);
  for (auto& [session, rounds] : sessions_) rounds.gone(site, SteadyClock::now());
  act();
}

void SiteHub::turn() {
  const TimePoint now = SteadyClock::now();
  const auto gap = now - turned_;
  turned_ = now;
  accept_all();
  for (auto& link : links_) {
    if (gap > kOwnGap) link->heard += gap;
    link->stream.flush();
    const bool open =
        link->stream.receive([&](const SiteHead& head, std::string payload) { take(*link, head, std::move(payload)); });
    if (!open) lose(*link, "has ended or closed its connection");
    if (!link->ended && link->known && now - link->heard > kSilent)
      lose(*link, fmt::format("has been silent for {:g} s", static_cast<double>(kSilent.count()) / 1000));
    if (!link->known && now - link->begun > kStrangerMay) link->ended = true;
    // It closes when it has read why; what it has sent meanwhile must not reset the connection.
    if (link->dismissed && now - *link->dismissed > kFarewell) lose(*link, "");
  }
  links_.remove_if([](const auto& link) { return link->ended; });
  for (auto& [session, rounds] : sessions_) rounds.tick(now);
  act();
}

std::string SiteHub::take_notice() {
  if (sessions_.empty() || SteadyClock::now() - noticed_ < kNoticeEvery) return "";
  noticed_ = SteadyClock::now();
  const SiteRounds& last = sessions_.rbegin()->second;
  if (last.present() != 0 || last.missing() == 0) return "";
  return "the other sites wait for " + text_of_sites(last.missing());
}

}  // namespace zeroth
