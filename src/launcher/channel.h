// A connection between the head of a job and one agent: frames in both directions over descriptors that never
// block.
#pragma once

#include "base/unique_fd.h"
#include "launcher/frames.h"

#include <zeroth/base/deadline.h>

#include <poll.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// One word in this time shows that the other side lives.
inline constexpr Milliseconds kPingEvery{1000};

class Channel {
 public:
  /// Sends the preface. For a socket `out` is a duplicate of `in`. `max_banner_bytes` may come before the
  /// other side's preface.
  Channel(UniqueFd in, UniqueFd out, std::size_t max_banner_bytes, std::size_t max_frame_bytes = kMaxFrameBytes);

  /// Appends two descriptors.
  void add_polled(std::vector<pollfd>& polled) const;
  /// After poll: those two. Reads one block and writes what fits.
  void handle(const pollfd& in, const pollfd& out);
  /// Queues a frame and writes what fits now.
  void send(FrameType type, std::string_view payload = {});
  /// The next frame that has come. Throws Error(kLaunch) for what is none.
  [[nodiscard]] std::optional<Frame> next() { return parser_.next(); }
  /// Sends kPing when nothing has been sent for kPingEvery.
  void keep_alive();
  /// When keep_alive() is due.
  [[nodiscard]] SteadyClock::time_point next_ping() const { return last_sent_ + kPingEvery; }
  /// Nothing more will be sent.
  void close_out() {
    out_.reset();
    queue_.clear();
  }
  void close() {
    close_out();
    in_.reset();
  }

  /// The other side has closed, or cannot be reached any more. Frames that came before are still in `next`.
  [[nodiscard]] bool ended() const { return !in_.valid(); }
  [[nodiscard]] std::size_t pending_bytes() const { return queue_.size(); }
  /// When bytes came last.
  [[nodiscard]] SteadyClock::time_point last_heard() const { return last_heard_; }
  /// Silence until now does not count: this process itself was stopped.
  void forgive(SteadyClock::duration gap) { last_heard_ += gap; }
  [[nodiscard]] const std::string& banner() const { return parser_.banner(); }
  void set_max_frame_bytes(std::size_t bytes) { parser_.set_max_frame_bytes(bytes); }

 private:
  void read_some();
  void flush();

  UniqueFd in_;
  UniqueFd out_;
  FrameParser parser_;
  std::string queue_;
  SteadyClock::time_point last_heard_ = SteadyClock::now();
  SteadyClock::time_point last_sent_ = SteadyClock::now();
};

/// Judges silence with the clock of a process that may itself be stopped for a while (Ctrl-Z, a suspended
/// machine).
class SilenceWatch {
 public:
  /// To be called at every turn of the loop, which turns at least every kPingEvery.
  void turn(Channel& channel);
  [[nodiscard]] bool silent_for(const Channel& channel, Milliseconds limit) const {
    return SteadyClock::now() - channel.last_heard() > limit;
  }

 private:
  SteadyClock::time_point last_turn_ = SteadyClock::now();
};

/// A channel over a connection. What is sent and not confirmed within `lost_after` breaks it.
[[nodiscard]] Channel channel_over(UniqueFd socket, Milliseconds lost_after, std::size_t max_frame_bytes);

}  // namespace zeroth::launcher
