#include <zeroth/comm/control_plane.h>

#include "comm/control/control_link.h"
#include "comm/control/coordinator.h"
#include "comm/control/early_end.h"
#include "comm/levels_of_hosts.h"
#include "comm/own_thread.h"
#include "comm/process_monitor.h"

#include <zeroth/base/error.h>
#include <zeroth/base/secret.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/system_calls.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace zeroth {
namespace detail {
namespace {

constexpr Milliseconds kPingEvery{1'000};  // at least
constexpr Milliseconds kIdle{500};
constexpr Milliseconds kBusy{50};
constexpr Milliseconds kHelloTime{5'000};
constexpr Milliseconds kByeTime{200};
constexpr std::size_t kMostStrangers = 64;
constexpr std::size_t kMostAddresses = 16;

/// What the ranks are told through the data plane: plain bytes, the same in both directions.
struct Invitation {
  JobSecret secret{};
  std::uint32_t count = 0;
  struct Entry {
    char host[64] = "";
    std::uint16_t port = 0;
  };
  std::array<Entry, kMostAddresses> addresses{};
  char trouble[512] = "";  ///< why the hub does not listen
};

template <class T>
std::span<std::uint8_t> as_bytes_of(T& value) {
  return {reinterpret_cast<std::uint8_t*>(&value), sizeof value};
}

/// What is known of the processes of all ranks.
struct Neighbourhood {
  bool one_host = true;
  bool threads = false;  ///< some ranks share a process
};

Neighbourhood look_around(const Communicator& ranks) {
  const std::string host = host_identity();
  const std::array<std::int64_t, 2> own{static_cast<std::int64_t>(digest64(host)), static_cast<std::int64_t>(digest64(fmt::format("{} {}", host, ::getpid())))};
  std::vector<std::int64_t> all(2 * static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(std::span<const std::int64_t>(own), std::span(all));
  Neighbourhood found;
  std::set<std::int64_t> processes;
  for (std::size_t rank = 0; rank < all.size() / 2; ++rank) {
    found.one_host = found.one_host && all[2 * rank] == own[0];
    found.threads = !processes.insert(all[2 * rank + 1]).second || found.threads;
  }
  return found;
}

/// The process of another rank, if it is one of this host that the kernel lets us watch: so its end has a name also over transports that
/// only see a connection end.
class Neighbour {
 public:
  Neighbour() = default;
  explicit Neighbour(const HelloMessage& hello) : pid_(static_cast<pid_t>(hello.pid)) {
    if (pid_ != ::getpid() && hello.host_digest == digest64(host_identity())) pidfd_ = UniqueFd(make_system_calls()->pidfd_open(pid_));
  }
  /// "was killed by SIGKILL (signal 9)"; "" while it lives, or where nobody can tell.
  [[nodiscard]] std::string end() const {
    pollfd watched{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    return pidfd_ && ::poll(&watched, 1, 0) == 1 ? process_end(pid_, pidfd_.get()) : "";
  }

 private:
  pid_t pid_ = 0;
  UniqueFd pidfd_{};
};

/// What the thread of every rank has: a bell, the rank's watch, an end.
class ControlThread : public ControlPlane {
 public:
  ControlThread(std::shared_ptr<RankWatch> watch, const ControlOptions& options)
      : watch_(std::move(watch)), options_(options), owner_(::getpid()), bell_(std::make_shared<ForkClosedFd>(UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)))) {
    ZR_CHECK(*bell_, ErrorCode::kResource, "eventfd failed: " + errno_text(errno), {.where = "comm.control", .who = who()});
  }

  void tell(const Error& error) noexcept override {
    watch_->hear();
    try {
      const std::lock_guard lock(mutex_);
      if (std::exchange(told_, true)) return;  // the first error is the cause
      to_tell_ = VerdictMessage{error.code(), error.message(), error.context()};
      ring(bell_->get());
    } catch (...) {  // no memory to say so
    }
  }
  [[nodiscard]] std::string address() const override { return ""; }
  [[nodiscard]] std::uint64_t strangers() const override { return 0; }

 protected:
  [[nodiscard]] std::string who() const { return fmt::format("rank {}/{}", watch_->rank(), watch_->size()); }
  [[nodiscard]] HelloMessage hello(const JobSecret& secret) const {
    return {.secret = secret,
            .rank = static_cast<std::uint32_t>(watch_->rank()),
            .size = static_cast<std::uint32_t>(watch_->size()),
            .pid = static_cast<std::uint32_t>(::getpid()),
            .host = host_name(),
            .host_digest = digest64(host_identity())};
  }

  void start() {
    thread_ = start_own_thread([this] { run(); }, "the control plane", {.where = "comm.control", .who = who()});
    watch_->set_waker([bell = bell_] { ring(bell->get()); });  // it may be called a moment after the plane has gone
    watch_->set_teller([this](const Error& error) { tell(error); });
  }
  /// By every destructor, while the object is whole.
  void stop() noexcept {
    if (::getpid() != owner_) {
      if (thread_.joinable()) thread_.detach();  // it is not here
      return;
    }
    watch_->set_waker({});
    watch_->set_teller({});
    stopping_.store(true);
    ring(bell_->get());
    if (thread_.joinable()) thread_.join();
  }

  static void ring(int bell) noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(bell, &one, sizeof one);
  }
  void hush() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(bell_->get(), &count, sizeof count);
  }
  [[nodiscard]] std::optional<VerdictMessage> take_told() {
    const std::lock_guard lock(mutex_);
    return std::exchange(to_tell_, std::nullopt);
  }
  static Error error_of(const VerdictMessage& message) { return Error(message.code, message.message, message.context); }

  /// The rank's waits throw it from now on; what led there is written down.
  void judge(const Error& error) {
    if (!unheard_) {
      unheard_ = error;
      judged_at_ = SteadyClock::now();
    }
    const RankStatus last = watch_->status(false);
    watch_->judge(error);
    if (options_.trace_folder.empty() || std::exchange(traced_, true)) return;
    try {
      watch_->write_record(fmt::format("{}/trace-rank{}.jsonl", options_.trace_folder, watch_->rank()), error, last);
    } catch (const Error& trouble) {
      options_.logger.warn(trouble.what());
    }
  }

  /// In each round of the thread. Who hangs in code of its own never comes to a wait that would throw the verdict: it ends here, with what
  /// the others say. `late`: this process itself was stopped or starved since the last round, and gets the whole time again.
  void end_if_deaf(SteadyClock::time_point now, bool late) {
    if (!unheard_) return;
    if (late) judged_at_ = now;
    if (options_.end_stuck_after <= Milliseconds{0} || now - judged_at_ < options_.end_stuck_after || !watch_->is_deaf()) return;
    ErrorContext context = unheard_->context();
    if (context.who.empty()) context.who = who();
    const Error end(unheard_->code(),
                    fmt::format("{}; {} has not come to a call of Zeroth for {:.1f} s since then, and is ended (zeroth.end_stuck_after_ms): it {}",
                                unheard_->message(),
                                who(),
                                std::chrono::duration<double>(now - judged_at_).count(),
                                describe(watch_->status(true))),
                    std::move(context));
    const std::string line = fmt::format("ZEROTH ERROR {}\n", end.what());
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    ::_exit(exit_code(end.code()));
  }

  virtual void run() = 0;

  [[nodiscard]] Milliseconds ping_every() const { return std::clamp(options_.silent_after / 4, kBusy, kPingEvery); }
  /// How long the thread sleeps at most.
  [[nodiscard]] Milliseconds idle() const { return std::min(kIdle, ping_every()); }
  /// Between two looks: this process itself was stopped, or starved, and must not take the others for silent.
  [[nodiscard]] Milliseconds too_long() const { return std::max(2 * idle(), options_.silent_after / 3); }

  std::shared_ptr<RankWatch> watch_;
  ControlOptions options_;
  pid_t owner_;
  std::shared_ptr<ForkClosedFd> bell_;
  std::atomic<bool> stopping_{false};
  bool traced_ = false;

 private:
  std::optional<Error> unheard_;  ///< what the program has to hear, and since when
  SteadyClock::time_point judged_at_{};
  std::mutex mutex_;
  std::optional<VerdictMessage> to_tell_;  ///< under mutex_, as is told_
  bool told_ = false;
  std::thread thread_;
};

/// Rank 0's.
class Hub final : public ControlThread {
 public:
  Hub(std::shared_ptr<RankWatch> watch, const ControlOptions& options, const std::vector<std::string>& hosts)
      : ControlThread(std::move(watch), options),
        coordinator_(watch_->size(), {.silent_after = options.silent_after}),
        links_(static_cast<std::size_t>(watch_->size())),
        neighbours_(links_.size()) {
    fill_random(std::as_writable_bytes(std::span(secret_)), "the secret", {.where = "comm.control", .who = who()});
    for (const std::string& host : hosts) {
      if (addresses_.size() == kMostAddresses) break;
      TcpAddress bound;
      listeners_.push_back(listen_tcp(host, bound));
      addresses_.push_back(std::move(bound));
    }
    ZR_CHECK(!listeners_.empty(),
             ErrorCode::kResource,
             "there is no address at which other hosts could reach this one",
             {.where = "comm.control", .who = who(), .hint = "bring an interface up, or name one with ZEROTH_INTERFACE"});
    coordinator_.joined(0, host_name(), ::getpid(), SteadyClock::now());
    start();
  }
  ~Hub() override { stop(); }

