// How ranks come at each other's states: it follows from where these lie and what the transport can do, here only.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/device/memory.h>

namespace zeroth {

struct ExchangeChoice {
  bool one_sided = false;                  ///< every rank reads the memory of all others
  bool one_sided_on_nodes = false;         ///< ranks of one node read each other's, in a group of theirs
  ArenaKind window = ArenaKind::kPrivate;  ///< kind of the memory that others read
  /// Buckets may hold 16-bit gradients. Where the transport cannot sum these in fp32, or add a sum to another, our
  /// kernels widen each gradient into its bucket, and add what comes.
  bool narrow_buckets = true;
};

/// `memory`: Kernels::memory(). Other ranks read memory of the host only. `codes`: numbers travel in codes
/// (WireCodes), which nobody can read in the memory of their rank.
[[nodiscard]] ExchangeChoice choose_exchange(const Capabilities& transport, ArenaKind memory, bool codes = false);

}  // namespace zeroth
