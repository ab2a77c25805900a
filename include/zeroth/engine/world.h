// World: rank and size of this process in its job, from any launcher's variables.
#pragma once

#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/comm/messages.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/comm/sites.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth {

struct Config;
class SiteLine;
class World;
namespace detail {
World unwatched(const World& world);
}

/// Rank and size are known at once. The first connect() connects to the other ranks. Copies share the connection.
///
/// Reads RANK and WORLD_SIZE (zeroth-run, torchrun), else OMPI_COMM_WORLD_RANK / _SIZE (mpirun), else SLURM_PROCID /
/// SLURM_NTASKS (srun, in its steps only). A bare process is a world of one rank; so is one with variables that
/// describe several ranks but have not made it one of them (not_taken()). Ranks on one host use shared memory. Ranks of
/// mpirun on several hosts (OMPI_COMM_WORLD_LOCAL_SIZE is less than the size) use MPI between hosts. Ranks of other
/// launchers on several hosts are refused, because there is no transport between them here: LOCAL_WORLD_SIZE must equal
/// the size and SLURM_STEP_NUM_NODES must be 1, if they are set. The Python package then uses a group of
/// torch.distributed. ZEROTH_BACKEND=shm, =mpi or =shm+mpi decides instead.
class World {
 public:
  /// Throws kEnvironment for inconsistent variables, with which, expected and got. Never blocks.
  [[nodiscard]] static World from_environment();
  /// For tests and embedders: `lookup` replaces getenv.
  [[nodiscard]] static World from_variables(const std::function<std::optional<std::string>(std::string_view)>& lookup);
  struct RankAndSize {
    int rank = 0;
    int size = 1;
    bool operator==(const RankAndSize&) const = default;
  };
  /// This rank and the size, if the variables are consistent but from_environment() refuses them, because the ranks are
  /// on several hosts without a transport; otherwise none. A caller with messages between these ranks then uses
  /// from_transport(). Throws kEnvironment for inconsistent variables.
  [[nodiscard]] static std::optional<RankAndSize> without_transport();
  [[nodiscard]] static std::optional<RankAndSize> without_transport(
      const std::function<std::optional<std::string>(std::string_view)>& lookup);
  /// Ranks that are threads of this process.
  [[nodiscard]] static World from_hub(std::shared_ptr<InprocHub> hub, int rank, int size);

  /// The ranks of a message transport. `origin`: the source of the world, for the log. If these are all ranks of the
  /// launcher's variables, local_rank() comes from the variables. With several nodes, the ranks of one node share its
  /// memory (make_backend_over_hosts()). Shares `transport`.
  [[nodiscard]] static World from_transport(std::shared_ptr<MessageTransport> transport,
                                            std::string origin = "the caller's transport");

