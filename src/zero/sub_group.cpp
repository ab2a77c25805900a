#include "zero/sub_group.h"

#include <algorithm>
#include <string>
#include <utility>

namespace zeroth {

SubGroupCalls::SubGroupCalls(const ModelLayout& model, CommBackend& world, int from, int to, std::string_view name)
    : sub_group_(sub_group_of(world.rank(), from, to)), from_(from), to_(to) {
  if (!moves()) return;
  group_ = &world;
  if (sub_group_.count == world.size()) return;
  own_ = world.split(sub_group_.first, world.rank(), name);
  own_->set_tag_names(tag_names(model, /*gathers=*/true));
  group_ = own_.get();
}

Work SubGroupCalls::gather(CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* part,
                           std::byte* whole, const Stream& stream) {
  Collective call{.kind = CollectiveKind::kAllGather,
                  .in_dtype = dtype,
                  .out_dtype = dtype,
                  .send = part,
                  .recv = whole,
                  .tag = {.unit = flat.unit, .label = static_cast<std::uint32_t>(purpose)}};
  for (int index = 0; index < sub_group_.count; ++index)
    call.counts.push_back(flat.part(sub_group_.rank(index), from_).size());
  return group_->submit({&call, 1}, stream);
}

SubGroupPath::SubGroupPath(const ModelLayout& model, CommBackend& world, const ModelMemory& memory, int from, int to,
                           std::string_view name)
    : sub_group_(sub_group_of(world.rank(), from, to)),
      from_(from),
      to_(to),
      rank_(world.rank()),
      one_sided_(memory.are_local(from) && memory.filed_parameters() == nullptr) {
  if (one_sided_) return;
  const std::vector<int> path = memory.degrees().path(from, to);
  for (std::size_t step = 1; step < path.size(); ++step) {
    // The last one is what there is without degrees between.
    const std::string group =
        step + 1 == path.size() ? std::string(name) : std::string(name) + " over " + std::to_string(path[step]);
    steps_.push_back(std::make_unique<SubGroupCalls>(model, world, path[step - 1], path[step], group));
  }
}

std::size_t SubGroupPath::transport_bytes() const {
  std::size_t bytes = 0;
  for (const auto& step : steps_) bytes += step->transport_bytes();
  return bytes;
}

std::vector<Work> SubGroupPath::gather(CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* part,
                                       std::byte* whole, const Stream& stream) {
  std::vector<Work> works;
  const std::int64_t begin = flat.part(rank_, to_).begin;
  for (const auto& step : steps_) {
    const Range joined = flat.part(rank_, step->to());
    std::byte* const place = whole + array_bytes(joined.begin - begin, dtype);
    if (joined.size() > 0) works.push_back(step->gather(purpose, flat, dtype, part, place, stream));
    part = place;
  }
  return works;
}

Collective SubGroupCalls::reduction(CallPurpose purpose, const FlatLayout& flat, DType dtype, const std::byte* whole,
                                    std::byte* part) const {
  Collective call{.kind = CollectiveKind::kReduceScatter,
                  .in_dtype = dtype,
                  .out_dtype = flat.accumulation(),
                  .send = whole,
                  .recv = part,
                  .tag = {.unit = flat.unit, .label = static_cast<std::uint32_t>(purpose)}};
  const std::int64_t begin = flat.part(sub_group_.rank(0), to_).begin;
  for (int index = 0; index < sub_group_.count; ++index) {
    const Range own = flat.part(sub_group_.rank(index), from_);
    call.counts.push_back(own.size());
    call.offsets.push_back(own.begin - begin);
  }
  if (std::ranges::is_sorted(call.offsets)) call.offsets.clear();  // in the order of the ranks
  return call;
}

}  // namespace zeroth
