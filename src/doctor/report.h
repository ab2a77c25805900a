// What `zeroth doctor` found out: facts of ranks, links between them, clocks, and what is wrong with any of it. Values,
// with a JSON form that travels between ranks and is printed by --json.
#pragma once

#include <zeroth/base/error.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::doctor {

/// More than this no message between ranks and no report may hold.
inline constexpr std::size_t kMaxReportBytes = std::size_t{64} << 20U;

/// What one rank says of itself and the host that it is on. Texts are "" for what is not there, sizes in bytes.
struct RankFacts {
  int rank = 0;
  int host = 0;             ///< number of its host in the job
  int ranks_on_host = 1;    ///< that were started there
  std::string host_name{};  ///< its own name for itself
  std::string zeroth{};     ///< version
  std::string kernel{};
  std::string glibc{};
  std::string mpi{};
  std::string nccl{};
  std::string cuda{};  ///< what the driver supports: "12.4"
  std::vector<std::string> devices{};
  int processors = 0;  ///< of the affinity mask
  int cores = 0;
  int numa_nodes = 0;
  std::uint64_t memory = 0;            ///< of the machine
  std::uint64_t memory_available = 0;  ///< what the system and the cgroup still leave
  std::uint64_t memory_limit = 0;      ///< of the cgroup; 0: none
  std::uint64_t shm_bytes = 0;         ///< size of /dev/shm
  std::uint64_t shm_free = 0;
  std::string memfd{};            ///< why memfd_create is refused
  std::string pidfd{};            ///< why pidfd_open is refused
  std::int64_t memlock = 0;       ///< soft limit; -1: none
  std::int64_t open_files = 0;    ///< soft limit; -1: none
  std::string name_leads_to{};    ///< the loopback address that the host's own name leads to
  bool interface_chosen = false;  ///< GLOO_SOCKET_IFNAME is set: the own name does not matter
};

/// Of one folder on one host.
struct DiskFacts {
  int host = 0;
  std::string folder{};
  std::uint64_t free = 0;
  double write_bytes_per_s = 0;  ///< of one file, synced
  double read_bytes_per_s = 0;   ///< past the page cache where that is possible
  bool direct = false;           ///< O_DIRECT works
  std::string error{};           ///< why it could not be measured
};

struct ClockFacts {
  int host = 0;
  double ahead_ms = 0;        ///< of rank 0's host
  double uncertainty_ms = 0;  ///< half of the shortest round trip
};

/// Both directions between two ranks, `a` below `b`.
struct Link {
  int a = 0;
  int b = 0;
  std::string transport{};       ///< "shm", "tcp", "mpi"
  bool far = false;              ///< between hosts
  double latency_us = 0;         ///< half of the shortest round trip
  double there_bytes_per_s = 0;  ///< a to b
  double back_bytes_per_s = 0;
  std::string error{};  ///< why there is nothing to measure
};

/// Something that is wrong, or (`note`) only worth knowing.
struct Finding {
  bool note = false;
  ErrorCode code = ErrorCode::kEnvironment;
  std::string message{};
  ErrorContext context{};

  /// "[MISMATCH] ...; where: ...; who: ...": as errors are.
  [[nodiscard]] std::string line() const;
};

struct HostEntry {
  int host = 0;
  std::string name{};     ///< as it was given, or its own
  std::string address{};  ///< as rank 0 sees it; "" on one host
};

/// A rank that did not come, or no longer answers.
struct LostRank {
  int rank = 0;
  int host = -1;  ///< -1: not known
  std::string expected{};
  std::string got{};
};

struct Report {
  int num_ranks = 0;  ///< that were started
  std::vector<HostEntry> hosts{};
  std::vector<RankFacts> ranks{};  ///< those that came, in order
  std::vector<LostRank> lost{};
  std::vector<DiskFacts> disks{};
  std::vector<ClockFacts> clocks{};
  std::vector<Link> links{};
  std::vector<Finding> findings{};    ///< met on the way; judge() adds the others
  std::vector<std::string> advice{};  ///< lines of --params

  /// "node2", or "host 1" for one that has no name.
  [[nodiscard]] std::string name_of_host(int host) const;
  /// -1 for a rank that did not come.
  [[nodiscard]] int host_of(int rank) const;
  [[nodiscard]] bool well() const;
};

// to_json() and from_json(), which throws nlohmann's exceptions for what is no such thing.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankFacts, rank, host, ranks_on_host, host_name, zeroth, kernel, glibc, mpi, nccl,
                                   cuda, devices, processors, cores, numa_nodes, memory, memory_available, memory_limit,
                                   shm_bytes, shm_free, memfd, pidfd, memlock, open_files, name_leads_to,
                                   interface_chosen)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DiskFacts, host, folder, free, write_bytes_per_s, read_bytes_per_s, direct, error)

/// One object, also for programs; see docs/doctor.md.
[[nodiscard]] std::string to_text(const Report& report);
/// Reads it back. Throws Error(kLaunch) for a text that is none.
[[nodiscard]] Report report_from(std::string_view text);

}  // namespace zeroth::doctor
