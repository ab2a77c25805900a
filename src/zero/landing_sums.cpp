#include "zero/landing_sums.h"

#include <algorithm>
#include <utility>

namespace zeroth {

LandingSums::LandingSums(const ModelLayout& model, ModelMemory& memory, ReducedShards& shards, Stream stream)
    : model_(model),
      memory_(memory),
      shards_(shards),
      stream_(std::move(stream)),
      most_(static_cast<std::size_t>(std::max(memory.bus_slots() - 1, 1))),
      under_way_(model.flats.size(), 0) {}

void LandingSums::start(int flat, const std::byte* from, DType dtype) {
  const std::int64_t elements = memory_.micro_step_part(flat).size();
  if (elements == 0) return;
  DeviceBus& bus = *memory_.bus();
  bus.down().order_after(stream_.record());
  const bool accumulates = shards_.has_sums(flat) || !has_landed(flat);
  for (std::int64_t at = 0; at < elements; at += memory_.bus_elements()) {
    if (crossings_.size() == most_) land_first();
    const std::int64_t n = std::min(memory_.bus_elements(), elements - at);
    Crossing crossing{.slot = bus.take(),
                      .flat = flat,
                      .part = {.at = at, .elements = n, .dtype = dtype, .accumulates = accumulates}};
    crossing.slot.fetch(0, from + array_bytes(at, dtype), array_bytes(n, dtype));
    crossings_.push_back(std::move(crossing));
    ++under_way_[static_cast<std::size_t>(flat)];
  }
}

void LandingSums::await_copies() {
  if (!crossings_.empty()) stream_.order_after(memory_.bus()->down().record());
}

void LandingSums::land_first() {
  Crossing crossing = std::move(crossings_.front());
  crossings_.pop_front();
  --under_way_[static_cast<std::size_t>(crossing.flat)];
  crossing.slot.wait();
  crossing.part.values = crossing.slot.bytes().data();
  shards_.land(crossing.flat, crossing.part);
}

void LandingSums::progress() {
  while (!crossings_.empty() && crossings_.front().slot.ready()) land_first();
}

void LandingSums::finish() {
  while (!crossings_.empty()) land_first();
}

void LandingSums::begin_step() {
  crossings_.clear();
  std::ranges::fill(under_way_, 0);
}

}  // namespace zeroth
