#include "engine/initial_values.h"

#include <kernels/cast/cast.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth {

InitialValues::InitialValues(const ModelLayout& model, ModelMemory& memory, Device& device, Kernels& kernels,
                             Stream stream, const Communicator& communicator)
    : model_(model),
      memory_(memory),
      device_(device),
      kernels_(kernels),
      stream_(std::move(stream)),
      communicator_(communicator) {
  for (const FlatLayout& layout : model_.flats) staging_bytes_ = std::max(staging_bytes_, layout.bytes());
}

int InitialValues::bring(const std::function<ConstTensorView(int)>& values, const std::function<void(int)>& release) {
  int differing = -1;
  // One for all: pages are touched once, not once a flat.
  const Arena staging = device_.make_arena(ArenaKind::kPrivate, staging_bytes_, "construction");
  const MemoryHold staging_hold = device_.ledger().hold({-1, MemoryState::kOther}, staging_bytes_);
  for (std::size_t unit = 0; unit < model_.units.size(); ++unit) {
    for (const int flat : model_.unit_flats[unit]) {
      const FlatLayout& layout = model_.flat(flat);
      if (layout.length == 0) continue;
      const std::span<std::byte> whole(staging.data(), layout.bytes());
      const std::size_t element = size_of(layout.dtype);
      std::int64_t written = 0;
      const auto fill_until = [&](std::int64_t end) {  // padding, over what the flat before left there
        std::memset(whole.data() + static_cast<std::size_t>(written) * element, 0,
                    static_cast<std::size_t>(end - written) * element);
      };
      for (const Segment& segment : layout.segments) {
        if (segment.numel == 0) continue;  // it may have no address
        const ConstTensorView value = values(segment.param);
        fill_until(segment.offset);
        kernels_.copy(whole.data() + static_cast<std::size_t>(segment.offset) * element, value.data, value.bytes(),
                      stream_);
        written = segment.offset + segment.numel;
      }
      fill_until(layout.length);
      const std::string_view text(reinterpret_cast<const char*>(whole.data()), whole.size());
      const std::uint64_t before = digest64(text);
      communicator_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(whole.data()), whole.size()), 0,
                              {.unit = layout.unit});
      if (digest64(text) != before && differing < 0) differing = static_cast<int>(unit);
      store(flat, whole.data());
    }
    release(static_cast<int>(unit));
  }
  return differing;
}

void InitialValues::store(int flat, const std::byte* values) {
  const FlatLayout& layout = model_.flat(flat);
  const std::size_t element = size_of(layout.dtype);
  const Range rest = memory_.rest_range(flat, memory_.rank());
  const std::span<const std::byte> own(values + static_cast<std::size_t>(rest.begin) * element,
                                       static_cast<std::size_t>(rest.size()) * element);
  const StateBytes& parameters = memory_.parameters_at_rest(flat);
  if (parameters.in_memory() == nullptr) {
    parameters.write(own);
  } else {
    kernels_.copy(parameters.in_memory(), own.data(), own.size(), stream_);
  }
  if (master_of(layout.dtype) != Master::kWhole || !layout.trainable) return;
  const Range updated = memory_.update_range(flat);
  std::vector<float> masters(static_cast<std::size_t>(updated.size()));
  kernels::cast_range(masters.data(), DType::kFloat32, values + static_cast<std::size_t>(updated.begin) * element,
                      layout.dtype, updated.size(), kernels::best_isa());
  const StateBytes kept = memory_.masters(flat);
  if (kept.in_memory() == nullptr) return kept.write(std::as_bytes(std::span(masters)));
  kernels_.copy(kept.in_memory(), masters.data(), masters.size() * sizeof(float), stream_);
}

}  // namespace zeroth