  [[nodiscard]] bool is_watched() const;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] int local_rank() const { return local_rank_; }
  /// Number of ranks that share this rank's processors: from the launcher (SLURM_STEP_NUM_NODES: the even share), else
  /// all ranks.
  [[nodiscard]] int ranks_on_host() const { return ranks_on_host_; }
  /// "self", "shm", "inproc", or the kind of the transport: "c10d gloo".
  [[nodiscard]] const std::string& backend_name() const { return backend_name_; }
  [[nodiscard]] const std::string& job() const { return job_; }
  /// The source of rank and size: "RANK and WORLD_SIZE (zeroth-run, torchrun)", "no launcher's variables", ...
  [[nodiscard]] const std::string& origin() const { return origin_; }

  /// In a world of one rank: variables that speak of several, why they are not taken, and what to do, in one line for
  /// the log: "SLURM_NTASKS=4 is not taken: ...". "" if there are none.
  [[nodiscard]] const std::string& not_taken() const { return not_taken_; }

  /// The ranks of this rank's site as a world: this world is cut into `count` runs of consecutive ranks, which train
  /// apart (local_updates.h). Connections, control plane and activity stay this world's, so a failure anywhere ends the
  /// whole job. All ranks make their groups together, as in this world. Where zeroth-run has started the sites as jobs
  /// of their own (--sites), this world is a site already, and `count` their number. Throws kConfig if `count` does not
  /// divide it, or is another one than the launcher's, kUsage for a site of a site. Never blocks.
  [[nodiscard]] World site(int count) const;
  /// 1 for a world that is no site.
  [[nodiscard]] int num_sites() const { return num_sites_; }
  [[nodiscard]] int site_index() const { return site_index_; }
  /// Where the hub between the sites is, in a site that is a job of its own; set before site() too.
  [[nodiscard]] const std::optional<SitePlace>& place() const { return place_; }
  /// To the ranks that have this rank's number in the other sites: a new group, or a connection to the hub. After the
  /// first connect(). Collective over the ranks of all sites, blocks.
  [[nodiscard]] std::unique_ptr<SiteLine> across_sites(std::shared_ptr<TrafficTable> table) const;

  /// Makes a new group of all ranks, for one engine. Collective, blocks until all ranks have come. The first call
  /// decides the options. The group counts its traffic in `table` and records its calls in activity()'s flight
  /// recorder. With the first group a world of several ranks joins its control plane (control_plane.h), which lives as
  /// long as the world or one of its groups. Throws the errors of make_backend(), and kConfig for options that differ
  /// from those with which the ranks have met.
  [[nodiscard]] std::shared_ptr<CommBackend> connect(const CommOptions& options,
                                                     std::shared_ptr<TrafficTable> table) const;
  /// The groups of an engine's mesh: the axes of zeroth.mesh, in the engine's order, and its timeouts. For models that
  /// ranks share. Collective, blocks. Throws the errors of mesh_of() (settings.h) and of the calls below.
  [[nodiscard]] Mesh mesh(const Config& config) const;
  /// Groups of ranks by named axes, beside those of engines. Collective, blocks. The options are those of the first
  /// connect(), or the defaults, which later engines must have too. Throws kConfig if the axes do not fit the world,
  /// and kMismatch if ranks give different ones.
  [[nodiscard]] Mesh mesh(MeshSpec spec) const { return mesh(std::move(spec), {}); }
  /// `options`: if this is the first group of the world.
  [[nodiscard]] Mesh mesh(MeshSpec spec, const CommOptions& options) const;
  /// The axes of all meshes that were made so far, each once.
  [[nodiscard]] const std::vector<MeshSpec>& meshes() const;
  /// The record of this rank's activity, which other ranks read through the control plane. Shared by copies.
  [[nodiscard]] const std::shared_ptr<RankActivity>& activity() const;
  /// Tells all ranks that this one has failed, if it is connected: their waits throw end_of_job() of error_of(cause).
  /// Use it for exceptions that leave the program of a rank: `catch (const std::exception& cause) {
  /// world.abort(cause); throw; }`. Blocks at most half a second, if a transport must pass the message on. Never
  /// throws.
  void abort(const std::exception& cause) const noexcept;

 private:
  friend World detail::unwatched(const World& world);
  struct Connection;
  World();
  /// A new group of all ranks, "world/engine0". After connect_base().
  [[nodiscard]] std::shared_ptr<CommBackend> make_group(std::string_view kind, const CommOptions& options,
                                                        std::shared_ptr<TrafficTable> table) const;
  void connect_base(const CommOptions& options) const;
  /// As those of the whole world, of which this is a site, say them.
  [[nodiscard]] CommOptions of_whole(const CommOptions& options) const;
  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
  int ranks_on_host_ = 1;
  std::string backend_name_ = "self";
  std::string job_;
  std::string origin_ = "no launcher's variables";
  std::string not_taken_;
  std::string meeting_hint_;
  std::shared_ptr<InprocHub> hub_;
  std::shared_ptr<MessageTransport> transport_;
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<const World> whole_;  ///< of which this is a site
  int num_sites_ = 1;
  int site_index_ = 0;
  std::optional<SitePlace> place_;
};

}  // namespace zeroth
