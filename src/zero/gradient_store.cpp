#include <zeroth/zero/gradient_store.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>

#include <kernels/bucket/bucket.h>
#include <kernels/reduce/reduce.h>
#include <zeroth/base/planted.h>

#include "zero/layout_tag.h"
#include "zero/signals.h"

namespace zeroth {
namespace {

/// Elements that are summed and then measured at a time: they stay in the cache.
constexpr std::int64_t kPiece = 16 * kBlockElements;

template <class T>
void add_scaled(kernels::NormAccumulator& norm, const std::byte* data, std::int64_t n, double factor, kernels::Isa isa) {
  const auto scale = static_cast<T>(factor);
  const T* from = reinterpret_cast<const T*>(data);
  std::vector<T> scaled(from, from + n);
  for (T& value : scaled) value *= scale;
  norm.add(scaled.data(), DTypeOf<T>::value, n, isa);
}

/// Adds the squares of a piece of gradients, times the flat's factor: the norm is that of what the update sees.
void add_to_norm(kernels::NormAccumulator& norm, const std::byte* data, const FlatLayout& layout, std::int64_t n, kernels::Isa isa) {
  if (layout.grad_factor == 1.0) {
    norm.add(data, layout.accumulation(), n, isa);
  } else if (layout.accumulation() == DType::kFloat64) {
    add_scaled<double>(norm, data, n, layout.grad_factor, isa);
  } else {
    add_scaled<float>(norm, data, n, layout.grad_factor, isa);
  }
}

}  // namespace

GradientStore::GradientStore(const ModelLayout& model,
                             const ShardingPlan& plan,
                             int micro_steps,
                             ModelMemory& memory,
                             CommBackend& backend,
                             Stream reduce_stream,
                             KernelContext kernels,
                             MemoryLedger& ledger)
    : model_(model),
      plan_(plan),
      micro_steps_(micro_steps),
      memory_(memory),
      backend_(backend),
      reduce_stream_(std::move(reduce_stream)),
      kernels_(kernels),
      ledger_(ledger),
      flats_(model.flats.size()),
      ring_positions_(ring_positions(model)),
      slot_holder_(memory.bucket_table().slot_bytes.size(), -1),
      ring_open_(static_cast<std::size_t>(plan.ring_slots), -1),
      touched_(model.params.size(), false),
      has_sums_(model.flats.size(), false),
      norms_(model.flats.size()) {
  for (std::size_t flat = 0; flat < model.flats.size(); ++flat) {
    flats_[flat].filled.assign(model.flats[flat].segments.size(), false);
    if (model.flats[flat].trainable && model.flats[flat].length > 0) trainable_flats_.push_back(static_cast<int>(flat));
  }
}

bool GradientStore::publishes_now() const {
  return plan_.policy == ReductionPolicy::kPerMicroStep || micro_step_ == micro_steps_ - 1;
}

void GradientStore::add(int param, ConstTensorView grad) {
  const ParamPlace& place = model_.places[static_cast<std::size_t>(param)];
  const FlatLayout& layout = model_.flat(place.flat);
  const Segment& segment = model_.segment(param);
  touched_[static_cast<std::size_t>(param)] = true;
  if (segment.numel == 0) return;
  FlatState& flat = state(place.flat);
  if (!flat.open) open(place.flat);
  const DType accumulation = layout.accumulation();
  std::byte* target = memory_.bucket(place.flat) + static_cast<std::size_t>(segment.offset) * size_of(accumulation);
  const bool first = !flat.filled[static_cast<std::size_t>(place.segment)];
  flat.filled[static_cast<std::size_t>(place.segment)] = true;
  std::atomic<std::int64_t> non_finite{0};
  kernels_.for_ranges(segment.numel, [&](std::int64_t begin, std::int64_t end) {
    std::byte* dst = target + static_cast<std::size_t>(begin) * size_of(accumulation);
    const std::byte* src = grad.data + static_cast<std::size_t>(begin) * size_of(grad.dtype);
    non_finite += first ? kernels::bucket_store(dst, src, grad.dtype, end - begin, kernels_.isa)
                        : kernels::bucket_add(dst, src, grad.dtype, end - begin, kernels_.isa);
  });
  if (non_finite > 0 && offender_.param < 0) {
    offender_ = {param, micro_step_, static_cast<std::uint64_t>(non_finite.load())};
  }
}

void GradientStore::open(int flat) {
  const int unit = model_.flat(flat).unit;
  const auto unit_index = static_cast<std::size_t>(unit);
  const bool accumulates_locally = plan_.policy == ReductionPolicy::kPerStep && micro_steps_ > 1;
  if (ring_positions_[unit_index] >= 0 && !accumulates_locally) {
    // The same rule under every plan, also where each unit has a bucket of its own: the list of events must not differ.
    int& holder = ring_open_[static_cast<std::size_t>(ring_positions_[unit_index] % plan_.ring_slots)];
    if (holder >= 0 && holder != unit) close_unit(holder);
    holder = unit;
  }
  wait_for_slot(unit, static_cast<std::size_t>(memory_.bucket_table().unit_slot[unit_index]));
  state(flat).open = true;
}

bool GradientStore::consumed_by_all(int flat) const {
  const std::uint64_t code = flats_[static_cast<std::size_t>(flat)].last_code;
  for (int owner = 0; code != 0 && owner < model_.world; ++owner) {
    if (model_.flat(flat).shard(owner).size() > 0 && memory_.signals(owner).consumed(flat, memory_.rank()) < code) {
      return false;
    }
  }
  return true;
}

void GradientStore::wait_for_slot(int unit, std::size_t slot) {
  // A further event of the unit itself has to wait as well: its flats are closed one by one.
  const int holder = slot_holder_[slot];
  const auto is_free = [this](int of) {
    return of < 0 || std::ranges::all_of(model_.unit_flats[static_cast<std::size_t>(of)],
                                         [this](int flat) { return state(flat).open || consumed_by_all(flat); });
  };
  if (!is_free(holder)) {
    SignalWord& pressure = memory_.signals(memory_.rank()).pressure();
    announce(pressure, static_cast<std::uint64_t>(holder) + 1);
    wait("a bucket slot held by unit " + model_.units[static_cast<std::size_t>(holder)].name,
         [&] { return is_free(holder); });
    announce(pressure, 0);
  }
  slot_holder_[slot] = unit;
}

void GradientStore::close_unit(int unit) {
  if (!publishes_now()) return;
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    if (state(flat).open) publish(flat);
  }
  const int position = ring_positions_[static_cast<std::size_t>(unit)];
  if (position >= 0) {
    int& holder = ring_open_[static_cast<std::size_t>(position % plan_.ring_slots)];
    if (holder == unit) holder = -1;
  }
  progress_active();
}

