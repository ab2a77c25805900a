#include "comm/sites/site_client.h"

#include "base/own_thread.h"
#include "hosts/option_values.h"
#include "hosts/secret.h"
#include "hosts/sockets.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr const char* kSitesWhere = "comm.sites";
constexpr Milliseconds kPingAfter{1'000};
constexpr Milliseconds kConnectPatience{5'000};
/// The hub answers a wait within a deadline of its own.
constexpr Milliseconds kHubGrace{10'000};
constexpr Milliseconds kGoodbye{2'000};

}  // namespace

SiteClient::SiteClient(const SitePlace& place, SiteClientOptions options)
    : place_(place), options_(std::move(options)), nonce_(random_nonce()), pid_(::getpid()) {
  const Endpoint hub = parse_endpoint(kSitesAtVariable, place_.hub);
  const Milliseconds patience =
      options_.activity ? options_.activity->patience(options_.timeout) : 2 * options_.timeout;
  const Deadline deadline(patience);
  std::string why;
  for (;;) {
    socket_ = ForkClosedFd(connect_once(hub, std::min(kConnectPatience, deadline.remaining()), why));
    if (socket_) break;
    ZR_CHECK(!deadline.passed(), ErrorCode::kPeerLost, "the hub between the sites cannot be reached",
             {.where = kSitesWhere,
              .which = place_.hub,
              .got = why,
              .hint = "zeroth-run --sites is the hub: it has ended, or another host has its address"});
    if (options_.activity) options_.activity->check();
    check_interrupt();
    std::this_thread::sleep_for(kWaitSlice);
  }
  stream_.emplace(socket_.get());
  stream_->trust();
  wake_ = ForkClosedFd(UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
  ZR_CHECK(wake_, ErrorCode::kResource, "eventfd failed: " + errno_text(errno), {.where = kSitesWhere});
  thread_ = start_own_thread([this] { run(); }, "the connection between sites", {.where = kSitesWhere});
  try {
    std::unique_lock lock(mutex_);
    wait(lock, [this] { return welcomed_; }, "for all sites to come");
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    wake();
    thread_.join();
    throw;
  }
}

SiteClient::~SiteClient() {
  if (::getpid() != pid_) {  // a forked child has neither the thread nor the socket
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    if (leaves_ && !failure_) stream_->send({.word = SiteWord::kBye});
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void SiteClient::leave() noexcept {
  const std::lock_guard lock(mutex_);
  leaves_ = true;
}

void SiteClient::wake() const noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void SiteClient::fail(ErrorCode code, const std::string& text) {
  if (!failure_) {
    failure_.emplace(
        code, text,
        ErrorContext{.where = kSitesWhere,
                     .who = fmt::format("rank {}/{} of site {}", options_.rank, options_.ranks, place_.site)});
  }
  changed_.notify_all();
}

void SiteClient::run() noexcept {
  auto pinged = SteadyClock::now();
  std::optional<Deadline> goodbye;
  try {
    for (;;) {
      short events = POLLIN;
      {
        const std::lock_guard lock(mutex_);
        if (stops_ && !goodbye) goodbye.emplace(kGoodbye);
        if (goodbye && (!stream_->wants_to_write() || goodbye->passed() || !leaves_)) return;
        if (stream_->wants_to_write()) events = POLLIN | POLLOUT;
      }
      std::array<pollfd, 2> polled{pollfd{.fd = socket_.get(), .events = events, .revents = 0},
                                   pollfd{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
      ::poll(polled.data(), polled.size(), static_cast<int>(goodbye ? kWaitSlice.count() : kPingAfter.count()));
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
      const std::lock_guard lock(mutex_);
      if (const auto now = SteadyClock::now(); now - pinged >= kPingAfter) {
        pinged = now;
        stream_->send({.word = SiteWord::kPing});
      }
      stream_->flush();
      const bool open =
          stream_->receive([this](const SiteHead& head, std::string payload) { hear(head, std::move(payload)); });
      if (!open) {
        fail(ErrorCode::kPeerLost, welcomed_ ? "the hub between the sites has ended"
                                             : "the hub at " + place_.hub +
                                                   " has not welcomed this rank: it has ended, or has another secret");
        return;
      }
      if (failure_) return;
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    fail(ErrorCode::kInternal, std::string("the connection between sites has failed: ") + error.what());
  }
}

// With the lock held.
void SiteClient::hear(const SiteHead& head, std::string payload) {
  switch (head.word) {
    case SiteWord::kChallenge: {
      hub_nonce_ = payload;
      const std::string proof = proof_of(ProofSide::kNode, place_.secret, hub_nonce_, nonce_);
      stream_->send_text({.word = SiteWord::kHello,
                          .site = place_.site,
                          .rank = options_.rank,
                          .round = static_cast<std::uint64_t>(options_.session),
                          .sites = static_cast<SiteSet>(options_.ranks),
                          .value = static_cast<std::uint64_t>(options_.timeout.count())},
                         nonce_ + proof + options_.job + fmt::format(" pid {}", ::getpid()));
      return;
    }
    case SiteWord::kWelcome:
      if (!same_proof(payload, proof_of(ProofSide::kHead, place_.secret, hub_nonce_, nonce_)))
        return fail(ErrorCode::kPeerLost, "whoever listens at " + place_.hub + " does not know the sites' secret");
      welcomed_ = true;
      joins_ = head.value != 0;
      next_ = head.round;
      break;
    case SiteWord::kMessage:
      rounds_[head.round].decided.messages[head.site] = std::move(payload);
      return;
    case SiteWord::kJoiner:
      rounds_[head.round].decided.joiners.push_back({.site = head.site, .start = head.value});
      return;
    case SiteWord::kRound: {
      Round& round = rounds_[head.round];
      round.is_decided = true;
      round.decided.sites = head.sites;
      round.decided.staying = head.value;
      round.decided.news = std::move(payload);
      std::erase_if(round.decided.messages, [&](const auto& one) { return !has_site(head.sites, one.first); });
      break;
    }
    case SiteWord::kState:
      next_ = head.round;
      state_ = std::move(payload);
      break;
    case SiteWord::kDismissed:
      return fail(static_cast<ErrorCode>(head.value), payload);
    default:
      return;
  }
  changed_.notify_all();
}

void SiteClient::send(const SiteHead& head, std::string payload) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) throw Error(*failure_);
    stream_->send_text(head, std::move(payload));
  }
  wake();
}

void SiteClient::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, const std::string& what) {
  const Milliseconds patience =
      2 * (options_.activity ? options_.activity->patience(options_.timeout) : options_.timeout) + kHubGrace;
  const Deadline deadline(patience);
  WatchedWait watched(options_.activity.get());
  const auto begun = SteadyClock::now();
  while (!done()) {
    if (failure_) {
      const Error failure = *failure_;
      lock.unlock();
      // Why this site is lost its own ranks may say better.
      if (options_.activity) options_.activity->await_verdict(Milliseconds{500});
      throw Error(failure);
    }
    ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "the hub between the sites has not answered a wait " + what,
             {.where = kSitesWhere, .which = place_.hub, .got = fmt::format("nothing for {} ms", patience.count())});
    if (changed_.wait_for(lock, deadline.slice()) == std::cv_status::timeout) {
      lock.unlock();
      check_interrupt();
      watched.look([&] {
        return WaitReport{.group = "sites",
                          .call = "the wait " + what,
                          .waited = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - begun),
                          .timeout = patience};
      });
      lock.lock();
    }
  }
}

std::uint64_t SiteClient::put(std::string message, std::uint64_t about) {
  ZR_FAILPOINT("sites.put");
  const std::uint64_t round = next_++;
  send({.word = SiteWord::kPut, .round = round, .value = about}, std::move(message));
  return round;
}

DecidedRound SiteClient::take(std::uint64_t round) {
  ZR_FAILPOINT("sites.take");
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return rounds_[round].is_decided; }, fmt::format("for round {} of the sites", round));
  DecidedRound decided = std::move(rounds_.at(round).decided);
  rounds_.erase(round);
  for (const auto& [site, message] : decided.messages) received_ += message.size();
  return decided;
}

void SiteClient::give_state(const SiteJoiner& joiner, std::string state) {
  ZR_FAILPOINT("sites.give_state");
  send({.word = SiteWord::kStateFor, .site = joiner.site, .round = next_, .value = joiner.start}, std::move(state));
}

std::string SiteClient::take_state() {
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return state_.has_value(); }, "for the state of the training that runs");
  return *std::exchange(state_, std::nullopt);
}

}  // namespace zeroth::detail
