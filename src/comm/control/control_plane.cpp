#include "base/own_thread.h"
#include "comm/control/control_link.h"
#include "comm/control/coordinator.h"
#include "comm/control/early_end.h"
#include "comm/control/introduction.h"
#include "comm/levels/levels_of_hosts.h"
#include "comm/shm/process_liveness.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/system_calls.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace zeroth {
namespace detail {
namespace {

constexpr Milliseconds kPingEvery{1'000};  // at least, where ranks are few
constexpr Milliseconds kIdle{500};
constexpr Milliseconds kBusy{50};
constexpr Milliseconds kJoinTime{10'000};
constexpr Milliseconds kAddressTime{5'000};  // each, within that
constexpr Milliseconds kByeTime{200};
constexpr std::size_t kMostAddresses = 16;

// [Note: Many ranks] What all ranks say goes through one thread of rank 0. So that a thousand of them take little of
// its core, each speaks the less often the more there are, and the hub collects what many have said for a moment before
// it looks at it. Neither delays what a rank has to say at once: the beginning of a wait, the loss of another one, an
// error.
constexpr int kManyRanks = 64;
constexpr Milliseconds kAtLeastEvery{250};
constexpr Milliseconds every(int num_ranks) {
  return std::max(kAtLeastEvery, Milliseconds{num_ranks});
}
constexpr std::chrono::microseconds collecting(std::size_t num_ranks) {
  return std::chrono::microseconds(num_ranks < kManyRanks ? 0 : 10 * num_ranks);
}

/// What the ranks are told through the data plane: plain bytes, the same in both directions.
struct Invitation {
  JobSecret secret{};
  std::uint32_t count = 0;
  struct Entry {
    char host[64] = "";
    std::uint16_t port = 0;
  };
  std::array<Entry, kMostAddresses> addresses{};
  std::uint32_t pid = 0;  ///< of the hub, and where it is
  std::uint64_t host_digest = 0;
  char host[256] = "";
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
  const std::array<std::int64_t, 2> own{static_cast<std::int64_t>(digest64(host)),
                                        static_cast<std::int64_t>(digest64(fmt::format("{} {}", host, ::getpid())))};
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

/// A connection and a process of every rank, beside what the program has open.
void reserve_open_files(int num_ranks) {
  const std::size_t wanted = count_open_files() + 2 * static_cast<std::size_t>(num_ranks);
  const std::size_t allowed = allow_open_files(wanted);
  ZR_CHECK(allowed >= wanted, ErrorCode::kResource,
           fmt::format("too few open files are allowed for the control plane of {} ranks", num_ranks),
           {.where = "comm.control",
            .expected = fmt::format("{} on the host of rank 0", wanted),
            .got = fmt::format("{}", allowed),
            .hint = "raise the hard limit there (ulimit -Hn, LimitNOFILE of the service, the container's nofile)"});
}

/// The process of another rank, if it is one of this host that the kernel lets us watch: so its end has a name also
/// over transports that only see a connection end.
class Neighbour {
 public:
  Neighbour() = default;
  /// `here`: the digest of this host.
  Neighbour(std::uint32_t pid, std::uint64_t host_digest, std::uint64_t here) : pid_(static_cast<pid_t>(pid)) {
    if (pid_ != ::getpid() && host_digest == here) pidfd_ = UniqueFd(make_system_calls()->pidfd_open(pid_));
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

/// What the thread of every rank has: a bell, the rank's activity, an end.
class ControlThread : public ControlPlane {
 public:
  ControlThread(std::shared_ptr<RankActivity> activity, const ControlOptions& options)
      : activity_(std::move(activity)),
        options_(options),
        owner_(::getpid()),
        bell_(std::make_shared<ForkClosedFd>(UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)))) {
    ZR_CHECK(*bell_, ErrorCode::kResource, "eventfd failed: " + errno_text(errno),
             {.where = "comm.control", .who = who()});
  }

  void tell(const Error& error) noexcept override {
    ZR_FAILPOINT("control.tell");
    activity_->hear();
    try {
      const std::lock_guard lock(mutex_);
      if (std::exchange(told_, true)) return;  // the first error is the cause
      to_tell_ = VerdictMessage{error.code(), error.message(), error.context(),
                                dynamic_cast<const ErrorOfJob*>(&error) != nullptr};
      notify(bell_->get());
    } catch (...) {  // no memory to say so
    }
  }
  [[nodiscard]] std::string address() const override { return ""; }
  [[nodiscard]] std::uint64_t strangers() const override { return 0; }

 protected:
  [[nodiscard]] std::string who() const { return fmt::format("rank {}/{}", activity_->rank(), activity_->size()); }
  [[nodiscard]] HelloMessage hello() const {
    return {.rank = static_cast<std::uint32_t>(activity_->rank()),
            .size = static_cast<std::uint32_t>(activity_->size()),
            .pid = static_cast<std::uint32_t>(::getpid()),
            .host = host_name(),
            .host_digest = host_digest_};
  }

  [[nodiscard]] PingMessage own_ping() const {
    const auto [action, steps] = activity_->running_action();
    return {.action = action, .steps = steps};
  }

  void start() {
    thread_ = start_own_thread([this] { run(); }, "the control plane", {.where = "comm.control", .who = who()});
    activity_->set_waker(
        [bell = bell_] { notify(bell->get()); });  // it may be called a moment after the plane has gone
    activity_->set_teller([this](const Error& error) { tell(error); });
  }
  /// By every destructor, while the object is whole.
  void stop() noexcept {
    if (::getpid() != owner_) {
      if (thread_.joinable()) thread_.detach();  // it is not here
      return;
    }
    activity_->set_waker({});
    activity_->set_teller({});
    stopping_.store(true);
    notify(bell_->get());
    if (thread_.joinable()) thread_.join();
  }

  static void notify(int bell) noexcept {
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
      ZR_FAILPOINT("control.judged");
      unheard_ = error;
      judged_at_ = SteadyClock::now();
    }
    const RankStatus last = activity_->status(false);
    activity_->judge(error);
    if (options_.trace_folder.empty() || std::exchange(traced_, true)) return;
    try {
      activity_->write_record(fmt::format("{}/trace-rank{}.jsonl", options_.trace_folder, activity_->rank()), error,
                              last);
    } catch (const Error& trouble) {
      options_.logger.warn(trouble.what());
    }
  }

  /// In each round of the thread. Who hangs in code of its own never comes to a wait that would throw the verdict: it
  /// ends here, with what the others say. `late`: this process itself was stopped or starved since the last round, and
  /// gets the whole time again.
  void end_if_deaf(SteadyClock::time_point now, bool late) {
    if (!unheard_) return;
    if (late) judged_at_ = now;
    if (options_.end_stuck_after <= Milliseconds{0} || now - judged_at_ < options_.end_stuck_after ||
        !activity_->is_deaf())
      return;
    ErrorContext context = unheard_->context();
    if (context.who.empty()) context.who = who();
    const Error end(unheard_->code(),
                    fmt::format("{}; {} has not come to a call of Zeroth for {:.1f} s since then, and is ended "
                                "(zeroth.end_stuck_after_ms): it {}",
                                unheard_->message(), who(), std::chrono::duration<double>(now - judged_at_).count(),
                                describe(activity_->status(true))),
                    std::move(context));
    const std::string line = fmt::format("ZEROTH ERROR {}\n", end.what());
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    ::_exit(exit_code(end.code()));
  }

  virtual void run() = 0;

  [[nodiscard]] Milliseconds ping_every() const {
    return std::clamp(options_.silent_after / 4, kBusy,
                      std::max(kPingEvery, Milliseconds{3 * activity_->size()}));  // [Note: Many ranks]
  }
  /// How long the thread sleeps at most.
  [[nodiscard]] Milliseconds idle() const { return std::min(kIdle, ping_every()); }
  /// Between two looks: this process itself was stopped, or starved, and must not take the others for silent.
  [[nodiscard]] Milliseconds too_long() const { return std::max(2 * idle(), options_.silent_after / 3); }

  std::shared_ptr<RankActivity> activity_;
  ControlOptions options_;
  pid_t owner_;
  const std::uint64_t host_digest_ = digest64(host_identity());
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
  Hub(std::shared_ptr<RankActivity> activity, const ControlOptions& options, const std::vector<std::string>& hosts)
      : ControlThread(std::move(activity), options),
        coordinator_(activity_->size(), {.silent_after = options.silent_after, .ask_every = every(activity_->size())}),
        reception_(hosts, activity_->size()),
        links_(static_cast<std::size_t>(activity_->size())),
        neighbours_(links_.size()) {
    ZR_CHECK(
        !hosts.empty(), ErrorCode::kResource, "there is no address at which other hosts could reach this one",
        {.where = "comm.control", .who = who(), .hint = "bring an interface up, or name one with ZEROTH_INTERFACE"});
    coordinator_.joined(0, host_name(), ::getpid(), SteadyClock::now());
    start();
  }
  ~Hub() override { stop(); }

  [[nodiscard]] std::string address() const override { return to_text(reception_.addresses().front()); }
  [[nodiscard]] std::uint64_t strangers() const override { return reception_.strangers(); }

  void invite(Invitation& invitation) const {
    invitation.secret = reception_.secret();
    const HelloMessage own = hello();
    invitation.pid = own.pid;
    invitation.host_digest = own.host_digest;
    std::strncpy(invitation.host, own.host.c_str(), sizeof invitation.host - 1);
    for (const TcpAddress& address : reception_.addresses()) {
      Invitation::Entry& entry = invitation.addresses[invitation.count++];
      std::strncpy(entry.host, address.host.c_str(), sizeof entry.host - 1);
      entry.port = address.port;
    }
  }

 private:
  void run() override {
    auto last = SteadyClock::now();
    while (!stopping_.load()) {
      wait();
      const auto now = SteadyClock::now();
      const bool late = now - last > too_long();
      if (late) wake_up(now);
      last = now;
      serve_ready_links(now);
      receive_guests(now);
      if (const std::optional<VerdictMessage> told = take_told()) coordinator_.told(error_of(*told), now, told->of_job);
      look_at_own(now);
      for (CoordinatorAction& action : coordinator_.tick(now)) act(action);
      ping(now);
      end_if_deaf(now, late);
    }
    // Who goes because of an error has told it a moment ago.
    for (std::size_t rank = 1; rank < links_.size(); ++rank) serve_link(rank, SteadyClock::now());
    if (const std::optional<VerdictMessage> told = take_told())
      coordinator_.told(error_of(*told), SteadyClock::now(), told->of_job);
    if (const std::optional<Error> cause = coordinator_.last_word()) decide(*cause);
    to_all(ByeMessage{activity_->goodbye()});
    linger();
  }

  void wait() {
    const auto collect = collecting(links_.size());
    if (collect.count() > 0) std::this_thread::sleep_for(collect);  // [Note: Many ranks]
    polled_.clear();
    polled_ranks_.clear();
    for (std::size_t rank = 1; rank < links_.size(); ++rank) {
      const auto& link = links_[rank];
      if (!link) continue;
      polled_.push_back({.fd = link->fd(),
                         .events = static_cast<short>(POLLIN | (link->wants_to_write() ? POLLOUT : 0)),
                         .revents = 0});
      polled_ranks_.push_back(rank);
    }
    polled_.push_back({.fd = bell_->get(), .events = POLLIN, .revents = 0});
    reception_.add_polled(polled_);
    const Milliseconds pause = coordinator_.busy() || activity_->status(false).wait.id != 0 ? kBusy : idle();
    (void)::poll(polled_.data(), polled_.size(), static_cast<int>(pause.count()));
    hush();
  }

  void receive_guests(SteadyClock::time_point now) {
    const auto refused = [this](const TcpAddress& peer, const std::string& why) {
      if (std::exchange(refused_, true)) return;  // a scanner must not fill the log
      options_.logger.warn(fmt::format("control plane: a connection from {} was refused: {}; others are only counted",
                                       to_text(peer), why));
    };
    for (Reception::Member& member : reception_.look(refused)) {
      if (verdict_) member.link.send(*verdict_);
      links_[member.hello.rank].emplace(std::move(member.link));
      neighbours_[member.hello.rank] = Neighbour(member.hello.pid, member.hello.host_digest, host_digest_);
      coordinator_.joined(static_cast<int>(member.hello.rank), member.hello.host, static_cast<int>(member.hello.pid),
                          now);
    }
  }

  void serve_link(std::size_t rank, SteadyClock::time_point now) {
    if (!links_[rank]) return;
    links_[rank]->flush();
    std::optional<RankStatus> goodbye;
    const bool open = links_[rank]->receive([&](ControlMessage message) {
      const int from = static_cast<int>(rank);
      coordinator_.heard(from, now);
      if (const auto* ping = std::get_if<PingMessage>(&message))
        coordinator_.seen_in(from, activity_->action_text(ping->action, ping->steps), now);
      if (const auto* status = std::get_if<StatusMessage>(&message)) coordinator_.answered(from, *status, now);
      if (const auto* verdict = std::get_if<VerdictMessage>(&message))
        coordinator_.told(error_of(*verdict), now, verdict->of_job);
      if (auto* bye = std::get_if<ByeMessage>(&message)) goodbye = std::move(bye->status);
    });
    if (open && !goodbye) return;
    if (!goodbye) lost_.push_back(rank);
    coordinator_.left(static_cast<int>(rank), std::move(goodbye), now, links_[rank]->trouble());
    links_[rank].reset();
  }

  void serve_ready_links(SteadyClock::time_point now) {
    for (std::size_t index = 0; index < polled_ranks_.size(); ++index) {
      const std::size_t rank = polled_ranks_[index];
      // One that broke as it was written to is never ready again.
      if (polled_[index].revents != 0 || links_[rank]->broken()) serve_link(rank, now);
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
    const RankStatus own = activity_->status(false);
    if (own.wait.id != 0 || own_waited_) coordinator_.answered(0, {.question = 0, .status = own}, now);
    own_waited_ = own.wait.id != 0;
  }

  void act(CoordinatorAction& action) {
    if (const auto* ask = std::get_if<AskAction>(&action)) {
      for (std::size_t rank = 1; rank < links_.size(); ++rank) {
        if (links_[rank]) links_[rank]->send(ask->ask);
      }
      coordinator_.answered(0, {.question = ask->ask.question, .status = activity_->status(ask->ask.with_place)},
                            SteadyClock::now());
    } else if (const auto* note = std::get_if<NoteAction>(&action)) {
      options_.logger.warn(note->text);
    } else {
      decide(std::get<VerdictAction>(action).error);
    }
  }

  void decide(const Error& error) {
    if (verdict_) return;
    ZR_FAILPOINT("control.verdict");
    verdict_ = VerdictMessage{error.code(), error.message(), error.context(), false};
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
    ZR_FAILPOINT("control.beat");
    pinged_ = now;
    to_all(own_ping());
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
  Reception reception_;
  std::vector<std::optional<ControlLink>> links_;  ///< by rank
  std::vector<Neighbour> neighbours_;              ///< likewise
  std::vector<std::size_t> lost_;                  ///< ranks that went without a goodbye, and whose end is not known
  std::vector<pollfd> polled_;
  std::vector<std::size_t> polled_ranks_;  ///< whose links are first in polled_
  std::optional<VerdictMessage> verdict_{};
  bool refused_ = false;  ///< a stranger, and that has been said
  SteadyClock::time_point pinged_{};
  bool own_waited_ = false;
};

/// Every other rank's.
class Leaf final : public ControlThread {
 public:
  /// `check` throws once it is known that rank 0 will not answer.
  Leaf(std::shared_ptr<RankActivity> activity, const ControlOptions& options, const Invitation& invitation,
       std::function<void()> check)
      : ControlThread(std::move(activity), options),
        link_(introduce_to(invitation, std::move(check))),
        hub_(rank_text(0, static_cast<int>(invitation.pid), invitation.host)),
        hub_process_(invitation.pid, invitation.host_digest, host_digest_) {
    heard_ = SteadyClock::now();
    start();
  }
  ~Leaf() override { stop(); }

 private:
  [[nodiscard]] ControlLink introduce_to(const Invitation& invitation, std::function<void()> check) {
    std::vector<TcpAddress> hub;
    for (std::uint32_t index = 0; index < invitation.count; ++index)
      hub.push_back({invitation.addresses[index].host, invitation.addresses[index].port});
    Introduction done = introduce({.hub = std::move(hub),
                                   .secret = invitation.secret,
                                   .hello = hello(),
                                   .timeout = std::min(options_.timeout, kJoinTime),
                                   .patience = std::min(options_.timeout, kAddressTime),
                                   .who = who(),
                                   .check = std::move(check)});
    if (done.verdict) judge(error_of(*done.verdict));
    return std::move(done.link);
  }

  void run() override {
    auto last = SteadyClock::now();
    while (!stopping_.load()) {
      const RankStatus own = activity_->status(false);
      const bool waits = own.wait.id != 0;
      std::vector<pollfd> polled{{.fd = bell_->get(), .events = POLLIN, .revents = 0}};
      if (!gone_)
        polled.push_back({.fd = link_.fd(),
                          .events = static_cast<short>(POLLIN | (link_.wants_to_write() ? POLLOUT : 0)),
                          .revents = 0});
      (void)::poll(polled.data(), polled.size(), static_cast<int>((waits ? 2 * kBusy : idle()).count()));
      hush();
      const auto now = SteadyClock::now();
      const bool late = now - last > too_long();
      if (late) heard_ = now;
      last = now;
      if (!gone_) listen(now);
      if (const std::optional<VerdictMessage> told = take_told()) {
        if (!gone_) link_.send(*told);
        if (gone_ || !told->of_job) judge(error_of(*told));  // else rank 0 has more to say
      }
      report(now);
      miss_hub(now);
      end_if_deaf(now, late);
    }
    if (gone_) return;
    if (const std::optional<VerdictMessage> told = take_told()) link_.send(*told);
    link_.send(ByeMessage{activity_->goodbye()});
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
      if (const auto* ping = std::get_if<PingMessage>(&message)) {
        hub_action_ = activity_->action_text(ping->action, ping->steps);
        hub_action_at_ = now;
      }
      if (const auto* ask = std::get_if<AskMessage>(&message)) {
        link_.send(StatusMessage{ask->question, activity_->status(ask->with_place)});
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
    const RankStatus own = activity_->status(false);
    if (now - reported_ >= every(activity_->size()) || !reported_wait_ || own.wait.lost != reported_lost_) {
      const bool waits = own.wait.id != 0;
      if (waits || reported_wait_) {
        link_.send(StatusMessage{0, own});
        reported_ = now;
        reported_wait_ = waits;
        reported_lost_ = own.wait.lost;
      }
    }
    if (now - pinged_ < ping_every()) return;
    ZR_FAILPOINT("control.beat");
    pinged_ = now;
    link_.send(own_ping());
  }

  /// Without the hub nobody else would say that it is the one that is missing, nor that the job has ended without this
  /// rank: so who is cut off has no job any more, whatever it does. A hub that has left in order owes only those who
  /// wait for it.
  void miss_hub(SteadyClock::time_point now) {
    const auto silent = std::chrono::duration_cast<Milliseconds>(now - (gone_ ? gone_at_ : heard_));
    const RankStatus own = activity_->status(false);
    const bool waits = awaits(own.wait, 0);
    const std::string how = gone_ && !goodbye_ ? hub_process_.end() : "";
    const bool certain = (goodbye_ || !how.empty()) && own.wait.lost == 0;
    if ((goodbye_ && !waits) || (!certain && silent < (gone_ && waits ? Milliseconds{1'000} : options_.silent_after)))
      return;
    EarlyEnd end{.text = gone_ ? end_text(how, link_trouble_) : silence_text(silent), .hint = kLookThere};
    end.text += last_action_text(
        hub_action_, std::chrono::duration_cast<Milliseconds>((gone_ ? gone_at_ : heard_) - hub_action_at_));
    if (goodbye_) end = early_end(*goodbye_, activity_->rank(), own);
    ErrorContext context{
        .where = "comm.control", .expected = "a sign of life from rank 0", .hint = std::move(end.hint)};
    if (waits) {
      context.where += " group=" + own.wait.report.group;
      context.expected = own.wait.report.call + " from rank 0";
    }
    judge(Error(ErrorCode::kPeerLost, hub_ + " " + end.text, std::move(context)));
  }

  ControlLink link_;
  std::string hub_;  ///< rank_text() of it
  Neighbour hub_process_;
  SteadyClock::time_point heard_{};
  std::string hub_action_;  ///< in its last ping
  SteadyClock::time_point hub_action_at_{};
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

std::unique_ptr<ControlPlane> open_hub(const std::shared_ptr<RankActivity>& activity, const ControlOptions& options,
                                       bool one_host, Invitation& invitation) {
  try {
    reserve_open_files(activity->size());
    std::vector<std::string> hosts = listening_hosts(one_host, options);
    if (hosts.size() > kMostAddresses) hosts.resize(kMostAddresses);
    auto hub = std::make_unique<Hub>(activity, options, hosts);
    hub->invite(invitation);
    return hub;
  } catch (const Error& error) {
    std::strncpy(invitation.trouble, error.what(), sizeof invitation.trouble - 1);
    return nullptr;
  }
}

}  // namespace
}  // namespace detail

std::unique_ptr<ControlPlane> ControlPlane::join(CommBackend& base, std::shared_ptr<RankActivity> activity,
                                                 const ControlOptions& wanted) {
  // Borrowed for these two calls.
  const Communicator ranks(std::shared_ptr<CommBackend>(&base, [](CommBackend*) {}));
  const detail::Neighbourhood around = detail::look_around(ranks);
  ControlOptions options = wanted;
  if (around.threads) options.end_stuck_after = Milliseconds{0};
  detail::Invitation invitation;
  std::unique_ptr<ControlPlane> hub;
  if (ranks.rank() == 0) hub = detail::open_hub(activity, options, around.one_host, invitation);
  ranks.broadcast(detail::as_bytes_of(invitation), 0);
  ZR_CHECK(invitation.trouble[0] == '\0', ErrorCode::kResource, "rank 0 cannot listen for the control plane",
           {.where = "comm.control",
            .who = fmt::format("rank {}/{}", ranks.rank(), ranks.size()),
            .got = std::string(invitation.trouble, ::strnlen(invitation.trouble, sizeof invitation.trouble))});
  if (hub) return hub;
  ZR_ASSERT(invitation.count <= detail::kMostAddresses, "an invitation with more addresses than it has room for");
  const auto check = [&base] {
    check_interrupt();
    base.check_peers({.what = "rank 0 beside the data", .names_ranks = true, .ranks = {0}});
  };
  return std::make_unique<detail::Leaf>(std::move(activity), options, invitation, check);
}

}  // namespace zeroth
