#include "libtorch/parallel/sum_slots.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/collective.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <functional>
#include <span>
#include <string>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// So many slots before one is used again: a rank may be a sum ahead of the others.
constexpr std::ptrdiff_t kLeastSlots = 2;

std::uint64_t shape_hash(const at::Tensor& part) {
  std::uint64_t hash = 1469598103934665603U;
  const auto add = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211U; };
  add(static_cast<std::uint64_t>(part.scalar_type()));
  for (const std::int64_t size : part.sizes()) add(static_cast<std::uint64_t>(size) + 1);
  return hash;
}

std::uint64_t read(std::uint64_t& word) {
  return std::atomic_ref(word).load();
}
void store(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value);
}

WaitContext awaited(const CallName& name, std::function<std::vector<int>()> missing) {
  WaitContext context;
  context.what = "a part of " + name.text();
  context.missing = std::move(missing);
  return context;
}

/// Ranks of which a word of the header is below `least`.
std::vector<int> below(const SumSlot& slot, std::uint64_t SumSlot::Header::* word, std::uint64_t least) {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < slot.window.ranks.size(); ++rank) {
    if (read(slot.header(rank).*word) < least) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void await(const SumSlot& slot, std::uint64_t SumSlot::Header::* word, std::uint64_t least, const CallName& name,
           const RankGroup& group, const at::Tensor& x) {
  const auto missing = [&slot, word, least] { return below(slot, word, least); };
  with_name_of(group, name, x, [&] {
    group.communicator().backend().wait_until([&] { return missing().empty(); }, awaited(name, missing));
  });
}

}  // namespace

SumSlot::Header& SumSlot::header(std::size_t rank) const {
  return *reinterpret_cast<Header*>(window.ranks[rank].data());
}

std::byte* SumSlot::part(std::size_t rank) const {
  return window.ranks[rank].data() + kHeaderBytes;
}

bool SumSlots::serves(const RankGroup& group, const at::Tensor& part) {
  const CommBackend& backend = group.communicator().backend();
  return part.is_cpu() && group.size() > 1 && backend.capabilities().one_sided && backend.node_sizes().size() == 1 &&
         backend.capabilities().window_kind != ArenaKind::kDevice;
}

void SumSlots::reclaim(const RankGroup& group) {
  if (slots_.empty()) return;
  std::vector<std::int32_t> given_up;
  for (const std::shared_ptr<SumSlot>& slot : slots_) given_up.push_back(slot->in_use && slot.use_count() == 1 ? 1 : 0);
  group.communicator().all_reduce(std::span(given_up), ReduceOp::kMin);
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (given_up[index] == 0) continue;
    slots_[index]->in_use = false;
    store(slots_[index]->header(static_cast<std::size_t>(group.rank())).taken, slots_[index]->sums);
  }
  group.communicator().backend().notify();
}

std::shared_ptr<SumSlot> SumSlots::free_slot(std::size_t bytes, const RankGroup& group) {
  const auto fits = [bytes](const std::shared_ptr<SumSlot>& slot) { return slot->capacity >= bytes; };
  const auto longest_free = [&] {
    std::shared_ptr<SumSlot> found;
    for (const std::shared_ptr<SumSlot>& slot : slots_) {
      if (fits(slot) && !slot->in_use && (!found || slot->last < found->last)) found = slot;
    }
    return found;
  };
  if (std::ranges::count_if(slots_, fits) >= kLeastSlots) {
    std::shared_ptr<SumSlot> found = longest_free();
    if (!found) {
      reclaim(group);
      found = longest_free();
    }
    if (found) return found;
  }
  auto slot = std::make_shared<SumSlot>();
  slot->capacity = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
  CommBackend& backend = group.communicator().backend();
  const std::string name = c10::str("libtorch.sum", slots_.size(), ".", slot->capacity);
  slot->arena = Arena::create(backend.capabilities().window_kind, SumSlot::kHeaderBytes + slot->capacity, name);
  slot->window = backend.attach(slot->arena, name);  // ranks compare the name, and so the capacity
  slots_.push_back(slot);
  return slot;
}

std::shared_ptr<SumSlot> SumSlots::give(const at::Tensor& part, const CallName& name, const RankGroup& group) {
  const std::shared_ptr<SumSlot> slot = free_slot(part.nbytes(), group);
  await(*slot, &SumSlot::Header::taken, slot->sums, name, group, part);
  const auto own = static_cast<std::size_t>(group.rank());
  {
    const at::NoGradGuard no_gradient;
    if (part.numel() > 0) at::from_blob(slot->part(own), part.sizes(), part.options()).copy_(part);
  }
  slot->header(own).shape = shape_hash(part);
  slot->in_use = true;
  slot->last = ++starts_;
  store(slot->header(own).given, ++slot->sums);
  group.communicator().backend().notify();
  return slot;
}

at::Tensor SumSlots::take(SumSlot& slot, const at::Tensor& like, const CallName& name, const RankGroup& group) const {
  await(slot, &SumSlot::Header::given, slot.sums, name, group, like);
  const at::NoGradGuard no_gradient;
  const auto own = static_cast<std::size_t>(group.rank());
  const bool is_narrow = like.scalar_type() == at::kBFloat16 || like.scalar_type() == at::kHalf;
  at::Tensor sum = at::empty(like.sizes(), like.options().dtype(is_narrow ? at::kFloat : like.scalar_type()));
  for (std::size_t rank = 0; rank < slot.window.ranks.size(); ++rank) {
    ZR_CHECK(slot.header(rank).shape == slot.header(own).shape, ErrorCode::kMismatch,
             "ranks add tensors of other shapes or dtypes",
             {.where = "libtorch.collectives",
              .who = group.who(),
              .which = c10::str(name.text(), ", with rank ", rank),
              .expected = c10::str(name_of(*dtype_of(like.scalar_type())), " ", like.sizes(), " on every rank"),
              .got = "another one"});
    if (like.numel() == 0) continue;
    const at::Tensor part = at::from_blob(slot.part(rank), like.sizes(), like.options());
    if (rank == 0) {
      sum.copy_(part);
    } else {
      sum.add_(part);  // 16-bit parts are widened
    }
    if (rank != own)
      group.communicator().backend().count_one_sided(CollectiveKind::kAllReduce, static_cast<int>(rank), like.nbytes());
  }
  slot.in_use = false;
  store(slot.header(own).taken, slot.sums);
  group.communicator().backend().notify();
  return sum.to(like.scalar_type());
}

}  // namespace zeroth::libtorch
