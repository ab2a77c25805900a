// One TCP connection of the control plane: whole messages in and out, never blocking, with bounded buffers.
#pragma once

#include "base/unique_fd.h"
#include "comm/control/control_message.h"

#include <zeroth/base/deadline.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zeroth::detail {

/// A descriptor that a forked child closes at once: an inherited copy would keep the connection alive after the
/// parent's death.
class ForkClosedFd {
 public:
  ForkClosedFd() = default;
  explicit ForkClosedFd(UniqueFd fd);
  ForkClosedFd(ForkClosedFd&& other) noexcept;
  ForkClosedFd& operator=(ForkClosedFd&& other) noexcept;
  ForkClosedFd(const ForkClosedFd&) = delete;
  ForkClosedFd& operator=(const ForkClosedFd&) = delete;
  ~ForkClosedFd() { reset(); }

  void reset() noexcept;
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  int place_ = -1;
};

/// "127.0.0.1", "fe80::1%eth0"; and a port.
struct TcpAddress {
  std::string host{};
  std::uint16_t port = 0;
  bool operator==(const TcpAddress&) const = default;
};
[[nodiscard]] std::string to_text(const TcpAddress& address);

/// A listener at a free port of this numeric host address. Throws kResource.
[[nodiscard]] ForkClosedFd listen_tcp(const std::string& host, TcpAddress& bound);
/// Empty if nobody is there by the deadline; `why` says what happened. check() is called at least every 100 ms.
[[nodiscard]] ForkClosedFd connect_tcp(const TcpAddress& address, const Deadline& deadline, std::string& why);
/// The next of those who have connected; empty if there is none. `peer`: whence it comes.
[[nodiscard]] ForkClosedFd accept_tcp(const ForkClosedFd& listener, TcpAddress& peer);
/// Numeric addresses of the host's interfaces that are up, without loopback; of `interface` only if it is not empty.
[[nodiscard]] std::vector<std::string> interface_addresses(const std::string& interface);
/// Those of `own` that `name`, a name or an address, stands for. Asks the resolver: blocks as long as that does.
[[nodiscard]] std::vector<std::string> own_addresses_of(const std::string& name, const std::vector<std::string>& own);

/// Until trust() the other side is a stranger, whose frames have to be small.
class ControlLink {
 public:
  explicit ControlLink(ForkClosedFd socket);

  [[nodiscard]] int fd() const { return socket_.get(); }
  [[nodiscard]] bool wants_to_write() const { return !out_.empty(); }
  /// Queues and sends what goes. A peer that does not read for long is a lost one.
  void send(const ControlMessage& message);
  void flush();
  void trust() { largest_ = kLargestFrameBytes; }
  /// Reads what is there, within reason; calls `take` with each message. False once the other side has closed, or has
  /// said what is no message.
  [[nodiscard]] bool receive(const std::function<void(ControlMessage)>& take);
  /// receive() will be false, once it has read what had come.
  [[nodiscard]] bool broken() const { return broken_; }
  /// Why receive() was false.
  [[nodiscard]] const std::string& trouble() const { return trouble_; }

 private:
  ForkClosedFd socket_;
  std::vector<std::byte> in_;
  std::vector<std::byte> out_;
  std::size_t largest_ = kLargestStrangersFrameBytes;
  std::string trouble_;
  bool broken_ = false;
};

}  // namespace zeroth::detail
