// The group of ranks that are threads, over each of the transports that threads have.
#pragma once

#include "support/message_hub.h"

#include <zeroth/comm/factory.h>
#include <zeroth/comm/mixed.h>
#include <zeroth/comm/two_level.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

/// What the threads of a world talk over.
enum class ThreadTransport {
  kMemory,        ///< inproc
  kMessages,      ///< matched calls over messages
  kLevels,        ///< inproc inside a node, messages between nodes
  kMixed,         ///< inproc and messages, by the kind and size of a call
  kSilentLevels,  ///< kLevels over messages that carry no word of a rank that stops, as those of gloo
};

/// Every kind of call on one of two backends, memory and messages, and most of them on the other one at some size.
[[nodiscard]] inline CallTable table_of_both(const std::string& in_memory, const std::string& in_messages) {
  std::vector<CallTable::Row> rows;
  const auto add = [&](CollectiveKind kind, std::vector<std::uint64_t> bounds, bool memory) {
    bounds.push_back(CallTable::kNoBound);
    for (const std::uint64_t bound : bounds) {
      rows.push_back({.kind = kind, .up_to_bytes = bound, .backend = memory ? in_memory : in_messages});
      memory = !memory;
    }
  };
  add(CollectiveKind::kAllReduce, {64, 4'096}, false);
  add(CollectiveKind::kAllGather, {256}, true);
  add(CollectiveKind::kReduceScatter, {128, 1'024, 65'536}, true);
  add(CollectiveKind::kBroadcast, {64}, false);
  add(CollectiveKind::kGather, {100}, false);
  add(CollectiveKind::kAllToAll, {}, false);
  add(CollectiveKind::kSend, {}, true);
  add(CollectiveKind::kBarrier, {}, false);
  return CallTable(std::move(rows));
}

/// Node of each rank, `per_node` on each; none for 0.
[[nodiscard]] inline std::vector<int> nodes_of_ranks(int size, int per_node) {
  std::vector<int> nodes;
  for (int rank = 0; per_node > 0 && rank < size; ++rank) nodes.push_back(rank / per_node);
  return nodes;
}

class ThreadGroups {
 public:
  ThreadGroups(int world, ThreadTransport transport, std::vector<int> nodes = {})
      : world_(world),
        transport_(transport),
        nodes_(std::move(nodes)),
        memory_(make_inproc_hub(world)),
        messages_(std::make_shared<MessageHub>(world, transport == ThreadTransport::kLevels)) {
    for (int rank = 0; rank < static_cast<int>(nodes_.size()); ++rank) {
      if (node_of(rank) == static_cast<int>(node_memory_.size()))
        node_memory_.push_back(make_inproc_hub(ranks_on(node_of(rank))));
    }
  }

  /// Blocks until all ranks have asked for theirs.
  [[nodiscard]] std::unique_ptr<CommBackend> group(int rank, CommOptions options) const {
    options.nodes = nodes_;
    if (transport_ == ThreadTransport::kMemory) return in_memory(rank, world_, memory_, options);
    std::unique_ptr<CommBackend> base = make_message_backend(messages_->transport(rank), options);
    if (transport_ == ThreadTransport::kMessages) return base;
    if (transport_ == ThreadTransport::kMixed) {
      std::vector<NamedBackend> both;
      both.push_back({"inproc", in_memory(rank, world_, memory_, options)});
      both.push_back({"messages", std::move(base)});
      return make_mixed_backend(std::move(both), table_of_both("inproc", "messages"));
    }
    CommOptions inside = options;
    inside.nodes.clear();
    const int node = node_of(rank);
    const auto first = static_cast<int>(std::find(nodes_.begin(), nodes_.end(), node) - nodes_.begin());
    for (int other = first; other < first + ranks_on(node); ++other) inside.watched_ranks.push_back(other);
    return make_two_level_backend(
        std::move(base), in_memory(rank - first, ranks_on(node), node_memory_[static_cast<std::size_t>(node)], inside),
        options);
  }

 private:
  [[nodiscard]] int node_of(int rank) const { return nodes_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] int ranks_on(int node) const {
    return static_cast<int>(std::count(nodes_.begin(), nodes_.end(), node));
  }
  [[nodiscard]] static std::unique_ptr<CommBackend> in_memory(int rank, int size, std::shared_ptr<InprocHub> hub,
                                                              const CommOptions& options) {
    return make_backend("inproc", {.rank = rank, .size = size, .job = {}, .hub = std::move(hub), .options = options});
  }

  int world_;
  ThreadTransport transport_;
  std::vector<int> nodes_;
  std::shared_ptr<InprocHub> memory_;
  std::shared_ptr<MessageHub> messages_;
  std::vector<std::shared_ptr<InprocHub>> node_memory_;
};

}  // namespace zeroth::test
