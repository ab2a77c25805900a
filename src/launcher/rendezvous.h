// Nodes that are started one by one (--nnodes) find each other: node 0 listens, the others come and show that
// they know the secret.
#pragma once

#include "base/unique_fd.h"
#include "hosts/option_values.h"
#include "launcher/agent_link.h"
#include "launcher/console.h"
#include "launcher/signals.h"

#include <zeroth/base/deadline.h>

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

struct RendezvousSpec {
  Endpoint endpoint{};
  int num_nodes = 0;
  std::string secret{};
  Milliseconds timeout{300'000};
  Milliseconds lost_after{10'000};
};

using Say = std::function<void(std::string_view)>;

/// Before it has shown the secret a connection may say this much, and take this long.
inline constexpr std::size_t kMaxStrangerBytes = 1024;
inline constexpr Milliseconds kStrangerPatience{10'000};
/// So many connections at once may not have shown it yet; the oldest makes room.
inline constexpr std::size_t kMaxStrangers = 64;

/// Node 0's side.
class Rendezvous {
 public:
  /// Listens at the endpoint's address, or at all addresses if it is none of this machine (a service in front
  /// of it) or a name that leads to loopback here. Throws Error(kLaunch).
  explicit Rendezvous(RendezvousSpec spec);

  /// Waits for every other node. Says every five seconds whom it waits for. Connections that do not know the
  /// secret are closed and counted. Throws Error(kLaunch): late nodes, with the time, or a node that does not
  /// fit (version, number of nodes); Error(kTimeout) at the end of the job's time. Returns a signal that came instead,
  /// or 0.
  [[nodiscard]] int gather(SignalInbox& inbox, const Say& say, const JobTimeout& job);
  /// The nodes 1, 2, ... after `gather`.
  [[nodiscard]] std::vector<std::unique_ptr<AgentLink>> take_links() { return std::move(links_); }
  /// The numeric address of this host at which they came, one that is not loopback if there is such; "" before.
  [[nodiscard]] const std::string& reached_at() const { return reached_at_; }
  /// Sends the nodes that are here away.
  void dismiss(const JobEnd& end);

 private:
  struct Visitor {
    Channel channel;
    std::string address;
    std::string here;  ///< the address that it has connected to
    std::string nonce;
    SteadyClock::time_point until;
    bool proven = false;
    std::string own_nonce{};  ///< the visitor's
  };

  void accept_visitors();
  /// True when the visitor is done with, as a node or as a stranger.
  bool look_at(Visitor& visitor, const Say& say);
  void admit(Visitor& visitor, const Hello& hello, const Say& say);
  void refuse_stranger(const Visitor& visitor, const std::string& why, const Say& say);
  void drop_lost_nodes(const Say& say);
  [[nodiscard]] std::string missing() const;
  [[nodiscard]] int num_missing() const;

  RendezvousSpec spec_;
  UniqueFd socket_;
  std::list<Visitor> visitors_;
  std::vector<std::unique_ptr<AgentLink>> links_;  // by node - 1
  std::string reached_at_;
  int num_strangers_ = 0;
};

/// Another node's side: connects, again and again until the timeout, and shows the secret. Throws
/// Error(kLaunch); returns none when a signal came.
[[nodiscard]] std::unique_ptr<Channel> join_job(const RendezvousSpec& spec, SignalInbox& inbox, const Say& say);

}  // namespace zeroth::launcher
