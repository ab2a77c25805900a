// PendingPoints: sends and receives that have been started and that nobody waits for yet.
#pragma once

namespace zeroth {

/// The messages of one CommBackend::start(). Use it on the thread that uses the rank's groups. The messages move in
/// every wait of the rank, of whatever group (progress.h), and in every call of this object. An error that a wait of
/// another group finds ends that wait, and the calls of this object throw it again. Destroy this object before the
/// backend's object.
///
/// Destroy it after its messages are done. If an exception unwinds before, the buffers are not used any more, and the
/// group is broken: every later call throws kUsage. Over shared memory the other ranks of the messages get kPeerLost,
/// or the cause if they hear of it (abort(), the end of this rank); over a MessageTransport they get the cause, or
/// kTimeout. No rank takes later content of the buffers for the message.
class PendingPoints {
 public:
  PendingPoints() = default;
  PendingPoints(const PendingPoints&) = delete;
  PendingPoints& operator=(const PendingPoints&) = delete;
  virtual ~PendingPoints() = default;

  /// Returns true if all messages are done: received data is there, and buffers of sends may be used again. Moves what
  /// can be moved, which may be a copy of a whole message. Never waits for another rank and has no deadline. Throws the
  /// errors of wait() except kTimeout.
  [[nodiscard]] virtual bool done() = 0;

  /// Blocks until done() is true. Throws the errors of a blocking send or recv, with the same texts (CommBackend). The
  /// deadline begins with this call, and begins again when a message has moved.
  virtual void wait() = 0;
};

}  // namespace zeroth
