#include "comm/rendezvous/rendezvous.h"

#include "comm/rendezvous/rendezvous_messages.h"
#include "comm/rendezvous/unix_socket.h"

#include <zeroth/base/ended_ranks.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace zeroth::detail {
namespace {

ErrorContext context_of(const RendezvousSpec& spec) {
  return {.where = "comm.shm.rendezvous",
          .who = fmt::format("rank {}/{}", spec.rank, spec.size),
          .which = "job " + spec.job};
}

/// "waiting for rank 1 for 5 s, at the abstract socket zeroth-comm-0-1f... of this host (job j, rank 0 of 2); ..."
void notice(const RendezvousSpec& spec, NoticeClock& clock, FunctionRef<std::string()> whom) {
  if (!spec.say || !clock.due()) return;
  spec.say(
      fmt::format("waiting for {} for {}, at the abstract socket @{} of this host (job {}); this is rank {} of {}, "
                  "pid {}, which gives up after {:g} s; hint: {}",
                  whom(), clock.waited(), socket_name("comm", spec.job), spec.job, spec.rank, spec.size, ::getpid(),
                  static_cast<double>(spec.timeout.count()) / 1000,
                  spec.hint.empty() ? fmt::format("start the other ranks, or all of them with zeroth-run -n {} "
                                                  "PROGRAM",
                                                  spec.size)
                                    : spec.hint));
}

/// kPeerLost if a rank has ended that the others still wait for.
std::optional<Error> never_comes(const RendezvousSpec& spec) {
  if (!spec.is_job) return std::nullopt;
  const std::optional<std::string> gone = rank_that_never_came(spec.job, spec.rank, spec.size);
  if (!gone) return std::nullopt;
  ErrorContext context = context_of(spec);
  context.expected = fmt::format("all {} ranks", spec.size);
  context.hint = kNeverCameHint;
  return Error(ErrorCode::kPeerLost, *gone, std::move(context));
}

class Host {
 public:
  Host(const RendezvousSpec& spec, FunctionRef<void()> check) : spec_(spec), check_(check) {}

  Rendezvous run() {
    ZR_FAILPOINT("rendezvous.listen");
    std::optional<UniqueFd> listener = listen_at(socket_name("comm", spec_.job));
    ZR_CHECK(listener.has_value(), ErrorCode::kMismatch, "somebody already is rank 0 of this job",
             ErrorContext{.where = "comm.shm.rendezvous",
                          .who = fmt::format("rank 0/{}", spec_.size),
                          .which = "job " + spec_.job,
                          .hint = "two processes have rank 0, or two jobs have the same ZEROTH_JOB_ID"});
    Rendezvous result;
    result.connections.resize(static_cast<std::size_t>(spec_.size));
    result.pids.resize(static_cast<std::size_t>(spec_.size));
    result.pids[0] = ::getpid();
    if (spec_.refused.call != 0) refusal_ = refusal_error(spec_.refused, 0, spec_.size);
    const Deadline deadline(spec_.timeout);
    NoticeClock clock(spec_.notices);
    for (int missing = spec_.size - 1; missing > 0;) {
      check_();
      if (deadline.passed())
        refuse(ErrorCode::kTimeout, "not all ranks came: missing " + missing_ranks(result), result);
      if (const std::optional<Error> gone = never_comes(spec_)) refuse(*gone, result);
      notice(spec_, clock, [&] { return missing_ranks(result); });
      wait_for_guests(listener->get());
      for (UniqueFd guest = accept_if_ready(listener->get()); guest; guest = accept_if_ready(listener->get())) {
        if (identity_of(guest.get()).uid == ::getuid()) waiting_.push_back(std::move(guest));
      }
      missing -= hear_guests(result);
      notice_leavers(result);
    }
    if (refusal_) {
      refuse(refusal_->code(), fmt::format("{} ({})", refusal_->message(), refusal_->context().hint), result);
    }
    // From here on the name is free: another world of the same job may meet under it.
    listener->reset();
    ZR_FAILPOINT("rendezvous.answer");
    Welcome answer;
    std::ranges::copy(result.pids, answer.pids.begin());
    for (std::size_t rank = 1; rank < result.connections.size(); ++rank) {
      ZR_CHECK(send_message(result.connections[rank].get(), bytes_of(answer)), ErrorCode::kPeerLost,
               fmt::format("rank {} (pid {}) went away while the job was starting", rank, result.pids[rank]),
               context_of(spec_));
    }
    return result;
  }