void GradientStore::publish(int flat) {
  FlatState& own = state(flat);
  const FlatLayout& layout = model_.flat(flat);
  const std::size_t element = size_of(layout.accumulation());
  // Zeros for what was not touched and for padding: a shared slot may still hold another unit's gradients there.
  std::int64_t written_end = 0;
  const auto fill_until = [&](std::int64_t end) {
    if (end <= written_end) return;
    kernels::fill_zero(memory_.bucket(flat) + static_cast<std::size_t>(written_end) * element,
                       (end - written_end) * static_cast<std::int64_t>(element),
                       kernels_.isa);
  };
  for (std::size_t segment = 0; segment < own.filled.size(); ++segment) {
    if (!own.filled[segment]) continue;
    fill_until(layout.segments[segment].offset);
    written_end = layout.segments[segment].offset + layout.segments[segment].numel;
  }
  fill_until(layout.length);
  own.filled.assign(own.filled.size(), false);
  own.open = false;
  own.last_code = reduction_code(backward_, own.events++);
  reduce_stream_.enqueue(
      [this, flat, code = own.last_code] { announce(memory_.signals(memory_.rank()).published(flat), code); });
  if (owns(flat) && !own.active) {
    own.active = true;
    active_.push_back(flat);
  }
}

void GradientStore::close_backward() {
  if (publishes_now()) {
    for (const int flat : trainable_flats_) {
      if (state(flat).open) publish(flat);
    }
    std::ranges::fill(ring_open_, -1);
  }
  advance_backward(backward_ + 1);
  progress_all();
}

