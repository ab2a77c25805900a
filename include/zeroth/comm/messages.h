// Messages between two ranks: the interface that a transport without shared memory implements. make_message_backend()
// builds every matched call on messages, with sums in rank order. So such a transport gives the bits of `shm`.
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

/// A message in flight. The caller owns its bytes, which must live until the Transfer has ended or is destroyed.
/// Destroying an unfinished Transfer cancels it: the bytes are not used afterwards.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer() = default;

  /// Blocks for at most `slice`. Returns true when the bytes have been sent (and may be reused) or received. Throws
  /// kPeerLost if this can no longer happen, with the other rank in `who`.
  [[nodiscard]] virtual bool wait(Milliseconds slice) = 0;
};

/// Point-to-point messages in a fixed group of ranks. Messages of one sender, receiver and tag arrive in the order of
/// their sending. A receive must have the size of its message. Calls return at once and come from one thread at a time.
/// The end of a Transfer may become visible only after the end of all Transfers started before it. Those with kAlone in
/// their tag are an exception: they wait only for those with kAlone of the same other rank and direction.
class MessageTransport {
 public:
  static constexpr std::uint32_t kAlone = std::uint32_t{1} << 28U;

  MessageTransport() = default;
  MessageTransport(const MessageTransport&) = delete;
  MessageTransport& operator=(const MessageTransport&) = delete;
  virtual ~MessageTransport() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// "c10d gloo": the CommBackend::kind() of backends over it.
  [[nodiscard]] virtual std::string_view kind() const = 0;
  [[nodiscard]] virtual std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) = 0;
  /// Tells the other ranks, if the transport can, that this rank stops the job: their transfers throw kAborted with the
  /// text. Returns soon. Any thread.
  virtual void abort(std::string_view text) noexcept { (void)text; }
  /// Throws kAborted with the text if this rank knows that another rank has stopped the job. Never blocks. Any thread.
  /// Without an override only transfers throw it.
  virtual void check() {}
};

/// A group over messages, for matched calls only (Capabilities::one_sided is false). Shares `transport`. Not
/// collective. The description of a call goes to every rank of the group before its data. So a skipped, swapped or
/// resized call is kMismatch on every rank, with both sides. (Only the receiver sees both sides of a message, and only
/// the two ranks see both sides of a part of an all_to_all; ranks that wait for them get kPeerLost or kTimeout.) Tags:
/// four per group, from 0 up, two of them with kAlone. Memory: 2(n-1) pieces of options.staging_bytes, from the first
/// sum that needs them. abort() reaches the other ranks if the transport tells them; otherwise they see this rank
/// leave.
[[nodiscard]] std::unique_ptr<CommBackend> make_message_backend(std::shared_ptr<MessageTransport> transport,
                                                                const CommOptions& options);

}  // namespace zeroth
