// DemandReads: units whose parameters the forward of another unit reads.
#pragma once

#include "libtorch/guards.h"

#include <zeroth/libtorch/unit.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

class ParameterSlots;
struct UnitUse;

/// [Note: Reads on demand] A forward may read parameters of other units, as a penalty on all weights does that the
/// model computes itself. Where parameters are gathered, an operator finds a guard. If a forward of a unit runs on this
/// thread, the other unit is gathered for the rest of that forward, as by engine.gathered(): nodes that are made
/// meanwhile gather it again in backward. The unit is given back before the next one is read, if nothing has a view of
/// its parameters, so a sum over all units needs the memory of one of them. Else it stays until the forward ends, in
/// memory beyond the plan if need be, which the memory report counts.
class DemandReads {
 public:
  /// `slots` outlives this.
  explicit DemandReads(const ParameterSlots& slots) : slots_(slots) {}

  /// A forward of a unit begins on this thread.
  void open(const UnitUse& forward, std::uint64_t thread);
  /// It ends: what it has read is given back. Throws what UnitScope::finish() does.
  void close(const UnitUse& forward);
  /// It has failed.
  void drop(const UnitUse& forward) noexcept;
  /// Makes the units readable until the next read of others, at least. False if no forward runs on the thread.
  /// `used`: memory that must stay. `gather` makes the scope of a unit.
  [[nodiscard]] bool read(const std::vector<int>& units, const Storages& used, std::uint64_t thread,
                          const std::function<std::unique_ptr<UnitScope>(int unit)>& gather);

 private:
  /// A forward that runs is of the unit, or has read it.
  [[nodiscard]] bool is_held(int unit) const;
  struct Read {
    int unit = 0;
    std::unique_ptr<UnitScope> scope;
  };
  using Reads = std::vector<Read>;
  struct Forward {
    const UnitUse* use = nullptr;
    std::uint64_t thread = 0;
    Reads reads{};
  };
  /// What the forward has read; from now on it does not run any more.
  [[nodiscard]] Reads take(const UnitUse& forward);
  /// Gives the last one back.
  static void finish_last(Reads& reads);

  const ParameterSlots& slots_;
  std::vector<Forward> forwards_;  ///< that run, the innermost last
};

}  // namespace zeroth::libtorch