  [[nodiscard]] std::string address() const override { return to_text(addresses_.front()); }
  [[nodiscard]] std::uint64_t strangers() const override { return strangers_.load(); }

  void invite(Invitation& invitation) const {
    invitation.secret = secret_;
    for (const TcpAddress& address : addresses_) {
      Invitation::Entry& entry = invitation.addresses[invitation.count++];
      std::strncpy(entry.host, address.host.c_str(), sizeof entry.host - 1);
      entry.port = address.port;
    }
  }

 private:
  struct Guest {
    ControlLink link;
    Deadline deadline{kHelloTime};
  };

  void run() override {
    auto last = SteadyClock::now();
    while (!stopping_.load()) {
      wait();
      const auto now = SteadyClock::now();
      const bool late = now - last > too_long();
      if (late) wake_up(now);
      last = now;
      serve_links(now);
      serve_guests(now);
      if (const std::optional<VerdictMessage> told = take_told()) coordinator_.told(error_of(*told), now);
      look_at_own(now);
      for (CoordinatorAction& action : coordinator_.tick(now)) act(action);
      ping(now);
      end_if_deaf(now, late);
    }
    // Who goes because of an error has told it a moment ago.
    serve_links(SteadyClock::now());
    if (const std::optional<VerdictMessage> told = take_told()) coordinator_.told(error_of(*told), SteadyClock::now());
    if (const std::optional<Error> cause = coordinator_.last_word()) decide(*cause);
    to_all(ByeMessage{watch_->goodbye()});
    linger();
  }