void GradientStore::advance_backward(std::uint64_t next) {
  backward_ = next;
  for (const int flat : trainable_flats_) state(flat).events = 0;
  reduce_stream_.enqueue([this, next] { announce(memory_.signals(memory_.rank()).closed(), next); });
}

GradientStore::Part GradientStore::part_of(int source, int flat, std::uint64_t backward, std::uint64_t event) const {
  const std::uint64_t code = reduction_code(backward, event);
  if (!spilled_.empty() && spilled_.contains({flat, code, source})) return Part::kPublished;
  const Signals& signals = memory_.signals(source);
  // Order matters: a rank publishes before it closes, so "closed" must be read first.
  const std::uint64_t closed = signals.closed().load();
  const std::uint64_t published = signals.published(flat).load();
  if (published == code) return Part::kPublished;
  // A later code means that this event was passed over: its bucket could not be reused while we had not taken it.
  if (published > code || closed > backward) return Part::kAbsent;
  return Part::kUnknown;
}

void GradientStore::progress(int flat) {
  FlatState& own = state(flat);
  while (true) {
    const std::uint64_t code = reduction_code(own.next_backward, own.next_event);
    bool any = false;
    for (int source = 0; source < model_.world; ++source) {
      const Part part = part_of(source, flat, own.next_backward, own.next_event);
      if (part == Part::kUnknown) return;  // in the end always this rank itself, whose current backward is open
      any = any || part == Part::kPublished;
    }
    if (any) {
      reduce_event(flat, code);
      ++own.next_event;
      continue;
    }
    // Nobody took part: everybody has closed this backward. Closed first, published second, as in part_of(): what is not
    // published by then belongs to a backward that was still open when `closed` was read.
    std::uint64_t closed = ~std::uint64_t{0};
    for (int source = 0; source < model_.world; ++source) {
      closed = std::min(closed, memory_.signals(source).closed().load());
    }
    bool later = false;
    for (int source = 0; source < model_.world; ++source) {
      later = later || memory_.signals(source).published(flat).load() > code;
    }
    own.next_backward = later ? own.next_backward + 1 : std::max(own.next_backward + 1, closed);
    own.next_event = 0;
  }
}

void GradientStore::reduce_event(int flat, std::uint64_t code) {
  const FlatLayout& layout = model_.flat(flat);
  const Range shard = layout.shard(memory_.rank());
  const std::size_t element = size_of(layout.accumulation());
  const std::size_t offset = static_cast<std::size_t>(shard.begin) * element;
  const std::size_t bytes = static_cast<std::size_t>(shard.size()) * element;
  std::vector<const void*> sources;
  std::vector<int> ranks;
  for (int source = 0; source < model_.world; ++source) {
    const auto spill = spilled_.find({flat, code, source});
    if (spill != spilled_.end()) {
      sources.push_back(spill->second.bytes.data());
    } else if (memory_.signals(source).published(flat).load() == code) {
      require_same_layout(model_, memory_, flat, source, "zero.reduce", "gradients", "bucket");
      sources.push_back(memory_.peer_bucket(flat, source) + offset);
      ranks.push_back(source);
    }
  }
  const bool accumulate = has_sums_[static_cast<std::size_t>(flat)];
  // [Note: Norm at the sum] Squares are added while a piece of the sum is still in the cache, so that the step phase need not read
  // it once more. A later event changes the sum: it begins anew. Pieces may be added in any order: the norm is exact.
  kernels::NormAccumulator norm;
  std::mutex merging;
  kernels_.for_ranges(shard.size(), [&](std::int64_t begin, std::int64_t end) {
    kernels::NormAccumulator part_norm;
    std::vector<const void*> parts(sources.size());
    for (std::int64_t at = begin; at < end; at += kPiece) {
      const std::int64_t n = std::min(kPiece, end - at);
      std::byte* const sum = memory_.reduced(flat) + static_cast<std::size_t>(at) * element;
      for (std::size_t part = 0; part < sources.size(); ++part) {
        parts[part] = static_cast<const std::byte*>(sources[part]) + static_cast<std::size_t>(at) * element;
      }
      kernels::sum_sources({.dst = sum,
                            .dst_dtype = layout.accumulation(),
                            .accumulate = accumulate,
                            .sources = parts.data(),
                            .num_sources = static_cast<int>(parts.size()),
                            .src_dtype = layout.accumulation(),
                            .n = n},
                           kernels_.isa);
      add_to_norm(part_norm, sum, layout, n, kernels_.isa);
    }
    const std::lock_guard lock(merging);
    norm.merge(part_norm);
  });
  norms_[static_cast<std::size_t>(flat)] = norm;
  if (planted("pull_reduction_ulp") && memory_.rank() == 1 && layout.dtype == DType::kFloat32) {
    auto* first = reinterpret_cast<float*>(memory_.reduced(flat));
    *first = std::nextafter(*first, 1e30F);
  }
  has_sums_[static_cast<std::size_t>(flat)] = true;
  const Signals& own = memory_.signals(memory_.rank());
  for (const int source : ranks) {
    own.consumed(flat, source).store(code);
    if (source != memory_.rank()) backend_.count_one_sided(CollectiveKind::kReduceScatter, bytes);
  }
  for (int source = 0; source < model_.world; ++source) spilled_.erase({flat, code, source});
  own.news().fetch_add(1);
  backend_.ring();
}

