#include "comm/call_descriptor.h"
#include "comm/first_error.h"
#include "comm/matched_calls.h"
#include "comm/started_points.h"

#include <kernels/common/dispatch.h>
#include <kernels/copy/copy.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/comm/two_level.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

/// The type in which parts of a sum travel.
DType type_of_partial(const Collective& call) {
  return call.op == ReduceOp::kSum && size_of(call.in_dtype) == 2 ? DType::kFloat32 : call.in_dtype;
}

/// Both levels of one group. Run by one thread at a time.
class TwoLevels {
 public:
  /// `across`: the ranks with this one's place in their nodes, in the order of the nodes.
  TwoLevels(std::unique_ptr<CommBackend> base, std::unique_ptr<CommBackend> node, std::unique_ptr<CommBackend> across,
            const CommOptions& options)
      : base_(std::move(base)),
        node_(std::move(node)),
        across_(std::move(across)),
        options_(options),
        kind_(std::string(node_->kind()) + "+" + std::string(base_->kind())),
        stream_(make_nested_stream("two levels")),
        isa_(kernels::best_isa()) {}

  [[nodiscard]] CommBackend& base() const { return *base_; }
  [[nodiscard]] CommBackend& node() const { return *node_; }
  [[nodiscard]] const CommOptions& options() const { return options_; }
  [[nodiscard]] std::string_view kind() const { return kind_; }
  [[nodiscard]] std::string where() const { return "comm." + kind_; }
  [[nodiscard]] std::size_t memory_bytes() const {
    return base_->memory_bytes() + node_->memory_bytes() + across_->memory_bytes() + sums_.size() + packed_.size();
  }

  void set_observer(const std::shared_ptr<TrafficObserver>& observer) {
    observer_ = observer;
    for_each_group([&](CommBackend& group) { group.set_observer(observer); });
  }

  template <class Call>
  void for_each_group(const Call& call) {
    for (CommBackend* group : {base_.get(), node_.get(), across_.get()}) call(*group);
  }

  void run(std::span<const Collective> calls) {
    guarded([&] {
      for_each_run(
          calls, [&](std::span<const Collective> points) { run_points(points); },
          [&](const Collective& call) {
            run_one(call);
            if (observer_) observer_->observe({.group = base_->group_name(), .kind = call.kind, .calls = 1});
          });
    });
  }

