// Messages between ranks: a connection, who may make one, and what is said over it. Every call has a deadline.
#pragma once

#include "base/unique_fd.h"
#include "hosts/option_values.h"

#include <zeroth/base/deadline.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::doctor {

/// One message, and what a rank says at once.
inline constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 20U;

/// A connected socket that does not block; a message is its length in 4 bytes, little-endian, and so many bytes. Calls
/// throw Error: kTimeout, kPeerLost (closed, cut), kLaunch (a message that is too large).
class Wire {
 public:
  Wire() = default;
  explicit Wire(UniqueFd socket) : socket_(std::move(socket)) {}

  [[nodiscard]] bool valid() const { return socket_.valid(); }
  [[nodiscard]] int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }

  void send(std::string_view message, const Deadline& deadline);
  [[nodiscard]] std::string receive(const Deadline& deadline);
  void write_all(std::span<const std::byte> bytes, const Deadline& deadline);
  void read_all(std::span<std::byte> bytes, const Deadline& deadline);
  /// What has come, at least one byte; 0 once the other side has closed.
  [[nodiscard]] std::size_t read_some(std::span<std::byte> bytes, const Deadline& deadline);

 private:
  UniqueFd socket_;
};

/// Two ends of one.
[[nodiscard]] std::pair<Wire, Wire> make_wires();

/// The listening side greets whoever comes with a nonce and hears a proof that they know the secret of the job
/// (hosts/secret.h), with the number of their rank; whoever does not, or takes longer than kStrangerPatience, is
/// dropped and counted. Then it shows the same.
class Door {
 public:
  /// Listens at the endpoint (port 0: any), at all addresses for an empty host. Throws Error(kLaunch).
  Door(const Endpoint& endpoint, std::string secret);

  [[nodiscard]] int port() const { return port_; }
  [[nodiscard]] int strangers() const { return strangers_; }
  /// Waits for one visitor who knows the secret, at most until the deadline. `rank` gets who it is, and is -1 if nobody
  /// came.
  [[nodiscard]] Wire admit(const Deadline& deadline, int& rank);

 private:
  struct Visitor {
    Wire wire;
    Deadline until;
    std::string nonce;
    std::string heard{};
  };
  /// What has been read makes a rank: 0 or more; -1: not yet; -2: a stranger.
  [[nodiscard]] int look_at(Visitor& visitor) const;

  std::string secret_;
  UniqueFd socket_;
  int port_ = 0;
  int strangers_ = 0;
  std::vector<Visitor> visitors_;
};

/// The other side, as rank `rank`: tries the endpoints in turn until one answers and shows that it knows the secret.
/// Throws Error(kTimeout) with what happened at each.
[[nodiscard]] Wire knock(const std::vector<Endpoint>& endpoints, const std::string& secret, int rank,
                         const Deadline& deadline);

/// All addresses of this host, of the kind (IPv6 or not) of that one, and any port.
[[nodiscard]] Endpoint any_port_like(const std::string& address);

/// Numeric addresses of the ends of a connection; "" for none.
[[nodiscard]] std::string own_address(const Wire& wire);
[[nodiscard]] std::string peer_address(const Wire& wire);

}  // namespace zeroth::doctor
