// One conformance suite for all backends: a test body runs on every rank of a world of any kind.
#pragma once

#include "conformance/gloo_world.h"
#include "conformance/gpu_world.h"
#include "conformance/mpi_world.h"
#include "support/fork_ranks.h"
#include "support/private_memory.h"
#include "support/process_groups.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

struct WorldParam {
  /// Of make_backend(); "staged" (shm whose processes cannot read each other's own memory); or over test transports
  /// "messages", "levels" (inproc in a node, messages between nodes) and "mixed" (both, by kind and size) for threads,
  /// "sockets" and "shm+sockets" for processes; or of gpu_world.h.
  std::string backend{};
  int size = 1;
  int per_node = 0;  ///< ranks on a node; 0: all
};

inline std::ostream& operator<<(std::ostream& out, const WorldParam& param) {
  out << param.backend << " x " << param.size;
  return param.per_node == 0 ? out : out << ", " << param.per_node << " on a node";
}

struct WorldOptions {
  CommOptions comm = quick_options();
  Milliseconds deadline{100'000};
  bool abort_on_failure = true;
  std::function<bool(const std::vector<pid_t>& pids, Milliseconds since)> meanwhile{};  ///< processes only
};

/// Ranks that somebody else started.
[[nodiscard]] inline bool is_started_world(const WorldParam& param) {
  return is_mpi_world(param.backend) || is_gloo_world(param.backend);
}

/// Ranks that send each other messages: no memory that all peers can read.
[[nodiscard]] inline bool over_messages(const WorldParam& param) {
  return param.backend == "messages" || param.backend == "levels" ||
         (is_started_world(param) && param.backend != "shm|mpi");
}

/// Nodes whose ranks share memory, and messages between them.
[[nodiscard]] inline bool has_levels(const WorldParam& param) {
  return param.backend == "levels" || param.backend == "shm+mpi" || param.backend == "shm+gloo";
}

/// A rank that finds a mismatch tells those who look somewhere else: in another level, or at another backend.
[[nodiscard]] inline bool tells_others(const WorldParam& param) {
  return has_levels(param) || param.backend == "shm|mpi";
}

/// NCCL's sums: in any order, and rounded to their dtype at each addition. What asks for another dtype is refused.
[[nodiscard]] inline bool sums_in_one_dtype(const CommBackend& backend) {
  return backend.kind() == "nccl";
}

/// Whether sums have the bits of rank order along the nodes; else they are as close as any order is.
[[nodiscard]] inline bool sums_in_rank_order(const CommBackend& backend) {
  return backend.kind() != "mpi with its own sums" && !sums_in_one_dtype(backend);
}

/// Whether a send and a recv are compared, and a wait says how far they have come. NCCL's are not, also where matched
/// calls are compared.
[[nodiscard]] inline bool compares_messages(const WorldParam& param) {
  return !param.backend.starts_with("nccl");
}

[[nodiscard]] inline ThreadTransport transport_of(const WorldParam& param) {
  if (param.backend == "levels") return ThreadTransport::kLevels;
  if (param.backend == "mixed") return ThreadTransport::kMixed;
  return param.backend == "messages" ? ThreadTransport::kMessages : ThreadTransport::kMemory;
}

/// Runs body(rank, backend) on every rank and returns what failed.
[[nodiscard]] inline RankReport run_world(const WorldParam& param, const RankBody& body,
                                          const WorldOptions& options = {}) {
  CommOptions comm = options.comm;
  comm.nodes = nodes_of_ranks(param.size, param.per_node);
  if (is_gloo_world(param.backend)) return run_gloo_world(body, comm, options.abort_on_failure);
  if (is_mpi_world(param.backend)) return run_mpi_world(param.backend, body, comm, options.abort_on_failure);
  const ThreadRanksOptions threads{.comm = comm,
                                   .abort_on_failure = options.abort_on_failure,
                                   .transport = transport_of(param),
                                   .deadline = options.deadline};
  if (is_gpu_world(param.backend)) return run_gpu_world(param.backend, param.size, body, threads);
  if (param.backend == "inproc" || param.backend == "mixed" || over_messages(param))
    return try_ranks(param.size, body, threads);
  const bool staged = param.backend == "staged";
  if (staged) comm.system = kernel_without_reads();
  ProcessGroups groups(staged ? "shm" : param.backend, param.size, comm);
  const auto run = [&](int rank) {
    const std::shared_ptr<CommBackend> backend = groups.group(rank);
    try {
      body(rank, backend);
    } catch (const Error& error) {
      if (options.abort_on_failure) backend->abort(error);
      throw;
    } catch (const std::exception& error) {
      if (options.abort_on_failure) backend->abort(Error(ErrorCode::kInternal, error.what()));
      throw;
    }
  };
  if (param.backend != "self") {
    return fork_ranks(param.size, run, {.deadline = options.deadline, .meanwhile = groups.parted(options.meanwhile)});
  }
  RankReport report;
  try {
    run(0);
  } catch (const Error& error) {
    report.failures.push_back({.rank = 0, .text = error.what(), .code = error.code()});
  } catch (const std::exception& error) {
    report.failures.push_back({.rank = 0, .text = error.what(), .code = std::nullopt});
  }
  return report;
}

/// With windows; those of GPUs have them in memory of the host.
[[nodiscard]] inline std::vector<WorldParam> all_worlds() {
  std::vector<WorldParam> worlds{{"self", 1}};
  for (const char* backend : {"inproc", "shm"}) {
    for (const int size : {1, 2, 3, 4, 7}) worlds.push_back({backend, size});
  }
  for (const char* backend : {"staged", "inproc_on_gpu", "nccl_checked"}) {
    for (const int size : {2, 3}) worlds.push_back({backend, size});
  }
  return worlds;
}

/// Worlds of the ranks that somebody else started; a test program that stands alone has none.
[[nodiscard]] inline std::vector<WorldParam> started_worlds() {
  const int gloo = gloo_ranks().size;
  const int mpi = mpi_world_size();
  if (gloo == 4) return {{"shm+gloo", 4, 2}};
  if (gloo > 0) return {{"gloo", gloo}};
  if (mpi == 4) return {{"shm+mpi", 4, 2}};
  if (mpi > 0) return {{"mpi", mpi}, {"mpi_own_sums", mpi}, {"mpi_own_sums_checked", mpi}, {"shm|mpi", mpi}};
  return {};
}

/// All worlds for what needs no memory that peers can read; of ranks that somebody else started theirs.
[[nodiscard]] inline std::vector<WorldParam> matched_worlds() {
  if (!started_worlds().empty()) return started_worlds();
  std::vector<WorldParam> worlds = all_worlds();
  for (const int size : {1, 2, 3, 5}) worlds.push_back({"messages", size});
  for (const char* backend : {"inproc", "shm", "messages"}) worlds.push_back({backend, 4, 2});
  worlds.push_back({"inproc", 5, 3});
  worlds.insert(worlds.end(), {{"mixed", 3}, {"mixed", 4, 2}});
  for (const int size : {1, 2, 3}) worlds.push_back({"nccl", size});
  worlds.insert(worlds.end(), {{"nccl", 4, 2}, {"inproc_on_gpu", 4, 2}});
  // Two nodes of two, two of three, one, and two of different sizes, which have no second level.
  for (const auto& [size, per_node] : {std::pair{4, 2}, {6, 3}, {2, 2}, {5, 3}})
    worlds.push_back({"levels", size, per_node});
  return worlds;
}

/// The first one with more than one rank of each backend, with and without nodes: for what takes long.
[[nodiscard]] inline std::vector<WorldParam> one_world_a_backend(const std::vector<WorldParam>& worlds) {
  std::vector<WorldParam> chosen;
  for (const WorldParam& world : worlds) {
    const bool known = std::ranges::any_of(chosen, [&](const WorldParam& other) {
      return other.backend == world.backend && (other.per_node > 0) == (world.per_node > 0);
    });
    if (!known && (world.size > 1 || world.backend == "self")) chosen.push_back(world);
  }
  return chosen;
}

/// Worlds in which a rank can miss another one.
[[nodiscard]] inline std::vector<WorldParam> several_ranks() {
  return {{"inproc", 2}, {"inproc", 3}, {"inproc", 4},        {"shm", 2},
          {"shm", 3},    {"shm", 4},    {"inproc_on_gpu", 2}, {"inproc_on_gpu", 3}};
}

/// Those of NCCL in which calls are compared before they are made. It has no memory that takes a message which nobody
/// has asked for.
[[nodiscard]] inline std::vector<WorldParam> several_ranks_of_nccl() {
  return {{"nccl_checked", 2}, {"nccl_checked", 3}, {"nccl_checked", 4}};
}

[[nodiscard]] inline std::vector<WorldParam> several_worlds_of_messages() {
  std::vector<WorldParam> worlds = started_worlds();
  if (worlds.empty()) return {{"messages", 2}, {"messages", 3}, {"messages", 4}, {"levels", 4, 2}};
  std::erase_if(worlds,
                [](const WorldParam& world) { return world.backend == "mpi_own_sums"; });  // it compares nothing
  return worlds;
}

/// With those of two backends, where calls that differ may be in two places: nobody compares them but the control
/// plane.
[[nodiscard]] inline std::vector<WorldParam> several_worlds_with_messages() {
  std::vector<WorldParam> worlds = several_worlds_of_messages();
  if (started_worlds().empty()) worlds.push_back({"mixed", 3});
  return worlds;
}

[[nodiscard]] inline std::vector<WorldParam> several_matched_ranks() {
  std::vector<WorldParam> worlds = several_worlds_of_messages();
  if (!started_worlds().empty()) return worlds;
  for (const auto& more : {several_ranks(), several_ranks_of_nccl()})
    worlds.insert(worlds.end(), more.begin(), more.end());
  return worlds;
}

inline std::string name_of_param(const ::testing::TestParamInfo<WorldParam>& info) {
  const std::string size = std::to_string(info.param.size);
  std::string backend = info.param.backend;
  std::ranges::replace(backend, '+', '_');
  if (const std::size_t between = backend.find('|'); between != std::string::npos) backend.replace(between, 1, "_or_");
  return backend + "_" + (info.param.per_node == 0 ? size : std::to_string(info.param.per_node) + "per" + size);
}

/// Thread sanitizer does not follow forked children of a process that once had threads; shm is covered by the
/// other builds.
[[nodiscard]] inline bool runs_here(const WorldParam& param) {
  return !(kThreadSanitizer && (param.backend == "shm" || param.backend == "staged" || param.backend == "sockets" ||
                                param.backend == "shm+sockets"));
}

}  // namespace zeroth::test

#define ZR_SKIP_UNDER_TSAN(param) \
  if (!::zeroth::test::runs_here(param)) GTEST_SKIP() << "not under sanitizers: forked ranks"
