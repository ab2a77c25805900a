// Groups on several nodes: each byte crosses between nodes once.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>

#include <memory>

namespace zeroth {

/// A group of the ranks of `base`. `node` is the group of this rank's node (CommBackend::node_sizes() of
/// `base`) over a faster transport. Owns both. Collective over `base`, blocks. With O nodes of L ranks each,
/// consecutive in `base`, a rank receives from other nodes, of S bytes:
///
///   all_gather      the part of its counterpart on each other node: S (O-1)/(O L); the rest comes from its own node
///   reduce_scatter  sums of whole nodes, in the dtype of the sum: S (O-1)/(O L); without levels it is S (O-1)/O
///   all_reduce      both; below 8 KiB one sum from each other node
///   broadcast       S on one rank of each node but the root's
///
/// and in total S (n-1)/n, as without levels (a sum of bf16 is fp32, twice as wide). The bits are those of `base`,
/// which also forms sums along the nodes. Other calls go over `base`. A group inside one node is `node`, with its
/// windows. If nodes have different sizes, one rank each, or ranks that are not consecutive, all calls go over `base`;
/// CommBackend::kind() shows this.
/// A call that fails on one rank stops the job for the others (kAborted), if `base` can tell them. If only the ranks of
/// one node see a mismatch, the control plane tells the others, if there is one (options.activity): kMismatch with both
/// sides. Memory: (O + L) pieces of options.staging_bytes, from the first sum that needs them.
[[nodiscard]] std::unique_ptr<CommBackend> make_two_level_backend(std::unique_ptr<CommBackend> base,
                                                                  std::unique_ptr<CommBackend> node,
                                                                  const CommOptions& options);

/// A group of the ranks of `transport`, which it shares. Nodes are those of options.nodes, else the hosts. On one node
/// it is make_message_backend(); on several nodes it has two levels with shared memory inside each node. Collective,
/// blocks until all ranks have come. Throws kMismatch if ranks disagree about the nodes, kConfig if a node would be on
/// two hosts, and the errors of backend "shm".
[[nodiscard]] std::unique_ptr<CommBackend> make_backend_over_hosts(const std::shared_ptr<MessageTransport>& transport,
                                                                   const CommOptions& options);

}  // namespace zeroth
