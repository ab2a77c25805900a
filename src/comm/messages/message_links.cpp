#include "comm/messages/message_links.h"

#include "comm/control/end_of_job.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>

#include <fmt/format.h>

#include <utility>

namespace zeroth::detail {
namespace {

constexpr std::uint32_t kKinds = 4;

bool between_two(const CallDescriptor& call) {
  return call.kind == PostKind::kSend || call.kind == PostKind::kRecv;
}

}  // namespace

MessageLinks::MessageLinks(std::shared_ptr<MessageJob> job, std::string name, std::uint32_t number,
                           std::vector<int> members, int rank)
    : job_(std::move(job)),
      name_(std::move(name)),
      number_(number),
      members_(std::move(members)),
      rank_(rank),
      nodes_(job_->options.nodes, members_) {}

std::string MessageLinks::who() const {
  return fmt::format("rank {}/{}", rank_, size());
}

std::string MessageLinks::watched_as() const {
  return fmt::format("{}#{}", name_, number_);
}

void MessageLinks::throw_if_aborted() const {
  const std::lock_guard lock(job_->mutex);
  if (job_->abort_text.empty()) return;
  throw Error(ErrorCode::kAborted, "this rank stopped the job: " + detail::without_who(job_->abort_text),
              {.where = where_group(), .who = who()});
}

std::uint32_t MessageLinks::tag_of(MessageKind kind) const {
  const std::uint32_t tag = kKinds * number_ + static_cast<std::uint32_t>(kind);
  const bool alone = kind == MessageKind::kHeader || kind == MessageKind::kMessage;
  return alone ? tag | MessageTransport::kAlone : tag;
}

void MessageLinks::send(Transfers& into, int peer, MessageKind kind, std::span<const std::byte> bytes,
                        const CallDescriptor& about) const {
  if (bytes.empty()) return;
  ZR_FAILPOINT("messages.send");
  into.push_back({peer, job_->transport->send(member(peer), tag_of(kind), bytes), about});
}

void MessageLinks::receive(Transfers& into, int peer, MessageKind kind, std::span<std::byte> bytes,
                           const CallDescriptor& about) const {
  if (bytes.empty()) return;
  ZR_FAILPOINT("messages.receive");
  into.push_back({peer, job_->transport->receive(member(peer), tag_of(kind), bytes), about});
}

std::unique_ptr<Transfer> MessageLinks::expect_header(int peer, CallDescriptor& into) const {
  return job_->transport->receive(member(peer), tag_of(MessageKind::kHeader),
                                  std::as_writable_bytes(std::span(&into, 1)));
}

MessageLinks::Waiting MessageLinks::begin_wait() const {
  return {Deadline(patience()), WatchedWait(job_->watched.activity()), WaitProgress(job_->progress)};
}

void MessageLinks::await(Transfers& transfers) const {
  Waiting waiting = begin_wait();
  for (const Pending& pending : transfers) {
    while (!wait_for(waiting, *pending.transfer, waiting.slice(), pending.peer, pending.about)) {
      check_wait(waiting, pending.peer, pending.about);
    }
  }
  transfers.clear();
}

bool MessageLinks::wait_for(Waiting& waiting, Transfer& transfer, Milliseconds slice, int peer,
                            const CallDescriptor& about) const {
  try {
    return transfer.wait(slice);
  } catch (const Error& error) {
    throw_named(error, waiting, peer, about);
  }
}

bool MessageLinks::look_at(Transfer& transfer, int peer, const CallDescriptor& about) const {
  try {
    return transfer.wait(Milliseconds{0});
  } catch (const Error& error) {
    Waiting waiting = begin_wait();
    throw_named(error, waiting, peer, about);
  }
}

void MessageLinks::check_now(int peer, const CallDescriptor& about) const {
  throw_if_aborted();
  try {
    job_->transport->check();
  } catch (const Error& error) {
    Waiting waiting = begin_wait();
    throw_named(error, waiting, peer, about);
  }
}

// A transport knows messages, and which rank of its own numbers it has lost; whoever reads its error also wants the
// call.
void MessageLinks::throw_named(const Error& error, Waiting& waiting, int peer, const CallDescriptor& about) const {
  if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kAborted) throw;
  if (error.code() == ErrorCode::kPeerLost) {
    waiting.watched.lose([&] { return report_of(waiting.deadline, peer, about); },
                         job_->watched.job_rank(member(peer)));
  }
  job_->watched.await_verdict(error.code() == ErrorCode::kAborted ? kWordOfCause : kWordOfLoss);
  if (const Error cause = cause_of_stop(error);
      error.code() == ErrorCode::kAborted && cause.message() != error.message())
    throw Error(cause);
  ErrorContext context = error.context();
  if (context.who.empty()) context.who = who();
  if (context.which.empty()) context.which = meaning_of(about, tag_names_);
  if (context.expected.empty())
    context.expected = fmt::format("{} with rank {} of group={}", text_of(about, tag_names_), peer, name_);
  throw Error(error.code(), error.message(), std::move(context));
}

WaitReport MessageLinks::report_of(const Deadline& deadline, int peer, const CallDescriptor& about) const {
  const std::string meaning = meaning_of(about, tag_names_);
  return {.group = name_,
          .call = text_of(about, tag_names_) + (meaning.empty() ? "" : ", " + meaning),
          .ranks = {job_->watched.job_rank(member(peer))},
          .calls_of = between_two(about) ? "" : watched_as(),
          .sequence = about.sequence,
          .waited = deadline.timeout() - deadline.remaining(),
          .timeout = deadline.timeout()};
}

void MessageLinks::check_wait(Waiting& waiting, int peer, const CallDescriptor& about) const {
  throw_if_aborted();
  check_interrupt();
  const auto report = [&] { return report_of(waiting.deadline, peer, about); };
  const bool passed = waiting.deadline.passed();  // once: who has not been heard to expire must not give up
  passed ? waiting.watched.expire(report) : waiting.watched.look(report);
  ZR_CHECK(!passed, ErrorCode::kTimeout,
           fmt::format("no answer within {:.1f} s", std::chrono::duration<double>(waiting.deadline.timeout()).count()),
           {.where = where_group(),
            .who = who(),
            .which = meaning_of(about, tag_names_),
            .expected = between_two(about) ? text_of(about, tag_names_)
                                           : fmt::format("{} from rank {}", text_of(about, tag_names_), peer),
            .got = "nothing",
            .hint = "that rank computes longer than the timeout, hangs, or takes another path"});
  waiting.owed.sleeps_for(job_->watched.job_rank(member(peer)));
  waiting.owed.advance();
}

}  // namespace zeroth::detail