  void wait() {
    polled_.clear();
    polled_.push_back({.fd = bell_->get(), .events = POLLIN, .revents = 0});
    for (const ForkClosedFd& listener : listeners_) polled_.push_back({.fd = listener.get(), .events = POLLIN, .revents = 0});
    const auto add = [&](const ControlLink& link) {
      polled_.push_back({.fd = link.fd(), .events = static_cast<short>(POLLIN | (link.wants_to_write() ? POLLOUT : 0)), .revents = 0});
    };
    for (const auto& link : links_) {
      if (link) add(*link);
    }
    for (const Guest& guest : guests_) add(guest.link);
    const Milliseconds pause = coordinator_.busy() || watch_->status(false).wait.id != 0 ? kBusy : idle();
    (void)::poll(polled_.data(), polled_.size(), static_cast<int>(pause.count()));
    hush();
    for (std::size_t index = 0; index < listeners_.size(); ++index) {
      if ((polled_[index + 1].revents & POLLIN) != 0) admit(listeners_[index].get());
    }
  }

  void admit(int listener) {
    while (true) {
      UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) return;
      if (guests_.size() >= links_.size() + kMostStrangers) {
        ++strangers_;
        continue;  // and closes it
      }
      guests_.push_back({ControlLink(ForkClosedFd(std::move(socket)))});
    }
  }

  void serve_guests(SteadyClock::time_point now) {
    for (std::size_t index = guests_.size(); index-- > 0;) {
      std::optional<HelloMessage> hello;
      bool more = false;
      const bool open = guests_[index].link.receive([&](ControlMessage message) {
        more = more || hello.has_value();
        if (auto* first = std::get_if<HelloMessage>(&message); first != nullptr && !hello) hello = std::move(*first);
      });
      if (open && !hello && !guests_[index].deadline.passed()) continue;
      if (hello && !more && is_member(*hello)) {
        join(*hello, std::move(guests_[index].link), now);
      } else {
        ++strangers_;
        if (strangers_.load() == 1) options_.logger.warn("control plane: a connection by somebody who is not of this job was dropped; others are only counted");
      }
      guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(index));
    }
  }

  [[nodiscard]] bool is_member(const HelloMessage& hello) const {
    return same_secret(std::as_bytes(std::span(secret_)), std::as_bytes(std::span(hello.secret))) && hello.size == links_.size() && hello.rank > 0 && hello.rank < links_.size() && !links_[hello.rank];
  }

