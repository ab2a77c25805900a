// What groups have received from other ranks on this rank, so that a program can compare its traffic with a formula.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>

#include <cstdint>
#include <map>
#include <string>

namespace zeroth {

/// Calls and payload bytes of one group on this rank by kind of call (name_of()), for the kinds that were made. Empty
/// for a group that does not count: groups of World::mesh() and World::connect() do. A group of one rank receives
/// nothing. Never blocks.
[[nodiscard]] std::map<std::string, TrafficRow> received_by_kind(const Communicator& group);

/// Payload bytes of all kinds.
[[nodiscard]] std::uint64_t received_bytes(const Communicator& group);

/// Forgets what was counted in this group.
void reset_received(const Communicator& group);

}  // namespace zeroth
