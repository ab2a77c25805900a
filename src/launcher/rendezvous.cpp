#include "launcher/rendezvous.h"

#include "hosts/secret.h"
#include "hosts/sockets.h"
#include "launcher/addresses.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <csignal>
#include <utility>

namespace zeroth::launcher {
namespace {

// [Note: Who may take part] Both sides send a nonce (kChallenge) and then prove that they know the secret
// (kProof, secret.h); only then does the node say hello, and only then is a frame longer than
// kMaxStrangerBytes read. The secret itself is never sent.

constexpr Milliseconds kReportEvery{5000};
constexpr Milliseconds kRetryEvery{500};
constexpr Milliseconds kConnectPatience{2000};

/// A signal that asks for the end, 0 if none has come.
int stop_signal(SignalInbox& inbox) {
  int stop = 0;
  for (const int signal : inbox.take()) {
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT) stop = signal;
  }
  return stop;
}

long long seconds_since(SteadyClock::time_point begin) {
  return std::chrono::round<std::chrono::seconds>(SteadyClock::now() - begin).count();
}

[[noreturn]] void refuse(const std::string& message, ErrorContext context = {}) {
  context.where = "--rdzv";
  throw Error(ErrorCode::kLaunch, message, std::move(context));
}

std::string nonce_in(const Frame& frame) {
  if (frame.type != FrameType::kChallenge || frame.payload.size() != kNonceBytes) refuse("no challenge came");
  return frame.payload;
}

/// Where the head's own name leads to its loopback (Debian's 127.0.1.1), the others come to another address.
Endpoint open_to_others(Endpoint endpoint) {
  const bool is_name = !is_address(endpoint.host) && endpoint.host != "localhost";
  if (is_name && is_loopback(address_towards(endpoint.host))) endpoint.host.clear();
  return endpoint;
}

}  // namespace

Rendezvous::Rendezvous(RendezvousSpec spec)
    : spec_(std::move(spec)),
      socket_(listen_at(open_to_others(spec_.endpoint))),
      links_(static_cast<std::size_t>(spec_.num_nodes - 1)) {}

int Rendezvous::gather(SignalInbox& inbox, const Say& say, const JobTimeout& job) {
  const auto begin = SteadyClock::now();
  auto report_at = begin + kReportEvery;
  std::vector<pollfd> polled;
  while (num_missing() > 0) {
    polled.assign(
        {{.fd = inbox.fd(), .events = POLLIN, .revents = 0}, {.fd = socket_.get(), .events = POLLIN, .revents = 0}});
    for (const Visitor& visitor : visitors_) visitor.channel.add_polled(polled);
    for (const auto& link : links_) {
      if (link) link->add_polled(polled);
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(kWaitSlice.count()));
    std::size_t at = 2;
    for (Visitor& visitor : visitors_) {
      visitor.channel.handle(polled[at], polled[at + 1]);
      at += 2;
    }
    for (const auto& link : links_) {
      if (link) at += link->handle(std::span(polled).subspan(at));
    }
    std::erase_if(visitors_, [&](Visitor& visitor) { return look_at(visitor, say); });
    drop_lost_nodes(say);
    if (polled[1].revents != 0) accept_visitors();
    if (const int signal = stop_signal(inbox); signal != 0) return signal;
    const auto now = SteadyClock::now();
    if (num_missing() > 0) job.check(fmt::format("waited for {} for {} s", missing(), seconds_since(begin)));
    if (now - begin >= spec_.timeout) {
      refuse(fmt::format("{} did not come within {} s", missing(), seconds_since(begin)),
             {.got = num_strangers_ == 0 ? "" : fmt::format("{} connections without the secret", num_strangers_),
              .hint = fmt::format("each node: zeroth-run --nnodes {} --node-rank K --rdzv {} ...", spec_.num_nodes,
                                  text_of(spec_.endpoint))});
    }
    if (now >= report_at) {
      report_at += kReportEvery;
      say(fmt::format("waiting for {} for {} s ({} of {} nodes are here)", missing(), seconds_since(begin),
                      spec_.num_nodes - num_missing(), spec_.num_nodes));
    }
  }
  if (num_strangers_ > 0) say(fmt::format("{} connections without the secret were refused", num_strangers_));
  visitors_.clear();
  socket_.reset();
  return 0;
}

