// Times of collectives on the backends that the ranks of this job have, side by side.
#pragma once

#include "bench/tuning.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/mixed.h>
#include <zeroth/engine/world.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zeroth::bench {

struct MeasureOptions {
  std::vector<std::string> backends{};  ///< names of make_backend()
  std::vector<CollectiveKind> kinds{};
  std::vector<std::uint64_t> sizes{};  ///< table_bytes()
  DType dtype = DType::kFloat32;
  int rounds = 7;               ///< each begins with another backend
  Milliseconds round_time{20};  ///< as many calls as fit, one at least
  Milliseconds timeout{60'000};
};

/// This rank's objects of the group, one a backend. Collective, blocks.
[[nodiscard]] std::vector<NamedBackend> connect(const World& world, const MeasureOptions& options);

/// Collective: the same on all ranks. `progress` is called after each call and size.
[[nodiscard]] std::vector<Timing> measure(const std::vector<NamedBackend>& backends, const MeasureOptions& options,
                                          const std::function<void(const Timing&)>& progress);

}  // namespace zeroth::bench