  /// Over `base`, and in the waits of the node.
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points) {
    std::unique_ptr<PendingPoints> started;
    guard_points([&] {
      started = also_moved_by(base_->start(points, stream_),
                              [&](const std::weak_ptr<Progress>& progress) { (void)node_->add_progress(progress); });
    });
    return started;
  }
  /// A call for messages that have been started.
  template <class Body>
  void guard_points(const Body& body) {
    guarded([&] {
      making_ = base_.get();
      body();
    });
  }

  /// Before the groups are divided, one after the other.
  void meet_for_split(std::string_view name) {
    guarded([&] {
      const Collective call = stand_in("split", name);
      whole_ = describe_whole(call);
      agree(call);
    });
  }

 private:
  template <class Body>
  void guarded(const Body& body) {
    first_error_.guard(body, [this] {
      try {
        throw;
      } catch (const JobVerdict& verdict) {
        stop(verdict);
        throw;
      } catch (const Error& error) {
        const Error whole = named(error);
        // Not every transport carries a word to the ranks of other nodes.
        if (options_.activity && whole.code() == ErrorCode::kMismatch) options_.activity->tell(whole);
        stop(whole);
        throw whole;
      }
    });
  }

  /// Who is not in the group of the call that failed does not see it.
  void stop(const Error& error) noexcept {
    if (making_ != node_.get()) node_->abort(error);
    base_->abort(error);
  }

  /// With this rank's number in the whole group: those of a level count its own ranks.
  [[nodiscard]] Error named(const Error& error) const {
    ErrorContext context = error.context();
    // A transport below the group of messages counts as the whole group does.
    if (making_ == base_.get() || context.who.starts_with(fmt::format("rank {}/{}", base_->rank(), base_->size())))
      return error;
    context.who = fmt::format(
        "rank {}/{}, which is {} {}", base_->rank(), base_->size(), context.who.empty() ? "one" : context.who,
        making_ == node_.get() ? fmt::format("of node {}", across_->rank()) : "of those that join the nodes");
    return Error(error.code(), in_whole(error.message()), std::move(context));
  }

  /// A sentence about a rank of the node begins with its number there: "rank 1 (pid 4711) was killed".
  [[nodiscard]] std::string in_whole(const std::string& message) const {
    constexpr std::string_view kBegin = "rank ";
    int rank = -1;
    const char* const end = message.data() + message.size();
    if (making_ != node_.get() || !message.starts_with(kBegin)) return message;
    const auto number = std::from_chars(message.data() + kBegin.size(), end, rank);
    if (number.ec != std::errc() || rank < 0 || rank >= per_node()) return message;
    return fmt::format("rank {}, of node {} rank {}{}", rank_at(across_->rank(), rank), across_->rank(), rank,
                       std::string_view(number.ptr, end));
  }

  [[nodiscard]] int per_node() const { return node_->size(); }
  [[nodiscard]] int nodes() const { return across_->size(); }
  [[nodiscard]] int rank_at(int node, int place) const { return node * per_node() + place; }

  /// One step, or several messages side by side.
  void make(CommBackend& group, std::span<Collective> calls) {
    making_ = &group;
    ZR_FAILPOINT("levels.step");
    for (Collective& call : calls) {
      call.step_of = whole_;
      if (!has_root(call.kind)) call.root = 0;  // the whole group's number, which says nothing
    }
    group.submit(calls, stream_).wait();
  }
  void make(CommBackend& group, Collective call) { make(group, {&call, 1}); }

  void run_points(std::span<const Collective> points) {
    making_ = base_.get();
    base_->submit(points, stream_).wait();
  }

  void run_one(const Collective& call) {
    whole_ = describe_whole(call);
    switch (call.kind) {
      case CollectiveKind::kReduceScatter:
        return reduce_scatter(call);
      case CollectiveKind::kAllReduce:
        return all_reduce(call);
      case CollectiveKind::kAllGather:
        agree(call);
        return all_gather(call);
      case CollectiveKind::kBroadcast:
        agree(call);
        return broadcast(call);
      case CollectiveKind::kGather:
      case CollectiveKind::kScatter:
      case CollectiveKind::kAllToAll:
      case CollectiveKind::kBarrier:
        agree(call);
        return make(*base_, call);
      case CollectiveKind::kSend:
      case CollectiveKind::kRecv:
        return;  // not alone
    }
  }

  /// [Note: One first step] Ranks that make different calls would wait for each other in different groups, for ever. So
  /// every call begins with one that all ranks of a node make, and goes on with one that its ranks make between the
  /// nodes: if not of itself, with empty ones.
  void agree(const Collective& call) {
    for (CommBackend* group : {node_.get(), across_.get()})
      make(*group, Collective{.tag = call.tag, .name = call.name});
  }

  /// Of the ranks of one node, from what there is of all ranks.
  [[nodiscard]] std::vector<std::int64_t> of_node(const std::vector<std::int64_t>& counts, int node) const {
    const auto first = counts.begin() + rank_at(node, 0);
    return {first, first + per_node()};
  }

  /// This rank's part to its place in the other nodes, then everybody's inside the node.
  void all_gather(const Collective& call) {
    const auto element = static_cast<std::int64_t>(size_of(call.in_dtype));
    const std::vector<std::int64_t> offsets = offsets_of(call.counts);
    const auto place = [&](int rank) { return call.recv + offsets[static_cast<std::size_t>(rank)] * element; };
    const auto count = [&](int rank) { return call.counts[static_cast<std::size_t>(rank)]; };
    std::byte* const own = place(base_->rank());
    const std::int64_t elements = count(base_->rank());
    if (own != call.send && elements > 0) kernels::copy_stream(own, call.send, elements * element, isa_);

    const Collective message{.in_dtype = call.in_dtype, .out_dtype = call.out_dtype, .tag = call.tag};
    std::vector<Collective> messages;
    for (int distance = 1; distance < nodes(); ++distance) {  // every node begins with another one
      const int to = (across_->rank() + distance) % nodes();
      const int from = (across_->rank() + nodes() - distance) % nodes();
      const int theirs = rank_at(from, node_->rank());
      if (elements > 0) {
        messages.push_back(message);
        messages.back().kind = CollectiveKind::kSend;
        messages.back().send = own;
        messages.back().counts = {elements};
        messages.back().root = to;
      }
      if (count(theirs) > 0) {
        messages.push_back(message);
        messages.back().kind = CollectiveKind::kRecv;
        messages.back().recv = place(theirs);
        messages.back().counts = {count(theirs)};
        messages.back().root = from;
      }
    }
    make(*across_, messages);
    for (int node = 0; node < nodes(); ++node) {
      Collective inside = call;
      inside.send = place(rank_at(node, node_->rank()));
      inside.recv = place(rank_at(node, 0));
      inside.counts = of_node(call.counts, node);
      make(*node_, inside);
    }
  }

  /// For each node, its ranks' parts are summed over this node; then these sums over the nodes. Piece by piece, so that
  /// what lies between the levels is small.
  void reduce_scatter(const Collective& call) {
    const DType partial = type_of_partial(call);
    const auto in_size = static_cast<std::int64_t>(size_of(call.in_dtype));
    const auto out_size = static_cast<std::int64_t>(size_of(call.out_dtype));
    const auto partial_size = static_cast<std::int64_t>(size_of(partial));
    const auto piece = static_cast<std::int64_t>(options_.staging_bytes) / partial_size;
    const std::vector<std::int64_t> offsets = offsets_of(call);
    const std::int64_t longest = *std::ranges::max_element(call.counts);
    reserve();
    for (std::int64_t first = 0; first < longest; first += piece) {
      std::vector<std::int64_t> lengths;
      for (const std::int64_t count : call.counts) lengths.push_back(std::clamp<std::int64_t>(count - first, 0, piece));
      Collective over{.kind = CollectiveKind::kReduceScatter,
                      .in_dtype = partial,
                      .out_dtype = call.out_dtype,
                      .send = sums_.data(),
                      .recv = call.recv + first * out_size,
                      .op = call.op,
                      .accumulate = call.accumulate,
                      .tag = call.tag};
      std::byte* sum = sums_.data();
      for (int node = 0; node < nodes(); ++node) {
        const std::vector<std::int64_t> inside = of_node(lengths, node);
        over.counts.push_back(inside[static_cast<std::size_t>(node_->rank())]);
        make(*node_, {.kind = CollectiveKind::kReduceScatter,
                      .in_dtype = call.in_dtype,
                      .out_dtype = partial,
                      .send = parts_of(call, offsets, inside, node, first, in_size),
                      .recv = sum,
                      .counts = inside,
                      .op = call.op,
                      .tag = call.tag});
        sum += over.counts.back() * partial_size;
      }
      make(*across_, over);
    }
  }

  /// Elements from `first` on of the parts for the ranks of a node, one part after the other.
  const std::byte* parts_of(const Collective& call, const std::vector<std::int64_t>& offsets,
                            const std::vector<std::int64_t>& lengths, int node, std::int64_t first,
                            std::int64_t in_size) {
    const auto begin = static_cast<std::size_t>(rank_at(node, 0));
    const bool whole =
        std::equal(lengths.begin(), lengths.end(), call.counts.begin() + static_cast<std::ptrdiff_t>(begin));
    if (whole && call.offsets.empty()) return call.send + offsets[begin] * in_size;
    std::byte* to = packed_.data();
    for (std::size_t place = 0; place < lengths.size(); ++place) {
      if (lengths[place] == 0) continue;
      kernels::copy_stream(to, call.send + (offsets[begin + place] + first) * in_size, lengths[place] * in_size, isa_);
      to += lengths[place] * in_size;
    }
    return packed_.data();
  }

  void all_reduce(const Collective& call) {
    const std::int64_t elements = call.counts.front();
    const auto bytes = static_cast<std::size_t>(elements) * size_of(call.in_dtype);
    if (bytes <= kInlineBytes) {
      reserve();
      Collective inside = call;
      inside.out_dtype = type_of_partial(call);
      inside.recv = sums_.data();
      make(*node_, inside);
      Collective over = call;
      over.in_dtype = inside.out_dtype;
      over.send = sums_.data();
      return make(*across_, over);
    }
    Collective part = call;
    part.kind = CollectiveKind::kReduceScatter;
    part.counts = even_parts(elements, base_->size());
    const std::int64_t own = offsets_of(part.counts)[static_cast<std::size_t>(base_->rank())];
    part.recv = call.recv + own * static_cast<std::int64_t>(size_of(call.out_dtype));
    reduce_scatter(part);
    Collective whole = part;
    whole.kind = CollectiveKind::kAllGather;
    whole.in_dtype = call.out_dtype;
    whole.op = ReduceOp::kSum;
    whole.send = part.recv;
    whole.recv = call.recv;
    all_gather(whole);
  }

  void broadcast(const Collective& call) {
    const int place = call.root % per_node();
    if (node_->rank() == place) {
      Collective over = call;
      over.root = call.root / per_node();
      make(*across_, over);
    }
    Collective inside = call;
    inside.root = place;
    if (node_->rank() == place) inside.send = call.recv;
    make(*node_, inside);
  }

  void reserve() {
    if (!sums_.empty()) return;
    sums_.resize(static_cast<std::size_t>(nodes()) * options_.staging_bytes);
    packed_.resize(static_cast<std::size_t>(per_node()) * options_.staging_bytes);
    if (options_.ledger) hold_ = options_.ledger->hold({-1, MemoryState::kControl}, sums_.size() + packed_.size());
  }

  std::unique_ptr<CommBackend> base_;
  std::unique_ptr<CommBackend> node_;
  std::unique_ptr<CommBackend> across_;
  CommOptions options_;
  std::string kind_;
  Stream stream_;
  kernels::Isa isa_;
  std::vector<std::byte> sums_;    // of this node, for each one
  std::vector<std::byte> packed_;  // parts for the ranks of a node
  MemoryHold hold_;
  std::shared_ptr<TrafficObserver> observer_;
  WholeCall whole_{};                    // the call in progress
  const CommBackend* making_ = nullptr;  // the group that makes a step of it
  FirstError first_error_;
};

