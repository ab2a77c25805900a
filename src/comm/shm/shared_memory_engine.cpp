#include "comm/shm/shared_memory_engine.h"

#include "comm/call_descriptor.h"

#include <kernels/copy/copy.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/platform.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr std::size_t kMinStagingBytes = std::size_t{64} << 10U;

}  // namespace

WaitContext SharedMemoryEngine::context_of(const CallDescriptor& call, std::vector<int> ranks) const {
  return {.what = text_of(call, tag_names_),
          .ranks = std::move(ranks),
          .unit = meaning_of(call, tag_names_),
          .progress = {}};
}

SharedMemoryEngine::SharedMemoryEngine(std::unique_ptr<SegmentExchange> exchange, std::string group, int rank,
                                       std::vector<int> world_ranks)
    : exchange_(std::move(exchange)),
      group_(std::move(group)),
      where_("comm." + std::string(exchange_->kind())),
      rank_(rank),
      size_(static_cast<int>(world_ranks.size())),
      world_ranks_(std::move(world_ranks)),
      isa_(kernels::best_isa()),
      owner_(::getpid()) {}

SharedMemoryEngine::~SharedMemoryEngine() = default;

std::size_t SharedMemoryEngine::segment_bytes(const CommOptions& options, bool world, int size) {
  const std::size_t links = align_up(static_cast<std::size_t>(size) * sizeof(PeerLink), kPageBytes);
  return (world ? kJobControlBytes : 0) + kGroupControlBytes + links + align_up(options.staging_bytes, kPageBytes);
}

std::size_t SharedMemoryEngine::reserved_bytes(const CommOptions& options, bool world, int size) {
  return segment_bytes(options, world, size) + static_cast<std::size_t>(size) * kRingBytes;
}

std::shared_ptr<SharedMemoryEngine> SharedMemoryEngine::make_world(std::unique_ptr<SegmentExchange> exchange, int rank,
                                                                   int size, const CommOptions& options) {
  check_nodes(options.nodes, size, "comm." + std::string(exchange->kind()));
  std::vector<int> world_ranks(static_cast<std::size_t>(size));
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  std::shared_ptr<SharedMemoryEngine> engine(
      new SharedMemoryEngine(std::move(exchange), "world", rank, std::move(world_ranks)));
  const Deadline deadline(options.meeting_timeout());
  engine->create_segment(options, true, [&] {
    ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "not all ranks handed over their memory",
             {.where = engine->where_, .who = fmt::format("rank {}/{}", rank, size)});
  });
  Peers::Setup setup{.rank = rank,
                     .controls = {},
                     .keep = {},
                     .liveness = nullptr,
                     .timeout = options.timeout,
                     .polling = polling_of(options.spin, size),
                     .watched = Watched(options)};
  for (const SharedSpan& segment : engine->segments_) {
    setup.controls.push_back(reinterpret_cast<JobControl*>(segment.bytes.data()));
    setup.keep.push_back(segment.keep);
  }
  setup.liveness = engine->exchange_->watch(setup.controls);
  engine->peers_ = std::make_shared<Peers>(std::move(setup));
  return engine;
}

