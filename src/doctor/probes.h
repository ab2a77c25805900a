// Measuring one link: the shortest round trip, and bytes a second in both directions. Both ends call their half at
// about the same time.
#pragma once

#include "doctor/wire.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/communicator.h>

#include <string>
#include <vector>

namespace zeroth::doctor {

struct LinkFigures {
  double latency_us = 0;
  double there_bytes_per_s = 0;  ///< from the caller of the measuring half
  double back_bytes_per_s = 0;
};

/// Plain TCP, with a connection for each direction: what the network gives one stream. Takes 0.6 s, 2 s on a slow link,
/// on a bad one until the deadline. Throws Error: what Wire does.
[[nodiscard]] LinkFigures measure_tcp(const std::vector<Endpoint>& peer, const std::string& secret, int own_rank,
                                      const Deadline& deadline);
/// The other half. Refuses ranks but `rank`.
void serve_tcp(Door& door, int rank, const Deadline& deadline);

/// Send and recv over a group: what ranks in training have of this transport. Sizes grow until a message takes 10 ms.
/// The deadline is that of the group. `slow_bytes_per_s`: what arrives on this side takes at least as long as over such
/// a link; 0: as it is.
[[nodiscard]] LinkFigures measure_messages(const Communicator& group, int peer, double slow_bytes_per_s);
/// The other half.
void serve_messages(const Communicator& group, int peer, double slow_bytes_per_s);

}  // namespace zeroth::doctor