  void join(const HelloMessage& theirs, ControlLink link, SteadyClock::time_point now) {
    link.send(hello(secret_));
    if (verdict_) link.send(*verdict_);
    links_[theirs.rank].emplace(std::move(link));
    neighbours_[theirs.rank] = Neighbour(theirs);
    coordinator_.joined(static_cast<int>(theirs.rank), theirs.host, static_cast<int>(theirs.pid), now);
  }

  void serve_links(SteadyClock::time_point now) {
    for (std::size_t rank = 1; rank < links_.size(); ++rank) {
      if (!links_[rank]) continue;
      links_[rank]->flush();
      std::optional<RankStatus> goodbye;
      const bool open = links_[rank]->receive([&](ControlMessage message) {
        const int from = static_cast<int>(rank);
        coordinator_.heard(from, now);
        if (const auto* status = std::get_if<StatusMessage>(&message)) coordinator_.answered(from, *status, now);
        if (const auto* verdict = std::get_if<VerdictMessage>(&message)) coordinator_.told(error_of(*verdict), now);
        if (auto* bye = std::get_if<ByeMessage>(&message)) goodbye = std::move(bye->status);
      });
      if (open && !goodbye) continue;
      if (!goodbye) lost_.push_back(rank);
      coordinator_.left(static_cast<int>(rank), std::move(goodbye), now, links_[rank]->trouble());
      links_[rank].reset();
    }
    // A process closes what it has before its end can be seen.
    std::erase_if(lost_, [&](std::size_t rank) {
      std::string end = neighbours_[rank].end();
      const bool known = !end.empty();
      if (known) coordinator_.ended(static_cast<int>(rank), std::move(end));
      return known;
    });
  }

  void wake_up(SteadyClock::time_point now) {
    for (std::size_t rank = 0; rank < links_.size(); ++rank) coordinator_.heard(static_cast<int>(rank), now);
  }

  void look_at_own(SteadyClock::time_point now) {
    coordinator_.heard(0, now);
    const RankStatus own = watch_->status(false);
    if (own.wait.id != 0 || own_waited_) coordinator_.answered(0, {.question = 0, .status = own}, now);
    own_waited_ = own.wait.id != 0;
  }

  void act(CoordinatorAction& action) {
    if (const auto* ask = std::get_if<AskAction>(&action)) {
      for (std::size_t rank = 1; rank < links_.size(); ++rank) {
        if (links_[rank]) links_[rank]->send(ask->ask);
      }
      coordinator_.answered(0, {.question = ask->ask.question, .status = watch_->status(ask->ask.with_place)}, SteadyClock::now());
    } else if (const auto* note = std::get_if<NoteAction>(&action)) {
      options_.logger.warn(note->text);
    } else {
      decide(std::get<VerdictAction>(action).error);
    }
  }

  void decide(const Error& error) {
    if (verdict_) return;
    verdict_ = VerdictMessage{error.code(), error.message(), error.context()};
    judge(error);
    to_all(*verdict_);
  }

  template <class Message>
  void to_all(const Message& message) {
    for (auto& link : links_) {
      if (link) link->send(message);
    }
  }

  void ping(SteadyClock::time_point now) {
    if (now - pinged_ < ping_every()) return;
    pinged_ = now;
    to_all(PingMessage{});
  }

  /// What is queued still goes out, within reason.
  void linger() {
    const Deadline deadline(kByeTime);
    const auto unsent = [](const auto& link) { return link && link->wants_to_write(); };
    while (std::ranges::any_of(links_, unsent) && !deadline.passed()) {
      std::this_thread::sleep_for(Milliseconds{2});
      for (auto& link : links_) {
        if (link) link->flush();
      }
    }
  }

  Coordinator coordinator_;
  JobSecret secret_{};
  std::vector<ForkClosedFd> listeners_;
  std::vector<TcpAddress> addresses_;
  std::vector<std::optional<ControlLink>> links_;  ///< by rank
  std::vector<Neighbour> neighbours_;              ///< likewise
  std::vector<std::size_t> lost_;                  ///< ranks that went without a goodbye, and whose end is not known
  std::vector<Guest> guests_;                      ///< who has not said hello
  std::vector<pollfd> polled_;
  std::optional<VerdictMessage> verdict_{};
  std::atomic<std::uint64_t> strangers_{0};
  SteadyClock::time_point pinged_{};
  bool own_waited_ = false;
};

