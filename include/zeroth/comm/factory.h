// How a rank gets its seat in the world.
#pragma once

#include <zeroth/base/deadline.h>
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

class RankWatch;

/// Who forms the sums of reductions, and in which order.
enum class Reduction : std::uint8_t {
  kRankOrder,  ///< Zeroth, in rank order along the nodes: the same bits over every transport
  kTransport,  ///< where it has some, the transport's own algorithms, in an order of theirs: for those who want their
               ///< speed
};

/// "rank_order", "transport".
[[nodiscard]] std::string_view name_of(Reduction reduction) noexcept;

struct CommOptions {
  Milliseconds timeout{300'000};        ///< of every wait
  Milliseconds first_timeout{0};        ///< until `watch` has seen the first step end: 0: twice as long
  Milliseconds frozen_after{10'000};    ///< a stopped peer without a heartbeat for this long is lost
  Milliseconds end_stuck_after{5'000};  ///< as ControlOptions has it, for World::connect()
  /// Polling before sleep; unset: 20 us if every rank of the host has a core, else 50 us in which it yields its own.
  std::optional<std::chrono::microseconds> spin{};
  /// Per rank and group, for buffers that are neither attached nor readable by other processes (process_vm_readv), and
  /// for pieces that are summed; at least 64 KiB. Small enough that two halves stay in a core's cache.
  std::size_t staging_bytes = std::size_t{256} << 10U;
  /// Node of each world rank; empty: the hosts, over mpi and shm+mpi, else all ranks are on one. The same on all ranks.
  /// See CommBackend::node_sizes().
  std::vector<int> nodes{};
  /// The same on all ranks. kTransport: "mpi" makes its calls by MPI's own algorithms, "nccl" its sums by NCCL's;
  /// "self" has nothing to sum; other backends are refused (kConfig). kRankOrder: "nccl" refuses sums of floating-point
  /// numbers, call by call.
  Reduction reduction = Reduction::kRankOrder;
  /// The same on all ranks. Where calls do not carry what ranks compare, they are compared before each call: those of
  /// "mpi" with Reduction::kTransport (see CheckedBackend), and those of "nccl" and "nccl+mpi" on CUDA streams, where
  /// submit() then blocks the host (see make_nccl_backend()). Other calls are always compared.
  bool check_calls = false;
  /// Of each rank's link to other nodes, which World::connect() then emulates with a SlowLinkBackend; 0: as fast as it
  /// is.
  std::int64_t link_bytes_per_s = 0;
  std::string call_table{};  ///< file of a CallTable (mixed.h) that rank 0 reads; for mixtures of backends only
  int device = -1;  ///< nccl: this rank's CUDA device; -1: the one that is current on the thread that makes the seat
  std::shared_ptr<MemoryLedger> ledger{};  ///< counts control blocks and staging if given
  std::shared_ptr<RankWatch> watch{};      ///< of this rank: hears of long waits, and can end them; unset: nobody does
  std::vector<int> watched_ranks{};        ///< the job's number of each rank of this world; empty: the same
  std::shared_ptr<SystemCalls> system{};   ///< the kernel, or a test's substitute; unset: the kernel
};

/// Meeting point of ranks that are threads of one process. Hand the same hub to every rank's backend.
class InprocHub;
[[nodiscard]] std::shared_ptr<InprocHub> make_inproc_hub(int world_size);

struct WorldSpec {
  int rank = 0;
  int size = 1;
  std::string job{};  ///< shm: equal on all ranks of a job, unique on the host; empty: job_from_environment()
  std::shared_ptr<InprocHub> hub{};  ///< inproc only
  CommOptions options{};
};

/// ZEROTH_JOB_ID, or MASTER_ADDR:MASTER_PORT with TORCHELASTIC_RUN_ID; throws kEnvironment if neither is set.
[[nodiscard]] std::string job_from_environment();

/// Blocks until all ranks are there. "self", "inproc", "shm"; "mpi", "shm+mpi" (two levels, see two_level.h; both need
/// libzeroth_mpi.so, and ranks that mpirun started); "nccl" over inproc (with a hub) or shm, "nccl+mpi" over shm+mpi
/// (see nccl.h); "shm|mpi" and the like are mixtures, each call by the backend that options.call_table gives it
/// (mixed.h), none of them nccl; throws kConfig naming what is built for another name, kTimeout naming the ranks that
/// did not come, kMismatch for a wrong world size, a rank that came twice or another version of Zeroth, kResource if
/// memfd or pidfd is refused.
[[nodiscard]] std::unique_ptr<CommBackend> make_backend(std::string_view name, const WorldSpec& spec);
/// "shm|mpi": shm and mpi; of a name without '|' only itself.
[[nodiscard]] std::vector<std::string> backends_in(std::string_view name);
/// Names that make_backend knows in this build.
[[nodiscard]] std::vector<std::string> backend_names();

/// What memory_bytes() of a seat in a world of `size` ranks will be; 64 KiB more for each rank that it sends to.
[[nodiscard]] std::size_t transport_bytes(std::string_view name, int size, const CommOptions& options);

}  // namespace zeroth