 private:
  static bool readable(int fd, int timeout_ms) {
    pollfd watched{.fd = fd, .events = POLLIN, .revents = 0};
    return ::poll(&watched, 1, timeout_ms) > 0;
  }

  static UniqueFd accept_if_ready(int listener) { return readable(listener, 0) ? accept_from(listener) : UniqueFd(); }

  void wait_for_guests(int listener) const {
    std::vector<pollfd> watched{{.fd = listener, .events = POLLIN, .revents = 0}};
    for (const UniqueFd& guest : waiting_) watched.push_back({.fd = guest.get(), .events = POLLIN, .revents = 0});
    ::poll(watched.data(), watched.size(), static_cast<int>(kWaitSlice.count()));
    check_interrupt();
  }

  /// Reads the first message of those who connected; returns how many ranks that added.
  int hear_guests(Rendezvous& result) {
    int added = 0;
    std::vector<UniqueFd> still_silent;
    for (UniqueFd& guest : waiting_) {
      if (!readable(guest.get(), 0)) {
        still_silent.push_back(std::move(guest));
        continue;
      }
      const std::optional<Message> message = receive_message(guest.get(), sizeof(Hello) + 1, check_);
      const std::optional<Hello> hello = message ? parse_hello(message->bytes) : std::nullopt;
      if (!message) silent_.push_back(identity_of(guest.get()).pid);
      if (!hello) continue;  // a stranger: the connection closes
      admit(*hello, std::move(guest), result);
      ++added;
    }
    waiting_ = std::move(still_silent);
    return added;
  }

  void admit(const Hello& hello, UniqueFd guest, Rendezvous& result) {
    ZR_FAILPOINT("rendezvous.admit");
    const pid_t pid = identity_of(guest.get()).pid;
    std::string problem = problem_of(hello, {.pid = pid, .host_pid = ::getpid(), .size = spec_.size});
    if (problem.empty()) {
      const auto index = static_cast<std::size_t>(hello.rank);
      if (result.connections[index])
        problem = fmt::format("rank {} came twice: pid {} and pid {}", hello.rank, result.pids[index], pid);
    }
    if (!problem.empty()) {
      waiting_.push_back(std::move(guest));  // it hears the answer too
      refuse(ErrorCode::kMismatch, problem, result);
    }
    if (hello.refused.call != 0 && !refusal_) refusal_ = refusal_error(hello.refused, hello.rank, spec_.size);
    result.connections[static_cast<std::size_t>(hello.rank)] = std::move(guest);
    result.pids[static_cast<std::size_t>(hello.rank)] = pid;
  }

  void notice_leavers(const Rendezvous& result) const {
    for (std::size_t rank = 1; rank < result.connections.size(); ++rank) {
      const UniqueFd& connection = result.connections[rank];
      if (connection && readable(connection.get(), 0)) {  // guests say nothing after their hello: this is the end
        refuse(ErrorCode::kPeerLost,
               fmt::format("rank {} (pid {}) went away while the job was starting", rank, result.pids[rank]), result);
      }
    }
  }

  std::string missing_ranks(const Rendezvous& result) const {
    std::vector<std::size_t> missing;
    for (std::size_t rank = 1; rank < result.connections.size(); ++rank) {
      if (!result.connections[rank]) missing.push_back(rank);
    }
    const std::string silent =
        silent_.empty() ? "" : fmt::format("; pid {} connected and left without a word", fmt::join(silent_, ", pid "));
    return fmt::format("rank{} {}{}", missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), silent);
  }

