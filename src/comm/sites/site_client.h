// SiteClient: the connection of one rank to the hub between sites. A thread sends, receives and says that it lives; it
// needs no GIL. docs/decisions/0063-a-site-that-is-lost.md.
#pragma once

#include "comm/control/control_link.h"
#include "hosts/site_messages.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/comm/sites.h>

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::detail {

struct SiteClientOptions {
  int rank = 0;  ///< of the site
  int ranks = 1;
  int session = 0;    ///< how many such clients this process had before
  std::string job{};  ///< of the site; another one is another start of it
  Milliseconds timeout{300'000};
  std::shared_ptr<RankActivity> activity{};  ///< null: not watched
};

/// A site that waits for this one's state.
struct SiteJoiner {
  int site = 0;
  std::uint64_t start = 0;
};

/// What the hub has decided of a round.
struct DecidedRound {
  SiteSet sites = 0;                      ///< that are in it
  SiteSet staying = 0;                    ///< that were there when it was decided
  std::string news{};                     ///< a line for each site that went or came before it
  std::map<int, std::string> messages{};  ///< of the other sites that are in it
  std::vector<SiteJoiner> joiners{};      ///< for this site to give its state to, after it
};

class SiteClient {
 public:
  /// Blocks until the hub has welcomed this site: when all sites have come, or at once if others train already. Throws
  /// kPeerLost, kTimeout, kResource.
  SiteClient(const SitePlace& place, SiteClientOptions options);
  SiteClient(const SiteClient&) = delete;
  SiteClient& operator=(const SiteClient&) = delete;
  /// Says goodbye if leave() was called. Blocks for what waits to be sent, at most two seconds.
  ~SiteClient();

  /// Others train already: take_state() before the first put().
  [[nodiscard]] bool joins() const { return joins_; }
  /// Starts a round with this rank's message and returns its number. `about`: the same on all ranks of all sites.
  [[nodiscard]] std::uint64_t put(std::string message, std::uint64_t about);
  /// Blocks until it is decided. Once for each.
  [[nodiscard]] DecidedRound take(std::uint64_t round);
  void give_state(const SiteJoiner& joiner, std::string state);
  [[nodiscard]] std::string take_state();
  /// The training of this rank has ended well.
  void leave() noexcept;
  /// Bytes of messages that have been taken.
  [[nodiscard]] std::uint64_t received() const { return received_; }

 private:
  struct Round {
    DecidedRound decided{};
    bool is_decided = false;
  };
  void run() noexcept;
  void hear(const SiteHead& head, std::string payload);
  void send(const SiteHead& head, std::string payload);
  void fail(ErrorCode code, const std::string& text);
  void wake() const noexcept;
  /// Blocks until `done()` is true, with the lock held. `what`: for a message.
  void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, const std::string& what);

  SitePlace place_;
  SiteClientOptions options_;
  ForkClosedFd socket_;
  ForkClosedFd wake_;
  std::string nonce_;
  std::string hub_nonce_;
  pid_t pid_;
  bool joins_ = false;
  std::uint64_t next_ = 0;
  std::uint64_t received_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<SiteStream> stream_;
  bool welcomed_ = false;
  bool leaves_ = false;
  bool stops_ = false;
  std::optional<Error> failure_;
  std::map<std::uint64_t, Round> rounds_;
  std::optional<std::string> state_;
  std::thread thread_;
};

}  // namespace zeroth::detail
