// World: who this process is among the ranks of a job, from any launcher's variables.
#pragma once

#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>
#include <zeroth/comm/rank_watch.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace zeroth {

class World;
namespace detail {
World unwatched(const World& world);
}

/// Rank and size are known at once; the connection to the other ranks is made by the first connect(). Copies share it.
///
/// Reads RANK and WORLD_SIZE (zeroth-run, torchrun), else OMPI_COMM_WORLD_RANK / _SIZE (mpirun), else SLURM_PROCID /
/// SLURM_NTASKS (srun); a bare process is a world of one. Ranks on one host meet in its
/// shared memory. Ranks that mpirun has started on several (OMPI_COMM_WORLD_LOCAL_SIZE is less than the size) use MPI
/// between hosts; those of other launchers are refused (LOCAL_WORLD_SIZE must equal the size, SLURM_STEP_NUM_NODES must
/// be 1, where they are set), for there is no transport between them here: the Python package then takes a group of
/// torch.distributed. ZEROTH_BACKEND=shm, =mpi or =shm+mpi decides instead.
class World {
 public:
  /// Throws kEnvironment for variables that make no sense: which, expected, got.
  [[nodiscard]] static World from_environment();
  /// For tests and embedders: `lookup` stands for getenv.
  [[nodiscard]] static World from_variables(const std::function<std::optional<std::string>(std::string_view)>& lookup);
  struct Seat {
    int rank = 0;
    int size = 1;
    bool operator==(const Seat&) const = default;
  };
  /// This rank's, where the variables make sense and from_environment() refuses all the same: the ranks are on several
  /// hosts, and nothing here joins them. Who has messages between them makes their world with from_transport(). Throws
  /// kEnvironment as from_environment() does.
  [[nodiscard]] static std::optional<Seat> without_transport();
  [[nodiscard]] static std::optional<Seat> without_transport(
      const std::function<std::optional<std::string>(std::string_view)>& lookup);
  /// Ranks that are threads of this process.
  [[nodiscard]] static World from_hub(std::shared_ptr<InprocHub> hub, int rank, int size);

  /// Ranks that send each other messages: those of the transport. `origin`: who says so, for the log. Where they are
  /// all ranks of the launcher's variables, local_rank() is what those say. Ranks of one node share its memory where
  /// there are several (make_backend_over_hosts()).
  [[nodiscard]] static World from_transport(std::shared_ptr<MessageTransport> transport,
                                            std::string origin = "the caller's transport");

  [[nodiscard]] bool is_watched() const;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] int local_rank() const { return local_rank_; }
  /// Ranks that share this rank's processors: what the launcher says (SLURM_STEP_NUM_NODES: their even share), else
  /// all.
  [[nodiscard]] int ranks_on_host() const { return ranks_on_host_; }
  /// "self", "shm", "inproc", or the kind of the transport: "c10d gloo".
  [[nodiscard]] const std::string& backend_name() const { return backend_name_; }
  [[nodiscard]] const std::string& job() const { return job_; }
  /// What said so: "RANK and WORLD_SIZE (zeroth-run, torchrun)", "no launcher's variables", ...
  [[nodiscard]] const std::string& origin() const { return origin_; }

  /// A new group of all ranks, for one engine. Matched, blocks until all ranks are there. The first call decides the
  /// options. Traffic of the group is counted in `table`, its calls go into watch()'s flight recorder. With the first
  /// group a world of several ranks joins its control plane (control_plane.h), which lives as long as the world or one
  /// of its groups.
  [[nodiscard]] std::shared_ptr<CommBackend> connect(const CommOptions& options,
                                                     std::shared_ptr<TrafficTable> table) const;
  /// What this rank is doing, as the others can ask it through the control plane. Shared by copies.
  [[nodiscard]] const std::shared_ptr<RankWatch>& watch() const;
  /// Tells every rank that this one has failed, if it ever connected: waits of theirs throw what end_of_job() makes of
  /// error_of(cause). For whatever leaves the program of a rank: `catch (const std::exception& cause) {
  /// world.abort(cause); throw; }`. Blocks for half a second at most, where a transport has to pass it on. Never
  /// throws.
  void abort(const std::exception& cause) const noexcept;

 private:
  friend World detail::unwatched(const World& world);
  struct Connection;
  World();
  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
  int ranks_on_host_ = 1;
  std::string backend_name_ = "self";
  std::string job_;
  std::string origin_ = "no launcher's variables";
  std::shared_ptr<InprocHub> hub_;
  std::shared_ptr<MessageTransport> transport_;
  std::shared_ptr<Connection> connection_;
};

}  // namespace zeroth