void SharedMemoryEngine::create_segment(const CommOptions& options, bool world, FunctionRef<void()> check) {
  options_ = options;
  nodes_ = NodeMap(options.nodes, world_ranks_);
  ZR_CHECK(options.staging_bytes >= kMinStagingBytes, ErrorCode::kUsage, "too little staging memory",
           {.where = where_,
            .expected = std::to_string(kMinStagingBytes) + " bytes",
            .got = std::to_string(options.staging_bytes)});
  held_bytes_ = segment_bytes(options, world, size_);
  const std::size_t bytes = reserved_bytes(options, world, size_);
  arena_ = Arena::create(exchange_->capabilities().window_kind, bytes, "comm." + group_);
  if (options.ledger) hold_ = options.ledger->hold({-1, MemoryState::kControl}, held_bytes_);
  const std::size_t control_offset = world ? kJobControlBytes : 0;
  private_ = exchange_->private_memory();
  if (private_) {
    auto& control = *reinterpret_cast<GroupControl*>(arena_.data() + control_offset);
    control.probe_at = private_->probe_at();
    control.probe_value = private_->probe_value();
  }
  segments_ = exchange_->exchange(arena_, check);
  const std::size_t links_offset = control_offset + kGroupControlBytes;
  const std::size_t staging_offset =
      links_offset + align_up(static_cast<std::size_t>(size_) * sizeof(PeerLink), kPageBytes);
  const std::size_t rings_bytes = static_cast<std::size_t>(size_) * kRingBytes;
  std::size_t smallest = SIZE_MAX;
  for (std::size_t peer = 0; peer < segments_.size(); ++peer) {
    const std::span<std::byte> segment = segments_[peer].bytes;
    ZR_CHECK(segment.size() >= staging_offset + kMinStagingBytes + rings_bytes, ErrorCode::kMismatch,
             fmt::format("the control memory of rank {} is too small", peer),
             {.where = where_, .expected = std::to_string(bytes), .got = std::to_string(segment.size())});
    controls_.push_back(reinterpret_cast<GroupControl*>(segment.data() + control_offset));
    links_.push_back(reinterpret_cast<PeerLink*>(segment.data() + links_offset));
    staging_.push_back(segment.data() + staging_offset);
    rings_.push_back(segment.data() + segment.size() - rings_bytes);
    smallest = std::min(smallest, segment.size() - rings_bytes - staging_offset);
  }
  half_bytes_ = smallest / 2 / kCacheLineBytes * kCacheLineBytes;
  find_out_what_can_be_read();
  for (auto* messages : {&sent_, &put_, &received_, &taken_}) messages->resize(segments_.size());
}

void SharedMemoryEngine::find_out_what_can_be_read() {
  if (!private_) return;
  for (int peer = 0; peer < size_; ++peer) {
    const GroupControl& theirs = *controls_[static_cast<std::size_t>(peer)];
    std::uint64_t value = 0;
    if (peer == rank_) continue;
    if (private_->read(peer, std::as_writable_bytes(std::span(&value, 1)), theirs.probe_at) == 0 &&
        value == theirs.probe_value)
      continue;
    return;
  }
  own().reads_private.store(1);
}

void SharedMemoryEngine::run(std::span<const Collective> calls) {
  first_error_.guard([&] {
    for_each_run(
        calls, [&](std::span<const Collective> points) { run_points(points); },
        [&](const Collective& call) { run_posted(call); });
  });
}

void SharedMemoryEngine::run_posted(const Collective& collective) {
  Call call{.collective = collective,
            .descriptor = describe_call(collective, next_sequence_),
            .offsets = offsets_of(collective)};
  peers_->throw_if_aborted(view(), [&] { return context_of(call.descriptor, {}); });

  if (collective.kind == CollectiveKind::kAllToAll) {
    all_to_all(call);
  } else {
    post_and_move(call);
  }
  ZR_FAILPOINT_OF("shm.*.end", name_of(call.descriptor.kind));
  const CountedAs counted(collective);
  report({.group = group_,
          .kind = counted.kind,
          .calls = counted.calls,
          .bytes = call.received,
          .far_bytes = call.far,
          .control_bytes = static_cast<std::uint64_t>(size_ - 1) * sizeof(CallDescriptor)});
}

void SharedMemoryEngine::post_and_move(Call& call) {
  const Collective& collective = call.collective;
  const bool small = inline_bytes(call) <= static_cast<std::int64_t>(kInlineBytes);
  std::span<const std::byte> payload;
  if (small) {
    const std::int64_t elements = extent_of(collective, rank_).send;
    payload = {collective.send, static_cast<std::size_t>(elements) * size_of(collective.in_dtype)};
  } else {
    locate(call);
  }
  post(call.descriptor, {{.bytes = payload}});
  keep_own_part(call);
  await_posts(call.descriptor);
  if (small) {
    run_inline(call);
  } else if (is_direct(call)) {
    run_direct(call);
  } else {
    run_staged(call);
  }
}