  /// Tells everybody who has come, and throws.
  [[noreturn]] void refuse(ErrorCode code, const std::string& text, const Rendezvous& result) const {
    refuse(Error(code, text, context_of(spec_)), result);
  }
  [[noreturn]] void refuse(const Error& error, const Rendezvous& result) const {
    const std::string& text = error.message();
    Welcome answer;
    answer.code = static_cast<std::int32_t>(error.code());
    std::memcpy(answer.text.data(), text.data(), std::min(text.size(), answer.text.size() - 1));
    const auto tell = [&answer](const UniqueFd& guest) {
      if (guest) [[maybe_unused]]
        const bool heard = send_message(guest.get(), bytes_of(answer));
    };
    std::ranges::for_each(result.connections, tell);
    std::ranges::for_each(waiting_, tell);
    throw Error(error);
  }

  const RendezvousSpec& spec_;
  FunctionRef<void()> check_;
  std::vector<UniqueFd> waiting_;  ///< connected, not yet heard
  std::vector<pid_t> silent_;      ///< strangers, or ranks that died before they could say who they are
  std::optional<Error> refusal_;   ///< of the first rank that cannot take part
};

Rendezvous join_as_guest(const RendezvousSpec& spec, FunctionRef<void()> check) {
  Deadline deadline(spec.timeout);
  NoticeClock clock(spec.notices);
  bool alone = true;
  const auto impatient = [&] {
    check();
    if (const std::optional<Error> gone = never_comes(spec)) throw Error(*gone);
    if (alone) notice(spec, clock, [] { return std::string("rank 0"); });
    ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "rank 0 did not gather all ranks in time", context_of(spec));
  };
  ZR_FAILPOINT("rendezvous.connect");
  UniqueFd connection = connect_to(socket_name("comm", spec.job), impatient);
  alone = false;
  ZR_FAILPOINT("rendezvous.hello");
  // The host, who knows which ranks are missing, began before; it shall be the one to say so.
  constexpr Milliseconds kForTheAnswer{1'000};
  deadline = Deadline(spec.timeout + kForTheAnswer);
  Hello hello;
  hello.rank = spec.rank;
  hello.size = spec.size;
  hello.refused = spec.refused;
  const bool sent = send_message(connection.get(), bytes_of(hello));
  ZR_FAILPOINT("rendezvous.welcome");
  const std::optional<Message> message =
      sent ? receive_message(connection.get(), sizeof(Welcome) + 1, impatient) : std::nullopt;
  ZR_CHECK(message.has_value(), ErrorCode::kPeerLost, "rank 0 went away while the job was starting", context_of(spec));
  const std::optional<Welcome> answer = parse_welcome(message->bytes);
  ZR_CHECK(answer.has_value(), ErrorCode::kMismatch, "rank 0 answers in another protocol", context_of(spec));
  if (const std::optional<Error> refusal = refusal_in(*answer, context_of(spec))) throw Error(*refusal);
  Rendezvous result;
  result.connections.push_back(std::move(connection));
  result.pids.assign(answer->pids.begin(), answer->pids.begin() + spec.size);
  return result;
}

}  // namespace

Error refusal_error(Refusal refusal, int rank, int size) {
  const std::string_view call = refusal.call == 1 ? "memfd_create" : "pidfd_open";
  return {ErrorCode::kResource,
          fmt::format("{} failed on rank {}: {}", call, rank, errno_text(refusal.reason)),
          {.where = "comm.shm",
           .who = fmt::format("rank {}/{}", rank, size),
           .hint = fmt::format(
               "the kernel or container refuses this system call: allow {} in its seccomp profile (Linux 5.3 or newer)",
               call)}};
}

Rendezvous meet(const RendezvousSpec& spec, FunctionRef<void()> check) {
  if (spec.rank == 0) return Host(spec, check).run();
  return join_as_guest(spec, check);
}

}  // namespace zeroth::detail
