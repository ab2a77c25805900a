// Messages between two ranks: all that a transport without shared memory owes. make_message_backend() builds every
// matched call on them, with sums in rank order, so that such a transport gives the bits of `shm`.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace zeroth {

/// A message on its way. Its bytes must live until the Transfer has ended or is gone; dropping one that has not ended
/// cancels it: the bytes are not touched afterwards.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer() = default;

  /// Blocks for at most `slice`; true once the bytes have been sent (may be reused) or received. Throws kPeerLost if
  /// they never will be, with the peer in `who`.
  [[nodiscard]] virtual bool wait(Milliseconds slice) = 0;
};

/// Point-to-point messages in a fixed group of ranks. Messages of one sender, receiver and tag arrive in the order in
/// which they were sent; a receive has the size of its message. Calls return at once and may come from one thread at a
/// time. Transfers may be seen to end in the order in which they were started, but for receives with kAlone in their
/// tag: each sender's of these are seen when they come.
class MessageTransport {
 public:
  static constexpr std::uint32_t kAlone = std::uint32_t{1} << 28U;

  MessageTransport() = default;
  MessageTransport(const MessageTransport&) = delete;
  MessageTransport& operator=(const MessageTransport&) = delete;
  virtual ~MessageTransport() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// "c10d gloo": becomes CommBackend::kind().
  [[nodiscard]] virtual std::string_view kind() const = 0;
  [[nodiscard]] virtual std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) = 0;
  /// Tells the other ranks, as far as the transport can, that this one stops the job: their transfers throw kAborted
  /// with the text. Returns soon. May be called from any thread.
  virtual void abort(std::string_view text) noexcept { (void)text; }
  /// Throws kAborted with the text if another rank is known to have stopped the job. Never waits. May be called from
  /// any thread. Without it that is heard in transfers alone.
  virtual void check() {}
};

/// Matched calls only (Capabilities::one_sided is false). Before the data of a call its description goes to every rank
/// of the group, so that a skipped, swapped or resized call is kMismatch on every rank, with both sides. (Of a message
/// the receiver alone sees both sides, of a part of an all_to_all its two ranks; who waits for them sees them leave, or
/// the deadline.) Tags used: four a group, from 0 up, one of them with kAlone. Memory: 2(n-1) pieces of
/// options.staging_bytes, once a sum needs them. abort() reaches the others where the transport tells them; else they
/// see this rank leave. Not collective.
[[nodiscard]] std::unique_ptr<CommBackend> make_message_backend(std::shared_ptr<MessageTransport> transport,
                                                                const CommOptions& options);

}  // namespace zeroth
