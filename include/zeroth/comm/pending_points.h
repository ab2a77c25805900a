// PendingPoints: sends and receives that have been started and that nobody waits for yet.
#pragma once

namespace zeroth {

/// The messages of one CommBackend::start(). One thread at a time, the one of the rank's groups. They go on in every
/// wait of the rank (progress.h) and in every call of this object. It must go before the backend's object.
///
/// Destroy it when the messages are done. An unfinished one goes only while an exception unwinds: its buffers are not
/// used afterwards, and the group is broken (every later call throws kUsage). Ranks that still wait for these messages
/// get kPeerLost or the cause of the end; none of them takes the memory's later content for a message.
class PendingPoints {
 public:
  PendingPoints() = default;
  PendingPoints(const PendingPoints&) = delete;
  PendingPoints& operator=(const PendingPoints&) = delete;
  virtual ~PendingPoints() = default;

  /// True if all messages are done: received data has come, and the buffers of sends may be used again. Moves what can
  /// be moved (which may be a copy of a whole message). It never waits for another rank and has no deadline. Throws
  /// the errors of wait() but kTimeout.
  [[nodiscard]] virtual bool done() = 0;

  /// Blocks until done() is true. Errors and texts are those of a blocking send or recv (CommBackend). The deadline
  /// begins with this call, and again whenever something has moved.
  virtual void wait() = 0;
};

}  // namespace zeroth