void Rendezvous::accept_visitors() {
  for (;;) {
    std::string address;
    UniqueFd socket = accept_one(socket_.get(), address);
    if (!socket.valid()) return;
    if (visitors_.size() >= kMaxStrangers) {
      visitors_.pop_front();
      ++num_strangers_;
    }
    std::string here = local_address(socket.get());
    visitors_.push_back({.channel = channel_over(std::move(socket), spec_.lost_after, kMaxStrangerBytes),
                         .address = address,
                         .here = std::move(here),
                         .nonce = random_nonce(),
                         .until = SteadyClock::now() + kStrangerPatience});
    visitors_.back().channel.send(FrameType::kChallenge, visitors_.back().nonce);
  }
}

bool Rendezvous::look_at(Visitor& visitor, const Say& say) {
  try {
    while (const auto frame = visitor.channel.next()) {
      if (visitor.own_nonce.empty()) {
        visitor.own_nonce = nonce_in(*frame);
      } else if (!visitor.proven) {
        const std::string expected = proof_of(ProofSide::kNode, spec_.secret, visitor.nonce, visitor.own_nonce);
        if (frame->type != FrameType::kProof || !same_proof(frame->payload, expected)) refuse("another secret");
        visitor.proven = true;
        visitor.channel.send(FrameType::kProof,
                             proof_of(ProofSide::kHead, spec_.secret, visitor.nonce, visitor.own_nonce));
      } else if (frame->type == FrameType::kHello) {
        admit(visitor, decode_hello(frame->payload), say);
        return true;
      }
    }
  } catch (const Error& error) {
    if (visitor.proven) throw;
    refuse_stranger(visitor, error.message(), say);
    return true;
  }
  if (visitor.channel.ended() || SteadyClock::now() >= visitor.until) {
    refuse_stranger(visitor, visitor.channel.ended() ? "it left" : "it said nothing", say);
    return true;
  }
  return false;
}

void Rendezvous::refuse_stranger(const Visitor& visitor, const std::string& why, const Say& say) {
  // A scanner must not fill the log.
  if (++num_strangers_ == 1)
    say(fmt::format("a connection from {} was refused: {}; others are only counted", visitor.address, why));
}

/// The visitor knows the secret: what is wrong with it is wrong with the job.
void Rendezvous::admit(Visitor& visitor, const Hello& hello, const Say& say) {
  ZR_FAILPOINT("launcher.admit");
  const std::string who = fmt::format("node {} ({} at {})", hello.node, hello.host, visitor.address);
  const auto check = [&](bool fits, const std::string& message, const std::string& expected, const std::string& got) {
    if (fits) return;
    const Error error(ErrorCode::kLaunch, message, {.where = "--rdzv", .who = who, .expected = expected, .got = got});
    visitor.channel.send(FrameType::kRefused, encode(error));
    throw error;
  };
  check(hello.version == ZEROTH_VERSION_TEXT, "another version of zeroth-run is on that node", ZEROTH_VERSION_TEXT,
        hello.version);
  check(hello.num_nodes == spec_.num_nodes, "a node expects another number of nodes",
        fmt::format("--nnodes {}", spec_.num_nodes), fmt::format("--nnodes {}", hello.num_nodes));
  check(hello.node >= 1 && hello.node < spec_.num_nodes, "a node with a number that is not there",
        fmt::format("--node-rank 1 to {}", spec_.num_nodes - 1), fmt::format("--node-rank {}", hello.node));
  check(hello.num_ranks >= 1, "a node without ranks", "at least 1", std::to_string(hello.num_ranks));
  auto& link = links_[static_cast<std::size_t>(hello.node - 1)];
  if (link) {
    const Error error(ErrorCode::kLaunch, "this node is here already",
                      {.where = "--rdzv", .who = who, .hint = "every node has a --node-rank of its own"});
    visitor.channel.send(FrameType::kRefused, encode(error));
    say(fmt::format("{} was refused: this node is here already", who));
    return;
  }
  if (reached_at_.empty() || is_loopback(reached_at_)) reached_at_ = visitor.here;
  visitor.channel.set_max_frame_bytes(kMaxFrameBytes);
  link =
      std::make_unique<AgentLink>(fmt::format("{}/node{}", hello.host, hello.node), std::move(visitor.channel), hello);
}

/// A node that went before the start may come again.
void Rendezvous::drop_lost_nodes(const Say& say) {
  for (auto& link : links_) {
    if (!link) continue;
    while (link->next()) {  // pings
    }
    link->channel().keep_alive();
    if (!link->channel().ended()) continue;
    say(fmt::format("host {} has left before the start", link->host()));
    link.reset();
  }
}

void Rendezvous::dismiss(const JobEnd& end) {
  for (const auto& link : links_) {
    if (link) link->channel().send(FrameType::kEnd, encode(end));
  }
}

int Rendezvous::num_missing() const {
  return static_cast<int>(std::ranges::count_if(links_, [](const auto& link) { return link == nullptr; }));
}

