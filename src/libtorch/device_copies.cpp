#include "libtorch/device_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// Every unit has a place of its own, unless the plan gathers parameters into a ring.
SlotTable places(const ModelLayout& layout, const ShardingPlan& plan) {
  if (plan.gathers_parameters()) return gathered_slots(layout, plan);
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : layout.flats) bytes.push_back(flat.bytes());
  return make_slot_table(layout, bytes, /*shared_ring=*/false, plan.ring_slots);
}

at::Tensor bytes_on(c10::Device device, std::int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

/// Modes of the caller's that would see our calls: of torch.func, of Python, of autograd.
const c10::DispatchKeySet kModes =
    c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                         c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::FuncTorchVmapMode,
                         c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
    c10::autograd_dispatch_keyset_with_ADInplaceOrView;

/// The sum of all words, each times an odd number of its place, modulo 2^64, on their device: it differs if one word
/// does, and else but for one chance in 2^40 or less.
at::Tensor digest_of(const at::Tensor& bytes) {
  constexpr std::int64_t kChunk = std::int64_t{1} << 20U;
  constexpr std::int64_t kMix = -7046029254386353131;  // 2^64 over the golden ratio, odd
  const c10::impl::ExcludeDispatchKeyGuard as_plain_tensors(kModes);
  const at::Tensor words = bytes.view(at::kLong);
  const at::TensorOptions options = words.options();
  at::Tensor digest = at::zeros({}, options);
  const at::Tensor factors = at::arange(std::min(kChunk, words.numel()), options).mul_(2).add_(1).mul_(kMix);
  for (std::int64_t begin = 0; begin < words.numel(); begin += kChunk) {
    const std::int64_t n = std::min(kChunk, words.numel() - begin);
    digest.mul_(kMix).add_(words.narrow(0, begin, n).mul(factors.narrow(0, 0, n)).sum());
  }
  return digest;
}

}  // namespace

DeviceCopies::DeviceCopies(c10::Device device, const ModelLayout& layout, const ShardingPlan& plan)
    : device_(device),
      layout_(layout),
      table_(places(layout, plan)),
      slot_user_(table_.slot_bytes.size(), -1),
      bound_flats_(table_.slot_bytes.size(), 0),
      overflow_(layout.flats.size()),
      digests_(layout.flats.size()),
      differs_(layout.flats.size()) {
  std::int64_t offset = 0;
  for (const std::size_t bytes : table_.slot_bytes) {
    slot_offset_.push_back(offset);
    offset += static_cast<std::int64_t>(bytes);
  }
  arena_ = bytes_on(device, offset);
}

int DeviceCopies::slot_of(int flat) const {
  return table_.unit_slot[static_cast<std::size_t>(layout_.flat(flat).unit)];
}

at::Tensor DeviceCopies::place_of(int flat) const {
  const auto index = static_cast<std::size_t>(flat);
  if (overflow_[index].defined()) return overflow_[index];
  const std::int64_t begin =
      slot_offset_[static_cast<std::size_t>(slot_of(flat))] + static_cast<std::int64_t>(table_.flat_offset[index]);
  return arena_.narrow(0, begin, static_cast<std::int64_t>(layout_.flat(flat).bytes()));
}

at::DataPtr DeviceCopies::fetch(int flat, const std::byte* host) {
  const FlatLayout& layout = layout_.flat(flat);
  if (layout.bytes() == 0) return {nullptr, device_};
  const auto slot = static_cast<std::size_t>(slot_of(flat));
  if (slot_user_[slot] >= 0 && slot_user_[slot] != layout.unit) {
    overflow_[static_cast<std::size_t>(flat)] = bytes_on(device_, static_cast<std::int64_t>(layout.bytes()));
    overflow_bytes_ += layout.bytes();
    overflow_peak_ = std::max(overflow_peak_, overflow_bytes_);
  } else {
    slot_user_[slot] = layout.unit;
    ++bound_flats_[slot];
  }
  refresh(flat, host);
  const at::Tensor place = place_of(flat);
  void* const data = place.mutable_data_ptr();
  // The address keeps its memory: what a graph has saved may outlive this object.
  return {data, new at::Tensor(place), [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device_};
}

void DeviceCopies::refresh(int flat, const std::byte* host) {
  const auto bytes = static_cast<std::int64_t>(layout_.flat(flat).bytes());
  if (bytes == 0) return;
  const at::Tensor place = place_of(flat);
  if (device_.is_cpu()) {
    std::memcpy(place.mutable_data_ptr(), host, static_cast<std::size_t>(bytes));
  } else {
    place.copy_(at::from_blob(const_cast<std::byte*>(host), {bytes}, at::TensorOptions().dtype(at::kByte)));
  }
  digests_[static_cast<std::size_t>(flat)] = digest_of(place);
}

std::vector<int> DeviceCopies::written(const std::vector<int>& flats) const {
  const c10::impl::ExcludeDispatchKeyGuard as_plain_tensors(kModes);
  std::vector<int> found;
  std::vector<at::Tensor> differ;
  for (const int flat : flats) {
    const at::Tensor& digest = digests_[static_cast<std::size_t>(flat)];
    if (!digest.defined()) continue;  // without elements
    found.push_back(flat);
    differ.push_back(digest_of(place_of(flat)).ne(digest));
  }
  if (differ.empty()) return {};
  const at::Tensor all = at::stack(differ).to(at::kCPU);
  std::size_t kept = 0;
  for (std::size_t index = 0; index < found.size(); ++index) {
    if (all.const_data_ptr<bool>()[index]) found[kept++] = found[index];
  }
  found.resize(kept);
  return found;
}

void DeviceCopies::take(int flat, std::byte* host) {
  const at::Tensor place = place_of(flat);
  at::from_blob(host, {place.numel()}, at::TensorOptions().dtype(at::kByte)).copy_(place);
  digests_[static_cast<std::size_t>(flat)] = digest_of(place);
}

std::vector<int> DeviceCopies::take_lost() {
  std::vector<int> lost;
  for (std::size_t flat = 0; flat < differs_.size(); ++flat) {
    if (differs_[flat].defined() && differs_[flat].item<bool>()) lost.push_back(static_cast<int>(flat));
    differs_[flat].reset();
  }
  return lost;
}

void DeviceCopies::release(int flat) noexcept {
  const auto index = static_cast<std::size_t>(flat);
  const FlatLayout& layout = layout_.flat(flat);
  if (layout.bytes() == 0) return;
  try {
    const c10::impl::ExcludeDispatchKeyGuard as_plain_tensors(kModes);
    const at::Tensor differs = digest_of(place_of(flat)).ne(digests_[index]);
    differs_[index] = differs_[index].defined() ? differs_[index].logical_or(differs) : differs;
  } catch (...) {  // NOLINT(bugprone-empty-catch): the device fails, and whatever uses it next says so
  }
  if (overflow_[index].defined()) {
    overflow_bytes_ -= layout.bytes();
    overflow_[index].reset();
    return;
  }
  const auto slot = static_cast<std::size_t>(slot_of(flat));
  if (slot_user_[slot] == layout.unit && --bound_flats_[slot] == 0) slot_user_[slot] = -1;
}

}  // namespace zeroth::libtorch