void GradientStore::progress_all() {
  // Also what others published and this rank did not: they may be waiting for the slot.
  for (const int flat : trainable_flats_) {
    if (owns(flat)) progress(flat);
  }
}

void GradientStore::progress_active() {
  std::erase_if(active_, [this](int flat) {
    progress(flat);
    FlatState& own = state(flat);
    // Done with everything that this rank has published so far?
    const bool pending = reduction_code(own.next_backward, own.next_event) <= own.last_code;
    if (!pending) own.active = false;
    return !pending;
  });
}

std::vector<int> GradientStore::stuck_ranks() const {
  // [Note: Stuck] A rank is stuck if it waits for a slot whose bucket some owner cannot take, because another stuck rank has not
  // said yet whether it takes part in that event; or if it has come to a matched call and another stuck rank has not. The largest
  // such set: start with all that wait, drop whoever will get on.
  // Ranks that go through the model in one order are never stuck, however slow one of them is.
  const auto calls_of = [this](int rank) { return memory_.signals(rank).meeting().load() >> 8U; };
  std::uint64_t fewest_calls = calls_of(0);
  for (int rank = 1; rank < model_.world; ++rank) fewest_calls = std::min(fewest_calls, calls_of(rank));
  std::vector<int> stuck;
  for (int rank = 0; rank < model_.world; ++rank) {
    const std::uint64_t pressed = memory_.signals(rank).pressure().load();
    if ((pressed != 0 && pressed <= model_.units.size()) || calls_of(rank) > fewest_calls) stuck.push_back(rank);
  }
  const auto waits_for = [&](int rank, int other) {
    if (calls_of(rank) > calls_of(other)) return true;
    const std::uint64_t pressed = memory_.signals(rank).pressure().load();
    if (other == rank || pressed == 0 || pressed > model_.units.size()) return false;
    return std::ranges::any_of(model_.unit_flats[pressed - 1], [&](int flat) {
      const std::uint64_t code = memory_.signals(rank).published(flat).load();
      if (code == 0 || !model_.flat(flat).trainable) return false;
      const std::uint64_t closed = memory_.signals(other).closed().load();
      return memory_.signals(other).published(flat).load() < code && closed <= backward_of(code);
    });
  };
  for (bool shrinking = true; shrinking;) {
    const std::vector<int> before = stuck;
    shrinking = std::erase_if(stuck, [&](int rank) {
                  return std::ranges::none_of(before, [&](int other) { return waits_for(rank, other); });
                }) > 0;
  }
  return stuck;
}

void GradientStore::serve_pressure() {
  const Signals& own = memory_.signals(memory_.rank());
  for (const int source : stuck_ranks()) {
    const std::uint64_t pressed = memory_.signals(source).pressure().load();
    if (pressed == 0 || pressed > model_.units.size()) continue;
    for (const int flat : model_.unit_flats[pressed - 1]) {
      const std::uint64_t code = memory_.signals(source).published(flat).load();
      if (!model_.flat(flat).trainable || !owns(flat) || code == 0 || own.consumed(flat, source).load() >= code) continue;
      spill(flat, source, code);
    }
  }
}