/// [Note: One order of calls] The last call of this rank in a group or in the parts that it was split into: each one
/// begins after it. Without that two ranks of two groups could each be in a call of the one that the other has not come
/// to.
using LastCall = std::shared_ptr<Event>;

std::unique_ptr<CommBackend> make_levels(std::unique_ptr<CommBackend> base, std::unique_ptr<CommBackend> node,
                                         const CommOptions& options, LastCall last_call);

/// Messages over the lower level, whose errors are those of both.
class TwoLevelPoints final : public PendingPoints {
 public:
  TwoLevelPoints(std::shared_ptr<TwoLevels> levels, std::unique_ptr<PendingPoints> points)
      : levels_(std::move(levels)), points_(std::move(points)) {}
  bool done() override {
    bool done = false;
    levels_->guard_points([&] { done = points_->done(); });
    return done;
  }
  void wait() override {
    levels_->guard_points([&] { points_->wait(); });
  }

 private:
  std::shared_ptr<TwoLevels> levels_;
  std::unique_ptr<PendingPoints> points_;
};

class TwoLevelBackend final : public CommBackend {
 public:
  TwoLevelBackend(std::shared_ptr<TwoLevels> levels, LastCall last_call)
      : levels_(std::move(levels)), last_call_(std::move(last_call)) {}

