#include "launcher/channel.h"

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{64} << 10;

void make_non_blocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

void set_tcp(int socket, int option, int value) {
  ::setsockopt(socket, IPPROTO_TCP, option, &value, sizeof(value));
}

}  // namespace

Channel::Channel(UniqueFd in, UniqueFd out, std::size_t max_banner_bytes, std::size_t max_frame_bytes)
    : in_(std::move(in)), out_(std::move(out)), parser_(max_banner_bytes, max_frame_bytes), queue_(preface()) {
  make_non_blocking(in_.get());
  make_non_blocking(out_.get());
  flush();
}

void Channel::add_polled(std::vector<pollfd>& polled) const {
  polled.push_back({.fd = in_.get(), .events = POLLIN, .revents = 0});
  polled.push_back({.fd = queue_.empty() ? -1 : out_.get(), .events = POLLOUT, .revents = 0});
}

void Channel::handle(const pollfd& in, const pollfd& out) {
  if (in.revents != 0) read_some();
  if (out.revents != 0) flush();
}

void Channel::read_some() {
  if (!in_.valid()) {
    return;
  }
  std::array<char, kBlockBytes> block;
  const ssize_t bytes = ::read(in_.get(), block.data(), block.size());
  if (bytes > 0) {
    last_heard_ = SteadyClock::now();
    parser_.feed(std::string_view(block.data(), static_cast<std::size_t>(bytes)));
  } else if (bytes == 0 || (errno != EAGAIN && errno != EINTR)) {
    in_.reset();
  }
}

void Channel::send(FrameType type, std::string_view payload) {
  if (!out_.valid()) {
    return;
  }
  queue_ += encode_frame(type, payload);
  last_sent_ = SteadyClock::now();
  flush();
}

void Channel::keep_alive() {
  // What waits already is as good as a ping, and a queue for a side that does not read must not grow.
  if (SteadyClock::now() < next_ping()) return;
  if (queue_.empty()) {
    send(FrameType::kPing);
  } else {
    last_sent_ = SteadyClock::now();
  }
}

void Channel::flush() {
  while (out_.valid() && !queue_.empty()) {
    const ssize_t written = ::write(out_.get(), queue_.data(), queue_.size());
    if (written > 0) {
      queue_.erase(0, static_cast<std::size_t>(written));
    } else if (written < 0 && errno == EINTR) {
      continue;
    } else if (written < 0 && errno != EAGAIN) {
      out_.reset();  // what the other side said before it went is still to be read
      queue_.clear();
    } else {
      return;
    }
  }
}

void SilenceWatch::turn(Channel& channel) {
  const auto now = SteadyClock::now();
  if (now - last_turn_ > 2 * kPingEvery) channel.forgive(now - last_turn_);
  last_turn_ = now;
}

Channel channel_over(UniqueFd socket, Milliseconds lost_after, std::size_t max_frame_bytes) {
  set_tcp(socket.get(), TCP_NODELAY, 1);
  set_tcp(socket.get(), TCP_USER_TIMEOUT, static_cast<int>(lost_after.count()));
  UniqueFd out(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 3));
  if (!out.valid()) {
    throw Error(ErrorCode::kResource, "no descriptor for a connection: " + errno_text(errno));
  }
  return Channel(std::move(socket), std::move(out), 0, max_frame_bytes);
}

}  // namespace zeroth::launcher
