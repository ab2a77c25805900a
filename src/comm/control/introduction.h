// How a rank and the hub come to believe each other.
//
// [Note: Who may take part] Neither side says the job's secret: whoever listens at the hub's address would have it. The
// hub begins with a nonce; the rank says who it is, with a nonce of its own and a proof; only then the hub shows its
// proof, and only then one believes what the other says. A proof is the HMAC-SHA-256, with the secret as its key, of
// the side that shows it, the address at which the rank looked for the hub, and all that has been said: so one that was
// recorded is of no use later, nor the other side's own, nor one that was meant for another rank or another address.
#pragma once

#include "comm/control/control_link.h"
#include "comm/control/control_message.h"

#include <zeroth/base/deadline.h>

#include <poll.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::detail {

using JobSecret = std::array<std::uint8_t, 32>;
[[nodiscard]] JobSecret draw_secret();

/// What a rank that is `hello` shows, whatever the proof in it.
[[nodiscard]] Digest proof_of_rank(const JobSecret& secret, const TcpAddress& hub, const ChallengeMessage& challenge,
                                   HelloMessage hello);
/// What the hub shows to a rank that has said `hello`.
[[nodiscard]] Digest proof_of_hub(const JobSecret& secret, const TcpAddress& hub, const ChallengeMessage& challenge,
                                  const HelloMessage& hello);

/// The hub's side: listens, and tells ranks from strangers. No call blocks.
class Reception {
 public:
  /// At a free port of each of the hosts. Throws kResource.
  Reception(const std::vector<std::string>& hosts, int num_ranks);

  [[nodiscard]] const JobSecret& secret() const { return secret_; }
  [[nodiscard]] const std::vector<TcpAddress>& addresses() const { return addresses_; }
  /// Dropped so far. Any thread.
  [[nodiscard]] std::uint64_t strangers() const { return strangers_.load(); }

  void add_polled(std::vector<pollfd>& polled) const;
  struct Member {
    HelloMessage hello;
    ControlLink link;
  };
  /// The ranks that have shown since the last look that they have the secret, each once and welcomed. Others are
  /// dropped; `refused` is called with each and the reason, "it does not know the job's secret".
  using Refused = std::function<void(const TcpAddress& peer, const std::string& why)>;
  [[nodiscard]] std::vector<Member> look(const Refused& refused);

 private:
  struct Guest {
    ControlLink link;
    TcpAddress hub;  ///< where it has come
    TcpAddress peer;
    Deadline deadline;
    ChallengeMessage challenge{};
  };
  void admit();
  /// Why one that has said hello is no rank that could come; "" if it is.
  [[nodiscard]] std::string objection(const Guest& guest, const HelloMessage& hello) const;

  JobSecret secret_;
  std::vector<ForkClosedFd> listeners_;
  std::vector<TcpAddress> addresses_;
  std::vector<bool> come_;                ///< by rank
  std::vector<Guest> guests_;             ///< the oldest first
  SteadyClock::time_point full_until_{};  ///< this process may open no more files: whoever comes has to wait
  std::atomic<std::uint64_t> strangers_{0};
};

/// A rank's side: the connection to the first of the addresses at which somebody shows that he has the secret, and what
/// he has said since.
struct Introduction {
  ControlLink link;
  std::optional<VerdictMessage> verdict{};
};
struct IntroductionSpec {
  std::vector<TcpAddress> hub{};
  JobSecret secret{};
  HelloMessage hello{};
  Milliseconds timeout{};         ///< all addresses are tried once, and again until then
  Milliseconds patience{};        ///< with one address
  std::string who{};              ///< for errors
  std::function<void()> check{};  ///< called at least every 100 ms; what it throws ends the attempt
};
/// Throws kResource, with what was found at each address.
[[nodiscard]] Introduction introduce(const IntroductionSpec& spec);

}  // namespace zeroth::detail
