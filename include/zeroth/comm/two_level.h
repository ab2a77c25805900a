// Groups on several nodes: what crosses from node to node does so once.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>

#include <memory>

namespace zeroth {

/// A group of the ranks of `base`, of which `node` joins those of this rank's node (CommBackend::node_sizes() of
/// `base`) over a faster transport. Matched over `base`, blocks. With O nodes of L ranks each, consecutive in `base`, a
/// rank receives from other nodes:
///
///   all_gather      its own part's like, one from each: S (O-1)/(O L); the rest comes from its node
///   reduce_scatter  sums of whole nodes, in the type of the sum: S (O-1)/(O L), where a flat one receives S (O-1)/O
///   all_reduce      both; below 8 KiB a sum from each other node
///   broadcast       S on one rank of each node but the root's
///
/// and in all S (n-1)/n, as ever (a sum of bf16 is fp32, twice as wide). The bits are those of `base`: sums are formed
/// along its nodes in any case. The other calls go over `base`. A group inside one node is `node`, its windows
/// included; with nodes of different sizes, of one rank each, or whose ranks are not consecutive, everything goes over
/// `base` (CommBackend::kind() says which). A call that fails on one rank stops the job for the others (kAborted), as
/// far as `base` can tell them. Of different calls, which ranks of one node alone may see, the control plane tells
/// them, if there is one (options.watch): kMismatch with both sides. Memory: (O + L) pieces of options.staging_bytes,
/// once a sum needs them.
[[nodiscard]] std::unique_ptr<CommBackend> make_two_level_backend(std::unique_ptr<CommBackend> base,
                                                                  std::unique_ptr<CommBackend> node,
                                                                  const CommOptions& options);

/// The ranks of `transport`: on one node (options.nodes, or else the hosts: what can share memory) as
/// make_message_backend(), on several in two levels with shared memory inside each. Matched, blocks until all ranks
/// have come. Throws kMismatch where ranks disagree about the nodes, kConfig where a node would be on two hosts, and
/// what backend "shm" throws.
[[nodiscard]] std::unique_ptr<CommBackend> make_backend_over_hosts(const std::shared_ptr<MessageTransport>& transport,
                                                                   const CommOptions& options);

}  // namespace zeroth
