#include "zero/reduced_shards.h"

#include "base/planted.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace zeroth {

ReducedShards::ReducedShards(const ModelLayout& model, ModelMemory& memory, Kernels& kernels, Kernels& host,
                             Stream stream, MemoryLedger& ledger, std::span<const int> node_sizes,
                             const std::vector<int>& slot_units)
    : model_(model),
      memory_(memory),
      kernels_(kernels),
      host_(host),
      stream_(std::move(stream)),
      ledger_(ledger),
      slot_units_(slot_units),
      has_sums_(model.flats.size(), false),
      norms_(model.flats.size()) {
  for (std::size_t node = 0; node < node_sizes.size(); ++node) {
    node_of_.insert(node_of_.end(), static_cast<std::size_t>(node_sizes[node]), static_cast<int>(node));
  }
}

bool ReducedShards::has_slot(int flat) const {
  const auto unit = static_cast<std::size_t>(model_.flat(flat).unit);
  return slot_units_[static_cast<std::size_t>(memory_.bucket_table().unit_slot[unit])] == model_.flat(flat).unit;
}

std::byte* ReducedShards::sums(int flat) {
  // Gradients of others alone: on this rank another unit may be using the slot, now or later.
  if (memory_.sums_in_bucket(flat) && !has_slot(flat)) vacate(flat);
  const auto aside = aside_.find(flat);
  return aside != aside_.end() ? aside->second.data() : memory_.micro_step_sums(flat);
}

void ReducedShards::add(int flat, std::span<const Summand> sources) {
  sum(flat, sums(flat), memory_.micro_step_part(flat).size(), sources, has_sums(flat));
}

void ReducedShards::combine(int flat, std::span<const Summand> sources) {
  sum(flat, memory_.reduced(flat), model_.flat(flat).shard(memory_.rank()).size(), sources, false);
}

void ReducedShards::sum(int flat, std::byte* target, std::int64_t elements, std::span<const Summand> sources,
                        bool accumulate) {
  const FlatLayout& layout = model_.flat(flat);
  const DType accumulation = layout.accumulation();
  std::vector<DType> dtypes;
  std::vector<int> groups;  // of sources on one node
  int node = -1;
  for (const Summand& source : sources) {
    dtypes.push_back(source.dtype);
    if (std::exchange(node, node_of_[static_cast<std::size_t>(source.rank)]) != node) groups.push_back(0);
    ++groups.back();
  }
  std::vector<const void*> data;
  for (const Summand& source : sources) data.push_back(source.data);
  kernels_.sum({.dst = target,
                .dst_dtype = accumulation,
                .accumulate = accumulate,
                .sources = data.data(),
                .num_sources = static_cast<int>(data.size()),
                .src_dtypes = dtypes.data(),
                .groups = groups.data(),
                .num_groups = static_cast<int>(groups.size()),
                .n = elements},
               layout.grad_factor, norms_[static_cast<std::size_t>(flat)], stream_);
  has_sums_[static_cast<std::size_t>(flat)] = true;
  if (planted("pull_reduction_ulp") && memory_.rank() == 1 && layout.dtype == DType::kFloat32) {
    auto* first = reinterpret_cast<float*>(target);
    *first = std::nextafter(*first, 1e30F);
  }
}

void ReducedShards::arrived(int flat) {
  measure(flat, memory_.micro_step_sums(flat), memory_.micro_step_part(flat).size());
}

void ReducedShards::restored(int flat) {
  measure(flat, sums(flat), memory_.micro_step_part(flat).size());
}

void ReducedShards::combined(int flat) {
  measure(flat, memory_.reduced(flat), model_.flat(flat).shard(memory_.rank()).size());
}

void ReducedShards::measure(int flat, const std::byte* target, std::int64_t n) {
  const FlatLayout& layout = model_.flat(flat);
  Kernels& kernels = memory_.sums_leave_device() ? host_ : kernels_;
  kernels.measure(target, layout.accumulation(), n, layout.grad_factor, norms_[static_cast<std::size_t>(flat)],
                  stream_);
  has_sums_[static_cast<std::size_t>(flat)] = true;
}

void ReducedShards::land(int flat, const Landed& part) {
  const FlatLayout& layout = model_.flat(flat);
  const void* const values = part.values;
  PendingNorm norm;
  host_.sum({.dst = memory_.micro_step_sums(flat) + array_bytes(part.at, layout.accumulation()),
             .dst_dtype = layout.accumulation(),
             .accumulate = part.accumulates,
             .sources = &values,
             .num_sources = 1,
             .src_dtype = part.dtype,
             .n = part.elements},
            layout.grad_factor, norm, stream_);
  PendingNorm& of_flat = norms_[static_cast<std::size_t>(flat)];
  kernels::NormAccumulator whole = part.at == 0 ? kernels::NormAccumulator{} : of_flat.value();
  whole.merge(norm.value());
  of_flat.begin() = whole;
  has_sums_[static_cast<std::size_t>(flat)] = true;
}

void ReducedShards::vacate(int flat) {
  const FlatLayout& layout = model_.flat(flat);
  const std::size_t bytes = array_bytes(memory_.micro_step_part(flat).size(), layout.accumulation());
  if (!memory_.sums_in_bucket(flat) || bytes == 0 || aside_.contains(flat)) return;
  Aside aside(kernels_, ledger_, layout.unit, bytes);
  if (has_sums(flat)) kernels_.copy(aside.data(), memory_.micro_step_sums(flat), bytes, stream_);
  aside_.emplace(flat, std::move(aside));
}

std::vector<int> ReducedShards::vacated() const {
  std::vector<int> flats;
  for (const auto& [flat, aside] : aside_) flats.push_back(flat);
  return flats;
}

void ReducedShards::settle() {
  for (const auto& [flat, aside] : aside_) {
    if (has_sums(flat)) kernels_.copy(memory_.micro_step_sums(flat), aside.data(), aside.memory.bytes.size(), stream_);
  }
  forget_asides();
}

void ReducedShards::begin_step() {
  std::fill(has_sums_.begin(), has_sums_.end(), false);
  forget_asides();
}

void ReducedShards::forget_asides() {
  if (!aside_.empty()) kernels_.settle(stream_);  // what reads or writes them is done
  aside_.clear();
}

}  // namespace zeroth