void SharedMemoryEngine::post(const CallDescriptor& descriptor, std::initializer_list<PayloadPart> payload) {
  ZR_FAILPOINT_OF("shm.*.post", name_of(descriptor.kind));
  CallSlot& slot = own().slots[descriptor.sequence % 2];
  slot.descriptor = descriptor;
  for (const PayloadPart& part : payload) {
    if (!part.bytes.empty()) std::memcpy(slot.payload + part.offset, part.bytes.data(), part.bytes.size());
  }
  own().posted.store(descriptor.sequence + 1);
  ++next_sequence_;
  notify();
}

// Needs nobody, so it goes while the others come.
void SharedMemoryEngine::keep_own_part(const Call& call) const {
  const Collective& collective = call.collective;
  const auto own = static_cast<std::size_t>(rank_);
  const bool root = rank_ == collective.root;
  std::int64_t elements = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  switch (collective.kind) {
    case CollectiveKind::kGather:
      if (!root) return;
      [[fallthrough]];
    case CollectiveKind::kAllGather:
      elements = collective.counts[own];
      to = call.offsets[own];
      break;
    case CollectiveKind::kScatter:
      if (!root) return;
      elements = collective.counts[own];
      from = call.offsets[own];
      break;
    case CollectiveKind::kBroadcast:
      if (!root) return;
      elements = call.descriptor.elements;
      break;
    case CollectiveKind::kAllToAll:
      if (collective.counts[own] != collective.recv_counts[own])
        return;  // an error, which is found with those of the others
      elements = collective.counts[own];
      from = call.offsets[own];
      to = std::accumulate(collective.recv_counts.begin(), collective.recv_counts.begin() + rank_, std::int64_t{0});
      break;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kBarrier:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      return;
  }
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const std::byte* const source = collective.send + from * element;
  std::byte* const target = collective.recv + to * element;
  if (elements > 0 && target != source) kernels::copy_stream(target, source, elements * element, isa_);
}

void SharedMemoryEngine::await_posts(const CallDescriptor& descriptor) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const SharedWord& posted = controls_[static_cast<std::size_t>(peer)]->posted;
    wait_for(peer, descriptor, [&] { return posted.load() > descriptor.sequence; });
    const CallDescriptor& theirs = slot_of(peer, descriptor.sequence).descriptor;
    if (same_call(descriptor, theirs)) [[likely]]
      continue;
    const Error mismatch = mismatch_error({descriptor, rank_}, {theirs, peer}, size_,
                                          fmt::format("{} group={}", where_, group_), tag_names_);
    peers_->watched().throw_mismatch(mismatch, world_ranks_);
  }
  ZR_FAILPOINT_OF("shm.*.mid", name_of(descriptor.kind));
}

void SharedMemoryEngine::wait_for(int peer, const CallDescriptor& descriptor, FunctionRef<bool()> predicate) {
  peers_->wait(view(), predicate, [&] { return context_of(descriptor, {peer}); });
}

void SharedMemoryEngine::wait_all(const CallDescriptor& descriptor, FunctionRef<bool(const GroupControl&)> predicate) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const GroupControl& control = *controls_[static_cast<std::size_t>(peer)];
    wait_for(peer, descriptor, [&] { return predicate(control); });
  }
}