  [[nodiscard]] int rank() const override { return levels_->base().rank(); }
  [[nodiscard]] int size() const override { return levels_->base().size(); }
  [[nodiscard]] const std::string& group_name() const override { return levels_->base().group_name(); }
  [[nodiscard]] std::string_view kind() const override { return levels_->kind(); }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.one_sided = false,
            .one_sided_on_nodes = levels_->node().capabilities().one_sided,
            .window_kind = levels_->base().capabilities().window_kind,
            .separate_processes = levels_->base().capabilities().separate_processes};
  }
  [[nodiscard]] std::span<const int> node_sizes() const override { return levels_->base().node_sizes(); }
  [[nodiscard]] std::size_t memory_bytes() const override { return levels_->memory_bytes(); }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    WorkInfo info = validated(collectives, rank(), size(), levels_->where());
    stream.order_after(*last_call_);
    enqueue_calls(stream, collectives, levels_, &TwoLevels::run);
    *last_call_ = stream.record();
    return {*last_call_, std::move(info)};
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    validate_points(points, rank(), size(), levels_->where());
    stream.synchronize();
    last_call_->wait();
    return std::make_unique<TwoLevelPoints>(levels_, levels_->start(points));
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    last_call_->wait();
    levels_->meet_for_split(name);
    std::unique_ptr<CommBackend> base = levels_->base().split(color, key, name);
    std::unique_ptr<CommBackend> node = levels_->node().split(color, key, name);
    return base ? make_levels(std::move(base), std::move(node), levels_->options(), last_call_) : nullptr;
  }

  [[nodiscard]] PeerWindow attach(const Arena& /*arena*/, std::string_view name) override {
    throw Error(ErrorCode::kUsage, "ranks on several nodes have no memory that all of them can read",
                {.where = levels_->where() + ".attach",
                 .which = std::string(name),
                 .hint = "look at capabilities().one_sided, and use collectives"});
  }
  void wait_until(const std::function<bool()>& /*predicate*/, const WaitContext& context) override {
    throw Error(ErrorCode::kUsage, "ranks on several nodes have no memory that all of them can write",
                {.where = levels_->where() + ".wait_until", .which = context.what});
  }
  void notify() override {}
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    (void)levels_->node().add_progress(progress);
    return levels_->base().add_progress(std::move(progress));
  }
  void check_peers(const WaitContext& context) override {
    levels_->base().check_peers(context);
    levels_->node().check_peers({.what = context.what});  // whose ranks have other numbers: any of them
  }

  void abort(const Error& error) noexcept override {
    levels_->node().abort(error);
    levels_->base().abort(error);
  }
  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override {
    levels_->base().count_one_sided(kind, peer, bytes);
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override { levels_->set_observer(observer); }
  void set_tag_names(TagNames names) override {
    levels_->for_each_group([&](CommBackend& group) { group.set_tag_names(names); });
  }

 private:
  std::shared_ptr<TwoLevels> levels_;
  LastCall last_call_;
};

