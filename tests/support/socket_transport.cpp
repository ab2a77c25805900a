#include "support/socket_transport.h"

#include <zeroth/base/error.h>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace zeroth::test {
namespace {

constexpr std::uint32_t kAbortTag = 0xffffffff;
constexpr Milliseconds kFlushTime{2'000};

struct Frame {
  std::uint32_t tag = 0;
  std::uint32_t unused = 0;
  std::uint64_t bytes = 0;
};

using Bytes = std::vector<std::byte>;

/// Of one receive: the n-th of a sender and tag gets the n-th message, whoever looks first.
struct Slot {
  Bytes bytes{};
  bool come = false;
};

/// One rank's ends. Everything under one mutex: abort() may come from another thread.
class Hub {
 public:
  Hub(int rank, std::vector<int> ends) : rank_(rank), peers_(ends.size()) {
    for (std::size_t peer = 0; peer < ends.size(); ++peer) peers_[peer].fd = ends[peer];
  }
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;
  ~Hub() {
    const Deadline deadline(kFlushTime);
    while (unsent() && !deadline.passed()) move(Milliseconds{10});
    for (const Peer& peer : peers_) {
      if (peer.fd >= 0) ::close(peer.fd);
    }
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(peers_.size()); }

  /// The number of bytes that will have gone to the peer when this message has.
  std::uint64_t post(int to, std::uint32_t tag, std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(to)];
    const Frame frame{.tag = tag, .unused = 0, .bytes = bytes.size()};
    const auto head = std::as_bytes(std::span(&frame, 1));
    peer.out.insert(peer.out.end(), head.begin(), head.end());
    peer.out.insert(peer.out.end(), bytes.begin(), bytes.end());
    peer.posted += head.size() + bytes.size();
    return peer.posted;
  }

  [[nodiscard]] std::shared_ptr<Slot> receive(int from, std::uint32_t tag) {
    const std::lock_guard lock(mutex_);
    auto slot = std::make_shared<Slot>();
    peers_[static_cast<std::size_t>(from)].awaited[tag].push_back(slot);
    return slot;
  }

  /// Until `over` holds for the peer, its stream ends, or the slice does.
  template <class Over>
  bool wait(int with, Milliseconds slice, const Over& over) {
    const Deadline deadline(slice);
    for (bool first = true;; first = false) {
      const std::lock_guard lock(mutex_);
      move(first ? Milliseconds{0} : std::min(deadline.remaining(), Milliseconds{20}));
      Peer& peer = peers_[static_cast<std::size_t>(with)];
      deliver(peer);
      if (over(peer)) return true;
      ZR_CHECK(stopped_.empty(), ErrorCode::kAborted, stopped_, {.where = "test.sockets"});
      ZR_CHECK(peer.fd >= 0, ErrorCode::kPeerLost, "rank " + std::to_string(with) + " closed its connection",
               {.where = "test.sockets"});
      if (deadline.passed()) return false;
    }
  }

  void abort(std::string_view text) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_) (void)post(peer, kAbortTag, std::as_bytes(std::span(text.data(), text.size())));
    }
    const std::lock_guard lock(mutex_);
    move(Milliseconds{0});
  }

  struct Peer {
    int fd = -1;
    Bytes out{};
    std::uint64_t posted = 0;
    std::uint64_t gone = 0;
    Bytes in{};
    std::map<std::uint32_t, std::deque<Bytes>> arrived{};
    std::map<std::uint32_t, std::deque<std::shared_ptr<Slot>>> awaited{};
  };

 private:
  static void deliver(Peer& peer) {
    for (auto& [tag, messages] : peer.arrived) {
      std::deque<std::shared_ptr<Slot>>& slots = peer.awaited[tag];
      for (; !messages.empty() && !slots.empty(); messages.pop_front(), slots.pop_front())
        *slots.front() = {.bytes = std::move(messages.front()), .come = true};
    }
  }

  [[nodiscard]] bool unsent() const {
    return std::ranges::any_of(peers_, [](const Peer& peer) { return peer.fd >= 0 && !peer.out.empty(); });
  }

  void move(Milliseconds patience) {
    std::vector<pollfd> watched;
    std::vector<std::size_t> who;
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
      if (peers_[peer].fd < 0) continue;
      const auto events = static_cast<short>(peers_[peer].out.empty() ? POLLIN : POLLIN | POLLOUT);
      watched.push_back({.fd = peers_[peer].fd, .events = events, .revents = 0});
      who.push_back(peer);
    }
    if (::poll(watched.data(), watched.size(), static_cast<int>(patience.count())) <= 0) return;
    for (std::size_t index = 0; index < who.size(); ++index) {
      Peer& peer = peers_[who[index]];
      if ((watched[index].revents & (POLLOUT | POLLERR | POLLHUP)) != 0) write_to(peer);
      if ((watched[index].revents & (POLLIN | POLLERR | POLLHUP)) != 0) read_from(peer, who[index]);
    }
  }

  void write_to(Peer& peer) {
    if (peer.fd < 0 || peer.out.empty()) return;
    const ssize_t sent = ::send(peer.fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) return;  // a stream that has ended is seen when it is read
    peer.out.erase(peer.out.begin(), peer.out.begin() + sent);
    peer.gone += static_cast<std::uint64_t>(sent);
  }

  void read_from(Peer& peer, std::size_t from) {
    static thread_local std::array<std::byte, std::size_t{256} << 10U> buffer;
    for (;;) {
      const ssize_t got = ::recv(peer.fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (got <= 0) {
        ::close(std::exchange(peer.fd, -1));
        break;
      }
      peer.in.insert(peer.in.end(), buffer.begin(), buffer.begin() + got);
    }
    std::size_t at = 0;
    while (peer.in.size() - at >= sizeof(Frame)) {
      Frame frame;
      std::memcpy(&frame, peer.in.data() + at, sizeof frame);
      if (peer.in.size() - at - sizeof frame < frame.bytes) break;
      const auto begin = peer.in.begin() + static_cast<std::ptrdiff_t>(at + sizeof frame);
      Bytes bytes(begin, begin + static_cast<std::ptrdiff_t>(frame.bytes));
      at += sizeof frame + frame.bytes;
      if (frame.tag != kAbortTag) {
        peer.arrived[frame.tag].push_back(std::move(bytes));
      } else if (stopped_.empty()) {
        const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        stopped_ = "rank " + std::to_string(from) + " stopped the job: " + text;
      }
    }
    peer.in.erase(peer.in.begin(), peer.in.begin() + static_cast<std::ptrdiff_t>(at));
  }

  int rank_;
  std::vector<Peer> peers_;
  std::string stopped_;
  std::mutex mutex_;
};

