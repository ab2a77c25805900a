// UpdateSettings: when the update of a step runs, and by which norm it clips. docs/offload.md has the table.
#pragma once

#include <cstdint>
#include <optional>

namespace zeroth {

enum class ClipBy : std::uint8_t {
  kExact,         ///< the norm of the step that is clipped, known after its backward
  kPreviousNorm,  ///< the norm of the last committed step, known before; the first step is clipped by its own
};

struct UpdateSettings {
  /// A unit's update begins inside the last backward of a step, as soon as its sums are final on all ranks, and not
  /// after the vote. The same bits. A step that the vote would have skipped ends the training instead, if some unit was
  /// updated before. Needs a factor that is known before the vote: no clipping or ClipBy::kPreviousNorm, no loss scale
  /// that adapts.
  bool inside_backward = false;
  ClipBy clip_by = ClipBy::kExact;  ///< part of the numbers
  /// After so many steps, the update of each step runs while the next one does (DPU): its last backward updates a
  /// unit when it needs its parameters no more. Part of the numbers. Unset: never.
  /// Ref: Ren et al., "ZeRO-Offload", ATC 2021, section 5.2.
  std::optional<std::int64_t> delayed_after{};
  /// See ShardingPlan::rounds_sums.
  bool rounds_sums = false;
  bool operator==(const UpdateSettings&) const = default;
};

}  // namespace zeroth