void GradientStore::spill(int flat, int source, std::uint64_t code) {
  require_same_layout(model_, memory_, flat, source, "zero.reduce", "gradients", "bucket");
  const FlatLayout& layout = model_.flat(flat);
  const Range shard = layout.shard(memory_.rank());
  const std::size_t element = size_of(layout.accumulation());
  const std::size_t bytes = static_cast<std::size_t>(shard.size()) * element;
  Spill copy{std::vector<std::byte>(bytes), ledger_.hold({layout.unit, MemoryState::kOverflow}, bytes)};
  std::memcpy(copy.bytes.data(), memory_.peer_bucket(flat, source) + static_cast<std::size_t>(shard.begin) * element, bytes);
  spilled_.emplace(std::tuple{flat, code, source}, std::move(copy));
  ++spills_;
  if (source != memory_.rank()) backend_.count_one_sided(CollectiveKind::kReduceScatter, bytes);
  announce(memory_.signals(memory_.rank()).consumed(flat, source), code);
}

void GradientStore::announce(SignalWord& word, std::uint64_t value) {
  word.store(value);
  memory_.signals(memory_.rank()).news().fetch_add(1);  // second, so that who sees it sees the word
  backend_.ring();
}

std::uint64_t GradientStore::news() const {
  std::uint64_t sum = 0;
  for (int rank = 0; rank < model_.world; ++rank) sum += memory_.signals(rank).news().load();
  return sum;
}

void GradientStore::wait(const std::string& what, const std::function<bool()>& done) {
  reduce_stream_.synchronize();  // peers may be waiting for what this rank has not yet published
  std::optional<std::uint64_t> seen;
  backend_.wait_until(
      [&] {
        // Read before the words: what changes after this look is news at the next one.
        const std::uint64_t now = news();
        if (now == seen) return false;
        seen = now;
        progress_all();
        if (done()) return true;
        serve_pressure();
        return done();
      },
      {.what = what});
}

void GradientStore::meet(Meeting what) {
  if (model_.world == 1) return;
  static constexpr const char* kNames[] = {"step()", "average()", "barrier()", "a forward that shares buffers", "an export"};
  const auto name = [](std::uint64_t word) {
    const std::uint64_t kind = word & 0xffU;
    return kind < std::size(kNames) ? kNames[kind] : "an unknown call";
  };
  const std::uint64_t own = (++meetings_ << 8U) | static_cast<std::uint64_t>(what);
  announce(memory_.signals(memory_.rank()).meeting(), own);
  wait(std::string(name(own)) + " of all ranks", [&] {
    for (int rank = 0; rank < model_.world; ++rank) {
      const std::uint64_t theirs = memory_.signals(rank).meeting().load();
      if (theirs >> 8U < meetings_) return false;
      ZR_CHECK(theirs >> 8U > meetings_ || theirs == own || planted("tag_compare"),
               ErrorCode::kMismatch,
               "ranks come to different calls of the engine",
               {.where = "zero.meet",
                .who = "rank " + std::to_string(memory_.rank()) + "/" + std::to_string(model_.world),
                .which = "matched call " + std::to_string(meetings_),
                .expected = std::string(name(own)) + " on rank " + std::to_string(memory_.rank()),
                .got = std::string(name(theirs)) + " on rank " + std::to_string(rank),
                .hint = "all ranks must make the same calls in the same order"});
    }
    return true;
  });
}

void GradientStore::complete() {
  const std::uint64_t next_step = (backward_ / kBackwardsPerStep + 1) * kBackwardsPerStep;
  ZR_CHECK(backward_ + 1 < next_step, ErrorCode::kUsage, "more than a million backwards in one step", {.where = "zero.reduce"});
  advance_backward(next_step);  // first: it tells the others what this rank has no gradients for
  meet(Meeting::kStep);
  wait("the gradients of this step", [this, next_step] {
    return std::ranges::all_of(trainable_flats_, [this, next_step](int flat) {
      return !owns(flat) || state(flat).next_backward >= next_step;
    });
  });
}

void GradientStore::begin_step() {
  std::fill(touched_.begin(), touched_.end(), false);
  std::fill(has_sums_.begin(), has_sums_.end(), false);
  offender_ = {};
  micro_step_ = 0;
}

}  // namespace zeroth
