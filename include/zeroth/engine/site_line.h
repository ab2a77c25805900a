// SiteLine: how one rank exchanges with the ranks of its number in the other sites. Two ways: a group of one job, whose
// loss of a rank ends all; and the hub between sites that are jobs of their own, some of which may be lost.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/comm/sites.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// What an exchange has come to: the same on all ranks of all sites that are in it.
struct SiteOutcome {
  std::vector<int> present{};            ///< sites whose messages have come, in their order
  std::vector<int> staying{};            ///< sites that are there, now that it has ended
  std::vector<std::string> news{};       ///< "site 1 is lost: ...", of sites that went or came since the last one
  std::vector<std::uint64_t> joiners{};  ///< for give_state(): sites that wait for this one's state
};

/// An exchange that has begun. Destroy it before its memory and its line.
class SiteExchange {
 public:
  SiteExchange() = default;
  SiteExchange(const SiteExchange&) = delete;
  SiteExchange& operator=(const SiteExchange&) = delete;
  virtual ~SiteExchange() = default;

  /// Blocks. Afterwards the messages of the sites that are present lie in their places.
  [[nodiscard]] virtual SiteOutcome wait() = 0;
};

/// On the thread of the engine.
class SiteLine {
 public:
  SiteLine() = default;
  SiteLine(const SiteLine&) = delete;
  SiteLine& operator=(const SiteLine&) = delete;
  virtual ~SiteLine() = default;

  [[nodiscard]] virtual int sites() const = 0;
  [[nodiscard]] virtual int site() const = 0;
  /// Sites may be lost, and others go on.
  [[nodiscard]] virtual bool survives() const = 0;

  /// The text of each site; none of one that is not there. Collective, blocks.
  [[nodiscard]] virtual std::vector<std::optional<std::string>> texts(const std::string& own) = 0;
  /// Those of the first site that is there. Collective, blocks.
  virtual void take_first(std::span<std::uint8_t> bytes) = 0;
  /// Begins an exchange. `all`: a message of `bytes` for each site, in their order; this site's lies there.
  [[nodiscard]] virtual std::unique_ptr<SiteExchange> start(const MessageTag& tag, std::span<std::byte> all,
                                                            std::size_t bytes) = 0;

  // Where survives() is true.
  /// Others train already: take_state() is the first call.
  [[nodiscard]] virtual bool joins() const { return false; }
  /// What give_state() of another site has given. Blocks until their next exchange.
  [[nodiscard]] virtual std::string take_state() { return {}; }
  /// `joiner`: of an outcome, before the next start().
  virtual void give_state(std::uint64_t /*joiner*/, std::string /*state*/) {}
  /// The training has ended well.
  virtual void leave() noexcept {}
};

/// `across`: the ranks that have this rank's number in their site, one a site, in the order of the sites.
[[nodiscard]] std::unique_ptr<SiteLine> make_group_line(std::shared_ptr<CommBackend> across);

struct HubLineOptions {
  int rank = 0;  ///< of the site
  int ranks = 1;
  int session = 0;    ///< how many such lines this process had before
  std::string job{};  ///< of the site
  Milliseconds timeout{300'000};
  std::shared_ptr<RankActivity> activity{};
  std::shared_ptr<TrafficTable> table{};  ///< null: bytes are not counted
  /// True once the program of this rank has failed: leave() then says nothing. Null: it never does.
  std::shared_ptr<const std::atomic<bool>> failed{};
};
/// Blocks until the hub has welcomed this site: when all sites have come, or at once if others train already. Throws
/// kPeerLost, kTimeout.
[[nodiscard]] std::unique_ptr<SiteLine> make_hub_line(const SitePlace& place, const HubLineOptions& options);

}  // namespace zeroth
