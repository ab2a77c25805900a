#include "zero/row_group.h"

namespace zeroth {

RowGroup::RowGroup(const ModelLayout& model, CommBackend& world, int from, int to, std::string_view name)
    : row_(row_of(world.rank(), from, to)), from_(from), to_(to) {
  if (!moves() || world.capabilities().one_sided) return;
  group_ = &world;
  if (row_.count == world.size()) return;
  own_ = world.split(row_.first, world.rank(), name);
  own_->set_tag_names(tag_names(model));
  group_ = own_.get();
}

Work RowGroup::gather(
    CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* part, std::byte* whole, const Stream& stream) {
  Collective call{.kind = CollectiveKind::kAllGather,
                  .in_dtype = dtype,
                  .out_dtype = dtype,
                  .send = part,
                  .recv = whole,
                  .tag = {.unit = flat.unit, .label = static_cast<std::uint32_t>(purpose)}};
  for (int index = 0; index < row_.count; ++index) call.counts.push_back(flat.part(row_.rank(index), from_).size());
  return group_->submit({&call, 1}, stream);
}

}  // namespace zeroth
