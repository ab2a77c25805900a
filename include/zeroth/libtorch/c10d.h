// Makes a world of Zeroth from an existing torch.distributed group: several hosts, any launcher.
#pragma once

#include <zeroth/comm/messages.h>
#include <zeroth/engine/world.h>

#include <memory>
#include <string>

namespace zeroth::libtorch {

/// A transport over the process group that torch has registered under `group_name` (ProcessGroup.group_name in Python).
/// The group must stay initialised while an engine uses it. Other code may use its send and recv with tags below 2^30.
/// Buffers are CPU memory: the group needs a backend for CPU tensors, such as gloo. Throws kUsage for a name that is
/// not registered.
///
/// If torch's timeout of the group (30 minutes by default) is shorter than zeroth.timeout_ms, it ends waits first.
/// `beside`: backend of the user's group if this group was made beside it; used in messages and logs.
[[nodiscard]] std::shared_ptr<MessageTransport> make_c10d_transport(const std::string& group_name,
                                                                    const std::string& beside = "");

[[nodiscard]] World world_from_c10d(const std::string& group_name, const std::string& beside = "");

}  // namespace zeroth::libtorch
