#include <zeroth/shard/placement.h>

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

}  // namespace zeroth
