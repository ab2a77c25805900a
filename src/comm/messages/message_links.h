// The members of a group over messages: what goes between them, and waits that end.
#pragma once

#include "comm/call_descriptor.h"
#include "comm/control/watched.h"
#include "comm/matched_calls.h"
#include "comm/progress_list.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/messages.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace zeroth::detail {

/// What all groups of the rank share.
struct MessageJob {
  std::shared_ptr<MessageTransport> transport;
  CommOptions options;
  Watched watched;
  Event last_call{};             ///< matched calls run in the order of their submission, across groups
  ProgressList progress{};       ///< done in every wait
  std::uint32_t next_group = 1;  ///< number of the next group, not below any that this rank has seen
  std::mutex mutex;
  std::string abort_text;  ///< under mutex
};

/// Messages of different kinds between the same ranks do not meet.
enum class MessageKind : std::uint32_t {
  kDescription,  ///< of a collective
  kData,         ///< of a collective
  kHeader,       ///< of a message between two ranks
  kMessage,      ///< its data
};

class MessageLinks {
 public:
  /// A transfer under way, and the call that it is part of.
  struct Pending {
    int peer;
    std::unique_ptr<Transfer> transfer;
    CallDescriptor about;
  };
  using Transfers = std::vector<Pending>;
  /// For messages, until a deadline.
  struct Waiting {
    Deadline deadline;
    WatchedWait watched;
    WaitProgress owed;

    /// The transport's messages wake nobody for what this rank owes to others.
    [[nodiscard]] Milliseconds slice() const { return owed.slice(deadline.slice()); }
  };

  /// `members`: ranks of the transport, in the order of the group; `number`: the same on all of them, and no other
  /// group's of a rank.
  MessageLinks(std::shared_ptr<MessageJob> job, std::string name, std::uint32_t number, std::vector<int> members,
               int rank);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(members_.size()); }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<int>& members() const { return members_; }
  [[nodiscard]] const NodeMap& nodes() const { return nodes_; }
  [[nodiscard]] const std::shared_ptr<MessageJob>& job() const { return job_; }
  [[nodiscard]] std::string where() const { return "comm." + std::string(job_->transport->kind()); }
  [[nodiscard]] std::string where_group() const { return where() + " group=" + name_; }
  [[nodiscard]] std::string who() const;
  /// As ranks that watch each other know the group: no two groups of a rank have the same.
  [[nodiscard]] std::string watched_as() const;
  [[nodiscard]] const TagNames& tag_names() const { return tag_names_; }
  void set_tag_names(TagNames names) { tag_names_ = std::move(names); }

  /// Throws kAborted where this rank has stopped the job.
  void throw_if_aborted() const;

  /// Start; without bytes there is no message. The bytes stay where they are until await().
  void send(Transfers& into, int peer, MessageKind kind, std::span<const std::byte> bytes,
            const CallDescriptor& about) const;
  void receive(Transfers& into, int peer, MessageKind kind, std::span<std::byte> bytes,
               const CallDescriptor& about) const;
  /// A header, which comes before anybody waits for it.
  [[nodiscard]] std::unique_ptr<Transfer> expect_header(int peer, CallDescriptor& into) const;

  /// Until all are done; then the list is empty. Throws kTimeout, kPeerLost, kAborted, what the job has been told,
  /// interrupts.
  void await(Transfers& transfers) const;
  [[nodiscard]] Waiting begin_wait() const;
  /// Something has come: the deadline begins anew.
  void renew(Waiting& waiting) const { waiting.deadline = Deadline(patience()); }
  /// Blocks for at most `slice`; true once it is done. Names the call in what the transport throws.
  [[nodiscard]] bool wait_for(Waiting& waiting, Transfer& transfer, Milliseconds slice, int peer,
                              const CallDescriptor& about) const;
  /// The same without a wait.
  [[nodiscard]] bool look_at(Transfer& transfer, int peer, const CallDescriptor& about) const;
  /// Throws kAborted if the job was stopped, as far as this is known. Never blocks.
  void check_now(int peer, const CallDescriptor& about) const;
  /// Throws where waiting for the peer is pointless; does what this rank owes to others.
  void check_wait(Waiting& waiting, int peer, const CallDescriptor& about) const;

 private:
  /// With an error of the transport that is being handled: names the call in it.
  [[noreturn]] void throw_named(const Error& error, Waiting& waiting, int peer, const CallDescriptor& about) const;
  [[nodiscard]] int member(int peer) const { return members_[static_cast<std::size_t>(peer)]; }
  [[nodiscard]] std::uint32_t tag_of(MessageKind kind) const;
  [[nodiscard]] Milliseconds patience() const { return job_->watched.patience(job_->options.timeout); }
  [[nodiscard]] WaitReport report_of(const Deadline& deadline, int peer, const CallDescriptor& about) const;

  std::shared_ptr<MessageJob> job_;
  std::string name_;
  std::uint32_t number_;
  std::vector<int> members_;
  int rank_;
  NodeMap nodes_;
  TagNames tag_names_;
};

}  // namespace zeroth::detail