class Sending final : public Transfer {
 public:
  Sending(std::shared_ptr<Hub> hub, int to, std::uint64_t end) : hub_(std::move(hub)), to_(to), end_(end) {}
  bool wait(Milliseconds slice) override {
    return hub_->wait(to_, slice, [this](const Hub::Peer& peer) { return peer.gone >= end_; });
  }

 private:
  std::shared_ptr<Hub> hub_;
  int to_;
  std::uint64_t end_;
};

class Receiving final : public Transfer {
 public:
  Receiving(std::shared_ptr<Hub> hub, int from, std::uint32_t tag, std::span<std::byte> bytes)
      : hub_(std::move(hub)), from_(from), bytes_(bytes), slot_(hub_->receive(from, tag)) {}
  bool wait(Milliseconds slice) override {
    return done_ || hub_->wait(from_, slice, [this](const Hub::Peer& /*peer*/) {
      if (!slot_->come) return false;
      ZR_CHECK(slot_->bytes.size() == bytes_.size(), ErrorCode::kInternal,
               "a message has another size than its receive", {.where = "test.sockets"});
      if (!bytes_.empty()) std::memcpy(bytes_.data(), slot_->bytes.data(), bytes_.size());
      slot_->bytes = {};
      return done_ = true;
    });
  }

 private:
  std::shared_ptr<Hub> hub_;
  int from_;
  std::span<std::byte> bytes_;
  std::shared_ptr<Slot> slot_;
  bool done_ = false;
};

class SocketTransport final : public MessageTransport {
 public:
  SocketTransport(std::shared_ptr<Hub> hub, std::string_view kind) : hub_(std::move(hub)), kind_(kind) {}
  [[nodiscard]] int rank() const override { return hub_->rank(); }
  [[nodiscard]] int size() const override { return hub_->size(); }
  [[nodiscard]] std::string_view kind() const override { return kind_; }
  std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
    return std::make_unique<Sending>(hub_, to, hub_->post(to, tag, bytes));
  }
  std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
    return std::make_unique<Receiving>(hub_, from, tag, bytes);
  }
  void abort(std::string_view text) noexcept override {
    try {
      hub_->abort(text);
    } catch (...) {  // no memory: the others see the streams end
    }
  }

 private:
  std::shared_ptr<Hub> hub_;
  std::string kind_;
};

}  // namespace

SocketMesh::SocketMesh(int size) : size_(size), ends_(static_cast<std::size_t>(size * size), -1) {
  for (int rank = 0; rank < size; ++rank) {
    for (int peer = rank + 1; peer < size; ++peer) {
      std::array<int, 2> pair{};
      ZR_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair.data()) == 0,
               ErrorCode::kResource, "socketpair failed: " + errno_text(errno), {.where = "test.sockets"});
      ends_[static_cast<std::size_t>(rank * size + peer)] = pair[0];
      ends_[static_cast<std::size_t>(peer * size + rank)] = pair[1];
    }
  }
}

SocketMesh::~SocketMesh() {
  close_all();
}

std::shared_ptr<MessageTransport> SocketMesh::transport(int rank, std::string_view kind) {
  std::vector<int> own(static_cast<std::size_t>(size_), -1);
  for (int peer = 0; peer < size_; ++peer) {
    own[static_cast<std::size_t>(peer)] = std::exchange(ends_[static_cast<std::size_t>(rank * size_ + peer)], -1);
  }
  close_all();
  return std::make_shared<SocketTransport>(std::make_shared<Hub>(rank, std::move(own)), kind);
}

void SocketMesh::close_all() {
  for (int& end : ends_) {
    if (end >= 0) ::close(std::exchange(end, -1));
  }
}

}  // namespace zeroth::test
