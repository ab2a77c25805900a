#include <zeroth/base/error.h>
#include <zeroth/shard/placement.h>

#include <string>

namespace zeroth {

std::string_view name_of(Placement placement) noexcept {
  switch (placement) {
    case Placement::kReplicate:
      return "Replicate";
    case Placement::kPartial:
      return "Partial";
    case Placement::kFlat:
      return "Flat";
  }
  return "Replicate";
}

Transition transition(Placement from, Placement to) {
  if (from == to) return Transition::kNone;
  if (from == Placement::kFlat && to == Placement::kReplicate) return Transition::kAllGather;
  if (from == Placement::kPartial && to == Placement::kFlat) return Transition::kReduceScatter;
  if (from == Placement::kPartial && to == Placement::kReplicate) return Transition::kAllReduce;
  if (from == Placement::kReplicate && to == Placement::kFlat) return Transition::kLocalSlice;
  throw Error(ErrorCode::kUsage, "there is no transition between these placements",
              {.where = "shard.transition",
               .expected = "Flat, Partial or Replicate -> Flat or Replicate",
               .got = std::string(name_of(from)) + " -> " + std::string(name_of(to))});
}

}  // namespace zeroth
