// An existing torch.distributed group as a world of Zeroth: several hosts, whatever started the ranks.
#pragma once

#include <zeroth/comm/messages.h>
#include <zeroth/engine/world.h>

#include <memory>
#include <string>

namespace zeroth::libtorch {

/// Sends and receives through the process group that torch has registered under `group_name` (ProcessGroup.group_name
/// in Python). The group must stay initialised as long as an engine uses it; its own send and recv may be used beside
/// it with tags below 2^30. Buffers are CPU memory: the group needs a backend for CPU tensors, such as gloo. Throws
/// kUsage for a name that is not registered.
///
/// Torch's own timeout of the group (30 minutes by default) ends waits, too, if zeroth.timeout_ms is longer.
/// `beside`: the backend of the user's own group, if this one was made beside it; for messages and logs.
[[nodiscard]] std::shared_ptr<MessageTransport> make_c10d_transport(const std::string& group_name,
                                                                    const std::string& beside = "");

[[nodiscard]] World world_from_c10d(const std::string& group_name, const std::string& beside = "");

}  // namespace zeroth::libtorch