std::int64_t SharedMemoryEngine::inline_bytes(const Call& call) const {
  const Collective& collective = call.collective;
  if (collective.kind == CollectiveKind::kBarrier) return 0;
  const bool gathers = collective.kind == CollectiveKind::kAllGather || collective.kind == CollectiveKind::kGather;
  const std::int64_t elements =
      gathers ? *std::max_element(collective.counts.begin(), collective.counts.end()) : call.descriptor.elements;
  // The same on all ranks, also where they give different dtypes.
  const std::size_t element = collective.kind == CollectiveKind::kReduceScatter
                                  ? std::max(size_of(collective.in_dtype), size_of(collective.out_dtype))
                                  : size_of(collective.in_dtype);
  return elements * static_cast<std::int64_t>(element);
}

void SharedMemoryEngine::run_inline(Call& call) {
  const Collective& collective = call.collective;
  const auto in_size = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const std::uint64_t sequence = call.descriptor.sequence;
  switch (collective.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      return;
    case CollectiveKind::kScatter:
      return inline_parts(call, parts_of_scatter(call), 0);
    case CollectiveKind::kGather:
      if (rank_ != collective.root) return;
      [[fallthrough]];
    case CollectiveKind::kAllGather:
      for (int peer = 0; peer < size_; ++peer) {
        const auto index = static_cast<std::size_t>(peer);
        std::byte* to = collective.recv + call.offsets[index] * in_size;
        const auto bytes = static_cast<std::size_t>(collective.counts[index] * in_size);
        if (bytes == 0 || peer == rank_) continue;
        std::memcpy(to, slot_of(peer, sequence).payload, bytes);
        count(call, peer, collective.counts[index] * in_size);
      }
      return;
    case CollectiveKind::kBroadcast:
      if (rank_ != collective.root) {
        const auto bytes = static_cast<std::size_t>(call.descriptor.elements * in_size);
        if (bytes > 0) std::memcpy(collective.recv, slot_of(collective.root, sequence).payload, bytes);
        count(call, collective.root, static_cast<std::int64_t>(bytes));
      }
      return;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllReduce: {
      const bool all = collective.kind == CollectiveKind::kAllReduce;
      const auto index = static_cast<std::size_t>(rank_);
      const std::int64_t elements = all ? call.descriptor.elements : collective.counts[index];
      const std::int64_t first = all ? 0 : call.offsets[index];
      Summands sources;
      for (int peer = 0; peer < size_; ++peer) {
        const DType dtype = in_dtype_of(peer, call);
        const auto element = static_cast<std::int64_t>(size_of(dtype));
        sources.add(slot_of(peer, sequence).payload + first * element, dtype);
        count(call, peer, elements * element);
      }
      reduce(collective, collective.recv, sources, elements);
      return;
    }
  }
}

void SharedMemoryEngine::count(Call& call, int peer, std::int64_t bytes) const {
  if (peer == rank_) return;
  call.received += static_cast<std::uint64_t>(bytes);
  if (nodes_.is_far(rank_, peer)) call.far += static_cast<std::uint64_t>(bytes);
}

void SharedMemoryEngine::count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) noexcept {
  report({.group = group_,
          .kind = kind,
          .one_sided = true,
          .calls = 1,
          .bytes = bytes,
          .far_bytes = nodes_.is_far(rank_, peer) ? bytes : 0});
}

void SharedMemoryEngine::copy_in(std::byte* to, const std::byte* from, std::int64_t bytes, int peer, Call& call) const {
  if (bytes <= 0) return;
  kernels::copy_stream(to, from, bytes, isa_);
  count(call, peer, bytes);
}

void SharedMemoryEngine::reduce(const Collective& collective, std::byte* to, const Summands& sources,
                                std::int64_t elements) const {
  reduce_in_rank_order(collective, rank_, to, sources, elements, nodes_, isa_);
}