std::string Rendezvous::missing() const {
  std::vector<std::string> numbers;
  for (std::size_t i = 0; i < links_.size() && numbers.size() < 16; ++i) {
    if (!links_[i]) numbers.push_back(std::to_string(i + 1));
  }
  return (num_missing() == 1 ? "node " : "nodes ") + join(numbers, ", ") +
         (static_cast<int>(numbers.size()) < num_missing() ? ", ..." : "");
}

namespace {

/// Shows the secret and sees the head's proof; false while frames are missing.
class Introduction {
 public:
  Introduction(const std::string& secret, Channel& channel) : secret_(&secret), channel_(&channel) {
    channel_->send(FrameType::kChallenge, nonce_);
  }

  [[nodiscard]] bool done() {
    while (const auto frame = channel_->next()) {
      if (head_nonce_.empty()) {
        head_nonce_ = nonce_in(*frame);
        channel_->send(FrameType::kProof, proof_of(ProofSide::kNode, *secret_, head_nonce_, nonce_));
      } else {
        const std::string expected = proof_of(ProofSide::kHead, *secret_, head_nonce_, nonce_);
        if (frame->type != FrameType::kProof || !same_proof(frame->payload, expected)) {
          refuse("who listens at --rdzv does not know the secret", {.hint = "is it another job?"});
        }
        return true;
      }
    }
    return false;
  }

 private:
  const std::string* secret_;
  Channel* channel_;
  std::string nonce_ = random_nonce();
  std::string head_nonce_;
};

/// True when the head has shown the secret; false if the connection ended, nothing came in time, or a signal
/// did.
bool introduce(const RendezvousSpec& spec, Channel& channel, SignalInbox& inbox, Milliseconds patience, int& signal) {
  Introduction introduction(spec.secret, channel);
  const Deadline deadline(patience);
  std::vector<pollfd> polled;
  while (!deadline.passed()) {
    polled.assign(1, {.fd = inbox.fd(), .events = POLLIN, .revents = 0});
    channel.add_polled(polled);
    ::poll(polled.data(), polled.size(), static_cast<int>(deadline.slice().count()));
    channel.handle(polled[1], polled[2]);
    if (introduction.done()) return true;
    signal = stop_signal(inbox);
    if (signal != 0 || channel.ended()) return false;
  }
  return false;
}

}  // namespace

std::unique_ptr<Channel> join_job(const RendezvousSpec& spec, SignalInbox& inbox, const Say& say) {
  ZR_FAILPOINT("launcher.join");
  const auto begin = SteadyClock::now();
  auto report_at = begin + kReportEvery;
  int refusals = 0;
  const auto left = [&] {  // no attempt lasts longer
    return std::max(Milliseconds{1},
                    std::chrono::duration_cast<Milliseconds>(begin + spec.timeout - SteadyClock::now()));
  };
  for (;;) {
    std::string why;
    int signal = 0;
    if (UniqueFd socket = connect_once(spec.endpoint, std::min(kConnectPatience, left()), why); socket.valid()) {
      auto channel = std::make_unique<Channel>(channel_over(std::move(socket), spec.lost_after, kMaxStrangerBytes));
      if (introduce(spec, *channel, inbox, std::min(kStrangerPatience, left()), signal)) {
        channel->set_max_frame_bytes(kMaxFrameBytes);
        return channel;
      }
      const bool closed = channel->ended();
      why = closed ? "the connection was closed" : "whoever listens there says nothing";
      if (signal == 0 && closed && ++refusals == 3) {
        refuse("the head closes the connection",
               {.which = text_of(spec.endpoint), .hint = "the secret must be the same on all nodes"});
      }
    }
    pollfd ready{.fd = inbox.fd(), .events = POLLIN, .revents = 0};
    if (signal == 0 && ::poll(&ready, 1, static_cast<int>(std::min(kRetryEvery, left()).count())) == 1)
      signal = stop_signal(inbox);
    if (signal != 0) return nullptr;
    const auto now = SteadyClock::now();
    if (now - begin >= spec.timeout) {
      refuse(fmt::format("the head did not answer for {} s: {}", seconds_since(begin), why),
             {.which = text_of(spec.endpoint),
              .hint = is_loopback(address_towards(spec.endpoint.host))
                          ? "this address leads to this node itself: name node 0 as the other nodes reach it"
                          : "node 0 listens there: is it started, with the same --rdzv, and is the port open?"});
    }
    if (now >= report_at) {
      report_at += kReportEvery;
      say(fmt::format("waiting for the head at {} for {} s: {}", text_of(spec.endpoint), seconds_since(begin), why));
    }
  }
}

}  // namespace zeroth::launcher