/// Two backends of the same ranks, of which one makes the calls. The other one hears of aborts.
class Beside final : public ForwardingBackend {
 public:
  Beside(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> other, bool inner_is_node,
         const CommOptions& options, LastCall last_call)
      : ForwardingBackend(std::move(inner)),
        other_(std::move(other)),
        inner_is_node_(inner_is_node),
        options_(options),
        last_call_(std::move(last_call)) {}

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    stream.order_after(*last_call_);
    Work work = inner().submit(collectives, stream);
    *last_call_ = work.event();
    return work;
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    last_call_->wait();
    return also_moved_by(inner().start(points, stream),
                         [this](const std::weak_ptr<Progress>& progress) { (void)other_->add_progress(progress); });
  }

  /// Who stops the job on another node is heard by the backend that makes no calls.
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    inner().wait_until(
        [&] {
          if (predicate()) return true;
          other_->check_peers({.what = context.what});
          return false;
        },
        context);
  }
  void check_peers(const WaitContext& context) override {
    inner().check_peers(context);
    other_->check_peers({.what = context.what});
  }
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    (void)other_->add_progress(progress);
    return inner().add_progress(std::move(progress));
  }
  [[nodiscard]] std::size_t memory_bytes() const override { return inner().memory_bytes() + other_->memory_bytes(); }
  [[nodiscard]] const std::string& group_name() const override { return base().group_name(); }
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    last_call_->wait();
    std::unique_ptr<CommBackend> base_part = base().split(color, key, name);
    std::unique_ptr<CommBackend> node_part = node().split(color, key, name);
    return base_part ? make_levels(std::move(base_part), std::move(node_part), options_, last_call_) : nullptr;
  }
  void abort(const Error& error) noexcept override {
    inner().abort(error);
    other_->abort(error);
  }

 private:
  [[nodiscard]] CommBackend& base() const { return inner_is_node_ ? *other_ : inner(); }
  [[nodiscard]] CommBackend& node() const { return inner_is_node_ ? inner() : *other_; }

  std::unique_ptr<CommBackend> other_;
  bool inner_is_node_;
  CommOptions options_;
  LastCall last_call_;
};