/// Every other rank's.
class Leaf final : public ControlThread {
 public:
  Leaf(std::shared_ptr<RankWatch> watch, const ControlOptions& options, const Invitation& invitation)
      : ControlThread(std::move(watch), options), link_(connect(invitation)) {
    link_.send(hello(invitation.secret));
    await_hello(invitation.secret);
    heard_ = SteadyClock::now();
    start();
  }
  ~Leaf() override { stop(); }

 private:
  [[nodiscard]] ForkClosedFd connect(const Invitation& invitation) const {
    std::vector<std::string> tried;
    const Deadline deadline(options_.timeout);
    for (std::uint32_t index = 0; index < invitation.count; ++index) {
      const TcpAddress address{invitation.addresses[index].host, invitation.addresses[index].port};
      std::string why;
      ForkClosedFd socket = connect_tcp(address, Deadline(std::min(deadline.remaining(), Milliseconds{5'000})), why);
      if (socket) return socket;
      tried.push_back(fmt::format("{}: {}", to_text(address), why));
    }
    throw Error(ErrorCode::kResource,
                "rank 0 cannot be reached beside the data",
                {.where = "comm.control",
                 .who = who(),
                 .expected = "a TCP connection to rank 0",
                 .got = fmt::format("{}", fmt::join(tried, "; ")),
                 .hint = "open the network between the hosts, or name the interface that reaches them with ZEROTH_INTERFACE"});
  }

  void await_hello(const JobSecret& secret) {
    const Deadline deadline(std::min(options_.timeout, Milliseconds{10'000}));
    bool welcome = false;
    while (!welcome) {
      pollfd watched{.fd = link_.fd(), .events = POLLIN, .revents = 0};
      (void)::poll(&watched, 1, static_cast<int>(deadline.slice().count()));
      const bool open = link_.receive([&](const ControlMessage& message) {
        if (const auto* theirs = std::get_if<HelloMessage>(&message)) hub_ = *theirs;
        if (const auto* verdict = std::get_if<VerdictMessage>(&message)) judge(error_of(*verdict));
      });
      welcome = hub_.secret == secret;
      if (welcome) hub_process_ = Neighbour(hub_);
      ZR_CHECK(welcome || (open && !deadline.passed()),
               ErrorCode::kResource,
               "who listens at rank 0's address is not rank 0",
               {.where = "comm.control", .who = who(), .got = link_.trouble().empty() ? "no answer" : link_.trouble()});
    }
  }

  void run() override {
    auto last = SteadyClock::now();
    while (!stopping_.load()) {
      const RankStatus own = watch_->status(false);
      const bool waits = own.wait.id != 0;
      std::vector<pollfd> polled{{.fd = bell_->get(), .events = POLLIN, .revents = 0}};
      if (!gone_) polled.push_back({.fd = link_.fd(), .events = static_cast<short>(POLLIN | (link_.wants_to_write() ? POLLOUT : 0)), .revents = 0});
      (void)::poll(polled.data(), polled.size(), static_cast<int>((waits ? 2 * kBusy : idle()).count()));
      hush();
      const auto now = SteadyClock::now();
      const bool late = now - last > too_long();
      if (late) heard_ = now;
      last = now;
      if (!gone_) listen(now);
      if (const std::optional<VerdictMessage> told = take_told()) {
        if (!gone_) link_.send(*told);
        judge(error_of(*told));
      }
      report(now);
      miss_hub(now);
      end_if_deaf(now, late);
    }
    if (gone_) return;
    if (const std::optional<VerdictMessage> told = take_told()) link_.send(*told);
    link_.send(ByeMessage{watch_->goodbye()});
    const Deadline deadline(kByeTime);
    while (link_.wants_to_write() && !deadline.passed()) {
      std::this_thread::sleep_for(Milliseconds{2});
      link_.flush();
    }
  }

  void listen(SteadyClock::time_point now) {
    link_.flush();
    const bool open = link_.receive([&](ControlMessage message) {
      heard_ = now;
      if (const auto* ask = std::get_if<AskMessage>(&message)) {
        link_.send(StatusMessage{ask->question, watch_->status(ask->with_place)});
      }
      if (const auto* verdict = std::get_if<VerdictMessage>(&message)) judge(error_of(*verdict));
      if (auto* bye = std::get_if<ByeMessage>(&message)) goodbye_ = std::move(bye->status);
    });
    if (open && !goodbye_) return;
    gone_ = true;
    gone_at_ = now;
    link_trouble_ = link_.trouble();
  }

  /// A wait is told of its own accord: once it is worth a question, and at its deadline. And that it is over.
  void report(SteadyClock::time_point now) {
    if (gone_) return;
    const RankStatus own = watch_->status(false);
    if (now - reported_ >= Milliseconds{250} || !reported_wait_ || own.wait.lost != reported_lost_) {
      const bool waits = own.wait.id != 0;
      if (waits || reported_wait_) {
        link_.send(StatusMessage{0, own});
        reported_ = now;
        reported_wait_ = waits;
        reported_lost_ = own.wait.lost;
      }
    }
    if (now - pinged_ < ping_every()) return;
    pinged_ = now;
    link_.send(PingMessage{});
  }

  /// Without the hub nobody else would say that it is the one that is missing.
  void miss_hub(SteadyClock::time_point now) {
    const auto silent = std::chrono::duration_cast<Milliseconds>(now - (gone_ ? gone_at_ : heard_));
    const RankStatus own = watch_->status(false);
    const std::string how = gone_ && !goodbye_ ? hub_process_.end() : "";
    const bool certain = (goodbye_ || !how.empty()) && own.wait.lost == 0;
    if (!certain && silent < (gone_ ? Milliseconds{1'000} : options_.silent_after)) return;
    if (!awaits(own.wait, 0)) return;
    EarlyEnd end{.text = gone_ ? end_text(how, link_trouble_) : silence_text(silent), .hint = "look at the output of that rank and its host"};
    if (goodbye_) end = early_end(*goodbye_, watch_->rank(), own);
    judge(Error(ErrorCode::kPeerLost,
                rank_text(0, static_cast<int>(hub_.pid), hub_.host) + " " + end.text,
                {.where = "comm.control group=" + own.wait.report.group, .expected = own.wait.report.call + " from rank 0", .hint = std::move(end.hint)}));
  }

  ControlLink link_;
  HelloMessage hub_{};
  Neighbour hub_process_{};
  SteadyClock::time_point heard_{};
  SteadyClock::time_point reported_{};
  SteadyClock::time_point pinged_{};
  SteadyClock::time_point gone_at_{};
  bool reported_wait_ = false;
  int reported_lost_ = -1;
  bool gone_ = false;
  std::optional<RankStatus> goodbye_{};
  std::string link_trouble_{};
};

std::vector<std::string> listening_hosts(bool one_host, const ControlOptions& options) {
  if (!options.interface.empty()) return interface_addresses(options.interface);
  if (one_host) return {"127.0.0.1"};
  const std::vector<std::string> all = interface_addresses("");
  const std::vector<std::string> met = own_addresses_of(options.meeting_host, all);
  return met.empty() ? all : met;
}

std::unique_ptr<ControlPlane> open_hub(const std::shared_ptr<RankWatch>& watch, const ControlOptions& options, bool one_host, Invitation& invitation) {
  try {
    auto hub = std::make_unique<Hub>(watch, options, listening_hosts(one_host, options));
    hub->invite(invitation);
    return hub;
  } catch (const Error& error) {
    std::strncpy(invitation.trouble, error.what(), sizeof invitation.trouble - 1);
    return nullptr;
  }
}

}  // namespace
}  // namespace detail

std::unique_ptr<ControlPlane> ControlPlane::join(CommBackend& base, std::shared_ptr<RankWatch> watch, const ControlOptions& wanted) {
  // Borrowed for these two calls.
  const Communicator ranks(std::shared_ptr<CommBackend>(&base, [](CommBackend*) {}));
  const detail::Neighbourhood around = detail::look_around(ranks);
  ControlOptions options = wanted;
  if (around.threads) options.end_stuck_after = Milliseconds{0};
  detail::Invitation invitation;
  std::unique_ptr<ControlPlane> hub;
  if (ranks.rank() == 0) hub = detail::open_hub(watch, options, around.one_host, invitation);
  ranks.broadcast(detail::as_bytes_of(invitation), 0);
  ZR_CHECK(invitation.trouble[0] == '\0',
           ErrorCode::kResource,
           "rank 0 cannot listen for the control plane",
           {.where = "comm.control",
            .who = fmt::format("rank {}/{}", ranks.rank(), ranks.size()),
            .got = std::string(invitation.trouble, ::strnlen(invitation.trouble, sizeof invitation.trouble))});
  if (hub) return hub;
  ZR_ASSERT(invitation.count <= detail::kMostAddresses, "an invitation with more addresses than it has room for");
  return std::make_unique<detail::Leaf>(std::move(watch), options, invitation);
}

}  // namespace zeroth
