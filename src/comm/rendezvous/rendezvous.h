// Rendezvous: the processes of a group find each other and learn each other's pid. Rank 0 is the host and
// stays the broker through which descriptors travel.
#pragma once

#include "base/unique_fd.h"
#include "comm/function_ref.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/base/notices.h>

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// Ranks of one shared-memory group; a message that carries everybody's descriptor must fit the kernel's
/// limit of 253.
inline constexpr int kMaxShmRanks = 128;

/// A system call that the kernel or container refuses to a rank. Travels in the hello.
struct Refusal {
  std::int16_t call = 0;    ///< 0: nothing is refused, 1: memfd_create, 2: pidfd_open
  std::int16_t reason = 0;  ///< errno
};

/// kResource, naming rank, call and what to allow.
[[nodiscard]] Error refusal_error(Refusal refusal, int rank, int size);

struct RendezvousSpec {
  std::string job{};  ///< unique on the host
  int rank = 0;
  int size = 1;
  Milliseconds timeout{};
  Refusal refused{};  ///< this rank cannot take part, and comes to say so
  NoticeTimes notices{};
  std::function<void(std::string_view)> say{};  ///< gets notices while ranks do not come; unset: it waits in silence
  std::string hint{};                           ///< for a notice: what to do
  bool is_job = false;  ///< the ranks are those of the launcher's job, who may know of one that will not come
};

struct Rendezvous {
  /// Rank 0: connection to each other rank, [0] empty. Others: one connection, to rank 0.
  std::vector<UniqueFd> connections{};
  std::vector<pid_t> pids{};
};

/// Blocks until all ranks are there. Strangers (other users, other protocols' bytes) are turned away in
/// silence. A wrong world size, a rank that comes twice or another version is kMismatch on every rank that
/// has come; a missing rank is kTimeout, a rank that went away kPeerLost; a system call that is refused to a
/// rank is kResource on every rank, after all have come. While ranks do not come, rank 0 says which, and so do ranks
/// that do not find rank 0.
[[nodiscard]] Rendezvous meet(const RendezvousSpec& spec, FunctionRef<void()> check);

}  // namespace zeroth::detail