/// Nodes of equally many ranks, more than one, each in one run: on every rank, or on none.
bool has_levels(CommBackend& base, const CommBackend& node) {
  const std::span<const int> sizes = base.node_sizes();
  const int per_node = node.size();
  std::int32_t fits = per_node > 1 && std::ranges::all_of(sizes, [&](int size) { return size == per_node; }) &&
                      base.rank() % per_node == node.rank();
  const Stream stream = make_cpu_device(ExecutionMode::kInline)->make_stream("two levels");
  auto* const bytes = reinterpret_cast<std::byte*>(&fits);
  const Collective call{.kind = CollectiveKind::kAllReduce,
                        .in_dtype = DType::kInt32,
                        .out_dtype = DType::kInt32,
                        .send = bytes,
                        .recv = bytes,
                        .counts = {1},
                        .op = ReduceOp::kMin};
  base.submit({&call, 1}, stream).wait();
  return fits != 0;
}

std::unique_ptr<CommBackend> make_levels(std::unique_ptr<CommBackend> base, std::unique_ptr<CommBackend> node,
                                         const CommOptions& options, LastCall last_call) {
  if (base->node_sizes().size() == 1 && node->size() == base->size()) {
    return std::make_unique<Beside>(std::move(node), std::move(base), true, options, std::move(last_call));
  }
  if (!has_levels(*base, *node)) {
    return std::make_unique<Beside>(std::move(base), std::move(node), false, options, std::move(last_call));
  }
  std::unique_ptr<CommBackend> across = base->split(node->rank(), base->rank(), "across");
  auto levels = std::make_shared<TwoLevels>(std::move(base), std::move(node), std::move(across), options);
  return std::make_unique<TwoLevelBackend>(std::move(levels), std::move(last_call));
}

}  // namespace
}  // namespace zeroth::detail

namespace zeroth {

std::unique_ptr<CommBackend> make_two_level_backend(std::unique_ptr<CommBackend> base,
                                                    std::unique_ptr<CommBackend> node, const CommOptions& options) {
  return detail::make_levels(std::move(base), std::move(node), options, std::make_shared<Event>());
}

}  // namespace zeroth
