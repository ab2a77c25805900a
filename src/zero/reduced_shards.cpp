#include "zero/reduced_shards.h"

#include "base/planted.h"

#include <kernels/reduce/reduce.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

namespace zeroth {
namespace {

/// Elements that are summed and then measured at a time: they stay in the cache.
constexpr std::int64_t kPiece = 16 * kBlockElements;

template <class T>
void add_scaled(kernels::NormAccumulator& norm, const std::byte* data, std::int64_t n, double factor,
                kernels::Isa isa) {
  const auto scale = static_cast<T>(factor);
  const T* from = reinterpret_cast<const T*>(data);
  std::vector<T> scaled(from, from + n);
  for (T& value : scaled) value *= scale;
  norm.add(scaled.data(), DTypeOf<T>::value, n, isa);
}

/// Adds the squares of a piece of gradients, times the flat's factor: the norm is that of what the update sees.
void add_to_norm(kernels::NormAccumulator& norm, const std::byte* data, const FlatLayout& layout, std::int64_t n,
                 kernels::Isa isa) {
  if (layout.grad_factor == 1.0) {
    norm.add(data, layout.accumulation(), n, isa);
  } else if (layout.accumulation() == DType::kFloat64) {
    add_scaled<double>(norm, data, n, layout.grad_factor, isa);
  } else {
    add_scaled<float>(norm, data, n, layout.grad_factor, isa);
  }
}

}  // namespace

ReducedShards::ReducedShards(const ModelLayout& model, ModelMemory& memory, KernelContext kernels, MemoryLedger& ledger,
                             std::span<const int> node_sizes, const std::vector<int>& slot_units)
    : model_(model),
      memory_(memory),
      kernels_(kernels),
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
  return aside != aside_.end() ? aside->second.bytes.data() : memory_.micro_step_sums(flat);
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
  measure(flat, target, elements, [&](std::byte* sum, std::int64_t at, std::int64_t n) {
    std::vector<const void*> parts;
    for (const Summand& source : sources) {
      parts.push_back(static_cast<const std::byte*>(source.data) +
                      static_cast<std::size_t>(at) * size_of(source.dtype));
    }
    kernels::sum_sources({.dst = sum,
                          .dst_dtype = accumulation,
                          .accumulate = accumulate,
                          .sources = parts.data(),
                          .num_sources = static_cast<int>(parts.size()),
                          .src_dtypes = dtypes.data(),
                          .groups = groups.data(),
                          .num_groups = static_cast<int>(groups.size()),
                          .n = n},
                         kernels_.isa);
  });
  if (planted("pull_reduction_ulp") && memory_.rank() == 1 && layout.dtype == DType::kFloat32) {
    auto* first = reinterpret_cast<float*>(target);
    *first = std::nextafter(*first, 1e30F);
  }
}

void ReducedShards::arrived(int flat) {
  measure(flat, memory_.micro_step_sums(flat), memory_.micro_step_part(flat).size(),
          [](std::byte*, std::int64_t, std::int64_t) {});
}

void ReducedShards::combined(int flat) {
  measure(flat, memory_.reduced(flat), model_.flat(flat).shard(memory_.rank()).size(),
          [](std::byte*, std::int64_t, std::int64_t) {});
}

void ReducedShards::measure(int flat, std::byte* target, std::int64_t elements,
                            const std::function<void(std::byte*, std::int64_t, std::int64_t)>& form) {
  const FlatLayout& layout = model_.flat(flat);
  // [Note: Norm at the sum] Squares are added while a piece of the sum is still in the cache, so that the step phase
  // need not read it once more. A later event changes the sum: it begins anew. Pieces may be added in any order: the
  // norm is exact.
  kernels::NormAccumulator norm;
  std::mutex merging;
  kernels_.for_ranges(elements, [&](std::int64_t begin, std::int64_t end) {
    kernels::NormAccumulator part_norm;
    for (std::int64_t at = begin; at < end; at += kPiece) {
      const std::int64_t n = std::min(kPiece, end - at);
      std::byte* const sum = target + array_bytes(at, layout.accumulation());
      form(sum, at, n);
      add_to_norm(part_norm, sum, layout, n, kernels_.isa);
    }
    const std::lock_guard lock(merging);
    norm.merge(part_norm);
  });
  norms_[static_cast<std::size_t>(flat)] = norm;
  has_sums_[static_cast<std::size_t>(flat)] = true;
}

void ReducedShards::vacate(int flat) {
  const FlatLayout& layout = model_.flat(flat);
  const std::size_t bytes = array_bytes(memory_.micro_step_part(flat).size(), layout.accumulation());
  if (!memory_.sums_in_bucket(flat) || bytes == 0 || aside_.contains(flat)) return;
  Aside aside(ledger_, layout.unit, bytes);
  if (has_sums(flat)) std::memcpy(aside.bytes.data(), memory_.micro_step_sums(flat), bytes);
  aside_.emplace(flat, std::move(aside));
}

std::vector<int> ReducedShards::vacated() const {
  std::vector<int> flats;
  for (const auto& [flat, aside] : aside_) flats.push_back(flat);
  return flats;
}

void ReducedShards::settle() {
  for (const auto& [flat, aside] : aside_) {
    if (has_sums(flat)) std::memcpy(memory_.micro_step_sums(flat), aside.bytes.data(), aside.bytes.size());
  }
  aside_.clear();
}

void ReducedShards::begin_step() {
  std::fill(has_sums_.begin(), has_sums_.end(), false);
  aside_.clear();
}

}  // namespace zeroth
