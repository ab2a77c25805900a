#include "comm/control/introduction.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/secret.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr Milliseconds kGuestPatience{5'000};
constexpr Milliseconds kAgainAfter{100};
constexpr std::size_t kMostStrangers = 64;  // at once, besides ranks

/// No two things that are said have the same text: the address has its length before it, and the hello is a frame.
Digest proof_of(std::string_view side, const JobSecret& secret, const TcpAddress& hub,
                const ChallengeMessage& challenge, const HelloMessage& hello) {
  const std::string address = to_text(hub);
  std::string text = fmt::format("zeroth control {} {:3}{}", side, address.size(), address);
  text.append(as_text(challenge.nonce));
  for (const std::byte byte : encode(hello)) text.push_back(static_cast<char>(byte));
  return hmac_sha256(as_text(secret), text);
}

bool same(const Digest& a, const Digest& b) {
  return same_secret(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

Nonce draw_nonce() {
  Nonce nonce{};
  fill_random(std::as_writable_bytes(std::span(nonce)), "the control plane", {.where = "comm.control"});
  return nonce;
}

/// One address. Empty, and `why`, unless who listens there has the secret.
std::optional<Introduction> try_address(const IntroductionSpec& spec, const TcpAddress& hub, std::string& why) {
  const Deadline deadline(spec.patience);
  ForkClosedFd socket = connect_tcp(hub, deadline, why);
  if (!socket) return std::nullopt;
  Introduction to{ControlLink(std::move(socket))};
  HelloMessage hello = spec.hello;
  hello.nonce = draw_nonce();
  std::optional<ChallengeMessage> challenge;
  bool welcome = false;
  why.clear();
  while (true) {
    pollfd watched{.fd = to.link.fd(), .events = POLLIN, .revents = 0};
    (void)::poll(&watched, 1, static_cast<int>(deadline.slice().count()));
    spec.check();
    const bool open = to.link.receive([&](const ControlMessage& message) {
      if (!why.empty()) return;
      if (welcome) {
        if (const auto* verdict = std::get_if<VerdictMessage>(&message)) to.verdict = *verdict;
      } else if (const auto* first = std::get_if<ChallengeMessage>(&message); first != nullptr && !challenge) {
        challenge = *first;
        ZR_FAILPOINT("control.hello");
        hello.proof = proof_of_rank(spec.secret, hub, *challenge, hello);
        to.link.send(hello);
      } else if (const auto* answer = std::get_if<WelcomeMessage>(&message); answer != nullptr && challenge) {
        welcome = same(answer->proof, proof_of_hub(spec.secret, hub, *challenge, hello));
        if (welcome) to.link.trust();
        if (!welcome) why = "who listens there does not know the job's secret";
      } else {
        why = "who listens there does not show that it knows the job's secret";
      }
    });
    if (welcome) return to;
    if (why.empty() && !open) why = to.link.trouble();
    if (why.empty() && deadline.passed()) why = "who listens there says nothing";
    if (!why.empty()) return std::nullopt;
  }
}

}  // namespace

JobSecret draw_secret() {
  JobSecret secret{};
  fill_random(std::as_writable_bytes(std::span(secret)), "the job's secret", {.where = "comm.control"});
  return secret;
}

Digest proof_of_rank(const JobSecret& secret, const TcpAddress& hub, const ChallengeMessage& challenge,
                     HelloMessage hello) {
  hello.proof = {};
  return proof_of("rank", secret, hub, challenge, hello);
}

Digest proof_of_hub(const JobSecret& secret, const TcpAddress& hub, const ChallengeMessage& challenge,
                    const HelloMessage& hello) {
  return proof_of("hub", secret, hub, challenge, hello);
}

Reception::Reception(const std::vector<std::string>& hosts, int num_ranks)
    : secret_(draw_secret()), come_(static_cast<std::size_t>(num_ranks)) {
  come_[0] = true;  // the hub itself
  for (const std::string& host : hosts) {
    TcpAddress bound;
    listeners_.push_back(listen_tcp(host, bound));
    addresses_.push_back(std::move(bound));
  }
}

void Reception::add_polled(std::vector<pollfd>& polled) const {
  const bool full = SteadyClock::now() < full_until_;  // who cannot be let in would only keep this thread awake
  for (const ForkClosedFd& listener : listeners_)
    polled.push_back({.fd = full ? -1 : listener.get(), .events = POLLIN, .revents = 0});
  for (const Guest& guest : guests_) polled.push_back({.fd = guest.link.fd(), .events = POLLIN, .revents = 0});
}

void Reception::admit() {
  for (std::size_t index = 0; index < listeners_.size(); ++index) {
    for (std::size_t count = 0; count < kMostStrangers; ++count) {  // and the others at the next look
      TcpAddress peer;
      ForkClosedFd socket = accept_tcp(listeners_[index], peer);
      if (!socket) {
        if (errno == EMFILE || errno == ENFILE) full_until_ = SteadyClock::now() + kAgainAfter;
        break;
      }
      if (guests_.size() == come_.size() + kMostStrangers) {
        guests_.erase(guests_.begin());  // the oldest makes room: a rank introduces itself at once
        ++strangers_;
      }
      Guest& guest = guests_.emplace_back(Guest{.link = ControlLink(std::move(socket)),
                                                .hub = addresses_[index],
                                                .peer = peer,
                                                .deadline = Deadline(kGuestPatience),
                                                .challenge = {draw_nonce()}});
      guest.link.send(guest.challenge);
    }
  }
}

std::string Reception::objection(const Guest& guest, const HelloMessage& hello) const {
  if (!same(hello.proof, proof_of_rank(secret_, guest.hub, guest.challenge, hello)))
    return "it does not know the job's secret";
  if (hello.size != come_.size() || hello.rank >= come_.size())
    return fmt::format("it says that it is rank {} of {}, in a job of {}", hello.rank, hello.size, come_.size());
  return come_[hello.rank] ? fmt::format("it says that it is rank {}, which has come already", hello.rank) : "";
}

std::vector<Reception::Member> Reception::look(const Refused& refused) {
  admit();
  std::vector<Member> members;
  std::erase_if(guests_, [&](Guest& guest) {
    std::optional<HelloMessage> hello;
    std::string why;
    const bool open = guest.link.receive([&](const ControlMessage& message) {
      const auto* first = std::get_if<HelloMessage>(&message);
      if (first == nullptr || hello) {
        why = "it speaks before it has shown that it knows the job's secret";
      } else {
        hello = *first;
      }
    });
    if (open && !hello && why.empty() && !guest.deadline.passed()) return false;
    if (why.empty() && hello) {
      why = objection(guest, *hello);
    } else if (why.empty()) {
      why = open ? "it says nothing" : guest.link.trouble();
    }
    if (!why.empty()) {
      ++strangers_;
      refused(guest.peer, why);
      return true;
    }
    come_[hello->rank] = true;
    ZR_FAILPOINT("control.welcome");
    guest.link.trust();
    guest.link.send(WelcomeMessage{proof_of_hub(secret_, guest.hub, guest.challenge, *hello)});
    members.push_back({std::move(*hello), std::move(guest.link)});
    return true;
  });
  return members;
}

Introduction introduce(const IntroductionSpec& spec) {
  ZR_FAILPOINT("control.connect");
  const Deadline deadline(spec.timeout);
  std::vector<std::string> found(spec.hub.size());
  do {
    for (std::size_t index = 0; index < spec.hub.size(); ++index) {
      std::string why;
      if (std::optional<Introduction> done = try_address(spec, spec.hub[index], why)) return *std::move(done);
      found[index] = fmt::format("{}: {}", to_text(spec.hub[index]), why);
      spec.check();
    }
    std::this_thread::sleep_for(std::min(deadline.remaining(), kAgainAfter));
  } while (!deadline.passed());
  throw Error(
      ErrorCode::kResource, "rank 0 cannot be reached beside the data",
      {.where = "comm.control",
       .who = spec.who,
       .expected = "rank 0, with the job's secret",
       .got = fmt::format("{}", fmt::join(found, "; ")),
       .hint = "open the network between the hosts, or name the interface that reaches them with ZEROTH_INTERFACE"});
}

}  // namespace zeroth::detail
