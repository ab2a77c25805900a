// Two levels from what there is: shared memory inside a host, messages between hosts.
#pragma once

#include <zeroth/comm/factory.h>
#include <zeroth/comm/messages.h>

#include <memory>
#include <string>
#include <vector>

namespace zeroth::detail {

/// What decides whether processes can share memory: the kernel's boot, and the network and pid namespaces (see `shm`).
[[nodiscard]] std::string host_identity();

/// Node of each rank: `wanted`, or else one for each host, numbered as they come. Throws kConfig where a wanted node
/// spans two hosts.
[[nodiscard]] std::vector<int> nodes_of_hosts(const std::vector<std::string>& hosts, const std::vector<int>& wanted);

/// Node of each rank of a transport that has one level: options.nodes, or else the hosts, as two levels would have
/// them, so that both have the same bits. `host`: of this rank. Blocks until all ranks have come. Throws kMismatch
/// where they disagree about options.nodes.
[[nodiscard]] std::vector<int> nodes_of_ranks(const std::shared_ptr<MessageTransport>& transport,
                                              const CommOptions& options, const std::string& host);

/// Blocks until all ranks have come. spec.options.nodes divides hosts further. Throws kMismatch where ranks disagree
/// about that; a rank that fails tells the others.
[[nodiscard]] std::unique_ptr<CommBackend> make_levels_of_hosts(const std::shared_ptr<MessageTransport>& transport,
                                                                const WorldSpec& spec);

}  // namespace zeroth::detail
