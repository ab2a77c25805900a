// The group of ranks that are forked processes, over each of the transports that processes have in a test.
#pragma once

#include "support/fork_ranks.h"
#include "support/socket_transport.h"

#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>
#include <zeroth/comm/mixed.h>
#include <zeroth/comm/two_level.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

/// Made before the fork. `kind`: of make_backend(), "sockets" (matched calls over messages), "shm+sockets"
/// (shm in each node of options.nodes, messages between nodes), or "shm|sockets" (large sums over messages).
class ProcessGroups {
 public:
  ProcessGroups(std::string kind, int world, CommOptions options)
      : kind_(std::move(kind)), world_(world), options_(std::move(options)), job_(unique_job()) {
    if (kind_.ends_with("sockets")) mesh_ = std::make_unique<SocketMesh>(world);
  }

  /// In the rank's process; blocks until all ranks have asked for theirs.
  [[nodiscard]] std::unique_ptr<CommBackend> group(int rank) {
    if (!mesh_)
      return make_backend(kind_, {.rank = rank, .size = world_, .job = job_, .hub = nullptr, .options = options_});
    std::unique_ptr<CommBackend> base = make_message_backend(mesh_->transport(rank), options_);
    if (kind_ == "sockets") return base;
    if (kind_ == "shm|sockets") {
      std::vector<NamedBackend> backends;
      backends.push_back(
          {"shm",
           make_backend("shm", {.rank = rank, .size = world_, .job = job_, .hub = nullptr, .options = options_})});
      backends.push_back({"sockets", std::move(base)});
      return make_mixed_backend(std::move(backends),
                                CallTable({{.kind = CollectiveKind::kAllReduce, .up_to_bytes = 1'000, .backend = "shm"},
                                           {.kind = CollectiveKind::kAllReduce, .backend = "sockets"}}));
    }
    const std::vector<int>& nodes = options_.nodes;
    const int node = nodes[static_cast<std::size_t>(rank)];
    const auto first = static_cast<int>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
    WorldSpec inside{.rank = rank - first,
                     .size = static_cast<int>(std::count(nodes.begin(), nodes.end(), node)),
                     .job = job_ + "/" + std::to_string(node),
                     .hub = nullptr,
                     .options = options_};
    inside.options.nodes.clear();
    return make_two_level_backend(std::move(base), make_backend("shm", inside), options_);
  }

  using Meanwhile = std::function<bool(const std::vector<pid_t>& pids, Milliseconds since)>;
  /// For ForkRanksOptions: the parent gives up its ends of what the ranks talk over, then goes on with
  /// `next`.
  [[nodiscard]] Meanwhile parted(Meanwhile next) {
    return [this, next = std::move(next)](const std::vector<pid_t>& pids, Milliseconds since) {
      if (mesh_) mesh_->close_all();
      return next && next(pids, since);
    };
  }

 private:
  std::string kind_;
  int world_;
  CommOptions options_;
  std::string job_;
  std::unique_ptr<SocketMesh> mesh_;
};

}  // namespace zeroth::test