PeerWindow SharedMemoryEngine::attach(const Arena& arena, std::string_view name) {
  const ArenaKind kind = exchange_->capabilities().window_kind;
  const bool any =
      kind == ArenaKind::kPrivate && arena.kind() != ArenaKind::kDevice;  // whatever threads of one process share
  ZR_CHECK(arena.capacity() == 0 || arena.kind() == kind || any, ErrorCode::kUsage,
           arena.kind() == ArenaKind::kDevice ? "an arena of a device is no window of the host"
                                              : "processes can attach shared arenas only",
           {.where = where_ + ".attach", .who = fmt::format("rank {}/{}", rank_, size_), .which = std::string(name)});
  return first_error_.guard([&] {
    CallDescriptor descriptor;
    descriptor.sequence = next_sequence_;
    descriptor.kind = PostKind::kAttach;
    descriptor.counts_digest = digest64(name);
    const auto context = [&] {
      WaitContext waited = context_of(descriptor, {});
      waited.what = fmt::format("attach of \"{}\", call {}", name, descriptor.sequence);
      return waited;
    };
    peers_->throw_if_aborted(view(), context);
    post(descriptor);
    await_posts(descriptor);
    const Deadline deadline(options_.timeout);
    const std::vector<SharedSpan> spans = exchange_->exchange(arena, [&] { peers_->check(view(), deadline, context); });
    PeerWindow window;
    for (const SharedSpan& span : spans) {
      window.ranks.push_back(span.bytes);
      window.keep.push_back(span.keep);
    }
    ZR_FAILPOINT_OF("shm.*.end", name_of(descriptor.kind));
    windows_.push_back({window, {arena.data(), arena.capacity()}, arena.keep_alive()});
    return window;
  });
}

std::shared_ptr<SharedMemoryEngine> SharedMemoryEngine::split(int color, int key, std::string_view name) {
  return first_error_.guard([&]() -> std::shared_ptr<SharedMemoryEngine> {
    CallDescriptor descriptor;
    descriptor.sequence = next_sequence_;
    descriptor.kind = PostKind::kSplit;
    descriptor.counts_digest = digest64(name);
    descriptor.color = color;
    descriptor.key = key;
    const auto context = [&] { return context_of(descriptor, {}); };
    peers_->throw_if_aborted(view(), context);
    post(descriptor);
    await_posts(descriptor);
    if (color < 0) return nullptr;
    SubgroupSpec spec{.members = members_of(color, size_,
                                            [&](int peer) -> const CallDescriptor& {
                                              return slot_of(peer, descriptor.sequence).descriptor;
                                            }),
                      .rank = 0,
                      .token = fmt::format("{}.{}.{}", name, descriptor.sequence, color)};
    spec.rank = static_cast<int>(std::ranges::find(spec.members, rank_) - spec.members.begin());
    std::vector<int> world_ranks;
    for (const int member : spec.members) world_ranks.push_back(world_ranks_[static_cast<std::size_t>(member)]);
    const Deadline deadline(options_.timeout);
    // Only members matter: ranks of other colors may be done and gone before this part has met.
    const auto check = [&] { peers_->check(view(), deadline, [&] { return context_of(descriptor, spec.members); }); };
    std::shared_ptr<SharedMemoryEngine> part(new SharedMemoryEngine(
        exchange_->split(spec, check), group_ + "/" + std::string(name), spec.rank, std::move(world_ranks)));
    part->create_segment(options_, false, check);
    part->peers_ = peers_;
    part->observer_ = observer_;
    ZR_FAILPOINT_OF("shm.*.end", name_of(descriptor.kind));
    return part;
  });
}

void SharedMemoryEngine::wait_until(const std::function<bool()>& predicate, const WaitContext& context) {
  ZR_FAILPOINT("shm.wait_until");
  peers_->wait(view(), predicate, [&] { return context; });
}

void SharedMemoryEngine::check_peers(const WaitContext& context) {
  peers_->check(view(), Deadline(kWaitSlice), [&] { return context; });
}

void SharedMemoryEngine::depart() noexcept {
  // A forked child that drops its copy of the group has not left: it never was a rank, and has no mapping of
  // ours.
  if (::getpid() != owner_) return;
  ZR_FAILPOINT("shm.depart");
  own().departed.store(1);
  notify();
}

}  // namespace zeroth::detail
