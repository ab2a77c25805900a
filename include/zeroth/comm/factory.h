// Makes the world's group, as its ranks hold it.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/notices.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/system_calls.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

class RankActivity;

/// The code that forms the sums of reductions, and their order.
enum class Reduction : std::uint8_t {
  kRankOrder,  ///< Zeroth, in rank order along the nodes: the same bits over every transport
  kTransport,  ///< the transport's own algorithms, if it has some, in their own order: for speed
};

/// "rank_order", "transport".
[[nodiscard]] std::string_view name_of(Reduction reduction) noexcept;

struct CommOptions {
  Milliseconds timeout{300'000};        ///< of every wait
  Milliseconds first_timeout{0};        ///< of waits until `activity` has seen the first step end; 0: twice `timeout`
  Milliseconds frozen_after{10'000};    ///< a stopped rank without a heartbeat for this time is lost
  Milliseconds end_stuck_after{5'000};  ///< see ControlOptions; for World::connect()
  NoticeTimes meeting_notices{};        ///< shm: when a rank that waits for others at the start says so
  /// Polling time before sleep. Unset: 20 us if every rank of the host has a core, else 50 us during which it yields.
  std::optional<std::chrono::microseconds> spin{};
  /// Bytes of staging per rank and group, at least 64 KiB: for buffers that are neither attached nor readable by other
  /// processes (process_vm_readv), and for pieces of sums. The default is small, so two halves stay in a core's cache.
  std::size_t staging_bytes = std::size_t{256} << 10U;
  /// Node of each world rank, the same on all ranks. Empty: the hosts over mpi and shm+mpi, else one node. See
  /// CommBackend::node_sizes().
  std::vector<int> nodes{};
  /// The same on all ranks. With kTransport, "mpi" makes its calls by MPI's own algorithms and "nccl" its sums by
  /// NCCL's; "self" has no sums; other backends are refused (kConfig). With kRankOrder, "nccl" refuses each sum of
  /// floating-point numbers.
  Reduction reduction = Reduction::kRankOrder;
  /// The same on all ranks. True: also compare, before each call, the calls of transports that do not compare them:
  /// "mpi" with Reduction::kTransport (see CheckedBackend), and "nccl" and "nccl+mpi" on CUDA streams, where submit()
  /// then blocks the host (see make_nccl_backend()). Other calls are always compared.
  bool check_calls = false;
  /// Speed of each rank's link to other nodes, which World::connect() emulates with a SlowLinkBackend; 0: no emulation.
  std::int64_t link_bytes_per_s = 0;
  std::string call_table{};  ///< path of a CallTable (mixed.h) that rank 0 reads; for mixtures of backends only
  int device = -1;  ///< nccl: this rank's CUDA device; -1: the current device of the thread that makes the group
  std::shared_ptr<MemoryLedger> ledger{};    ///< counts control blocks and staging if given
  std::shared_ptr<RankActivity> activity{};  ///< of this rank: gets long waits and can end them; unset: none
  std::vector<int> watched_ranks{};          ///< the job's rank number of each rank of this world; empty: equal
  std::shared_ptr<SystemCalls> system{};     ///< unset: the kernel; else a substitute of a test

  /// Of ranks that wait for each other at the start.
  [[nodiscard]] Milliseconds meeting_timeout() const { return first_timeout.count() > 0 ? first_timeout : timeout; }
};

/// Meeting point of ranks that are threads of one process. Pass the same hub to the backends of all ranks.
class InprocHub;
[[nodiscard]] std::shared_ptr<InprocHub> make_inproc_hub(int world_size);

struct WorldSpec {
  int rank = 0;
  int size = 1;
  std::string job{};  ///< shm: equal on all ranks of a job, unique on the host; empty: job_from_environment()
  std::shared_ptr<InprocHub> hub{};  ///< inproc only
  CommOptions options{};
  std::string meeting_hint{};  ///< shm: what to do where ranks do not come, for the log; empty: in general words
};

/// ZEROTH_JOB_ID, or MASTER_ADDR:MASTER_PORT with TORCHELASTIC_RUN_ID; throws kEnvironment if neither is set.
[[nodiscard]] std::string job_from_environment();

/// Makes this rank's object of the world's group. Collective, blocks until all ranks have come. Names:
///   "self", "inproc", "shm"
///   "mpi", "shm+mpi"      both need libzeroth_mpi.so and ranks that mpirun started; shm+mpi has two levels
///   (two_level.h) "nccl", "nccl+mpi"    over inproc (with a hub) or shm, and over shm+mpi (nccl.h)
///   "shm|mpi", ...        a mixture: options.call_table gives the backend of each call (mixed.h); not with nccl
/// Throws kConfig for another name, with the names of this build; kTimeout with the ranks that did not come; kMismatch
/// for a wrong world size, a rank that came twice or another version of Zeroth; kResource if memfd or pidfd is refused.
[[nodiscard]] std::unique_ptr<CommBackend> make_backend(std::string_view name, const WorldSpec& spec);
/// The backends in a name: shm and mpi for "shm|mpi"; only the name itself if it has no '|'.
[[nodiscard]] std::vector<std::string> backends_in(std::string_view name);
/// Names that make_backend knows in this build.
[[nodiscard]] std::vector<std::string> backend_names();

/// memory_bytes() of the group of a world of `size` ranks, before it is made; plus 64 KiB for each rank that it sends
/// to.
[[nodiscard]] std::size_t transport_bytes(std::string_view name, int size, const CommOptions& options);

}  // namespace zeroth
