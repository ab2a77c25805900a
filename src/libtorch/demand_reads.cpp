#include "libtorch/demand_reads.h"

#include "libtorch/slots.h"
#include "libtorch/unit_backwards.h"

#include <algorithm>
#include <utility>

namespace zeroth::libtorch {

void DemandReads::open(const UnitUse& forward, std::uint64_t thread) {
  forwards_.push_back({.use = &forward, .thread = thread});
}

DemandReads::Reads DemandReads::take(const UnitUse& forward) {
  const auto found = std::ranges::find(forwards_, &forward, &Forward::use);
  if (found == forwards_.end()) return {};
  Reads reads = std::move(found->reads);
  forwards_.erase(found);
  return reads;
}

void DemandReads::finish_last(Reads& reads) {
  const std::unique_ptr<UnitScope> scope = std::move(reads.back().scope);
  reads.pop_back();
  scope->finish({});
}

void DemandReads::close(const UnitUse& forward) {
  Reads reads = take(forward);
  while (!reads.empty()) finish_last(reads);  // those that are left after an error go with the vector
}

void DemandReads::drop(const UnitUse& forward) noexcept {
  Reads reads = take(forward);
  while (!reads.empty()) reads.pop_back();  // the last one first
}

bool DemandReads::is_held(int unit) const {
  return std::ranges::any_of(forwards_, [unit](const Forward& forward) {
    return forward.use->invocation.unit == unit ||
           std::ranges::find(forward.reads, unit, &Read::unit) != forward.reads.end();
  });
}

bool DemandReads::read(const std::vector<int>& units, const Storages& used, std::uint64_t thread,
                       const std::function<std::unique_ptr<UnitScope>(int unit)>& gather) {
  if (forwards_.empty() || forwards_.back().thread != thread) return false;
  const std::size_t forward = forwards_.size() - 1;
  const auto is_wanted = [&units](const Read& read) { return std::ranges::find(units, read.unit) != units.end(); };
  Reads& reads = forwards_[forward].reads;
  while (!reads.empty() && !is_wanted(reads.back()) && !slots_.has_aliases(reads.back().unit) &&
         !slots_.has_any(reads.back().unit, used)) {
    finish_last(reads);
  }
  const auto take = [&](int unit) {
    std::unique_ptr<UnitScope> scope = gather(unit);
    forwards_[forward].reads.push_back({.unit = unit, .scope = std::move(scope)});
  };
  // What an ended forward keeps for its backward would make room for these, and this forward may have views of it.
  for (const int unit : slots_.bound_units()) {
    if (!is_held(unit)) take(unit);
  }
  for (const int unit : units) {
    if (!slots_.is_bound(unit)) take(unit);
  }
  return true;
}

}  // namespace zeroth::libtorch
