#include "comm/call_descriptor.h"
#include "comm/first_error.h"
#include "comm/matched_calls.h"
#include "comm/messages/message_links.h"
#include "comm/messages/message_points.h"
#include "comm/started_points.h"

#include <kernels/common/dispatch.h>
#include <kernels/copy/copy.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/text.h>
#include <zeroth/comm/messages.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

/// A buffer that holds the parts of all ranks, one after the other.
template <class Byte>
class PartsOf {
 public:
  PartsOf(Byte* whole, const std::vector<std::int64_t>& counts, std::size_t element)
      : whole_(whole), offsets_(offsets_of(counts)), element_(element) {}

  [[nodiscard]] std::span<Byte> operator()(int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    return {whole_ + static_cast<std::size_t>(offsets_[index]) * element_,
            static_cast<std::size_t>(offsets_[index + 1] - offsets_[index]) * element_};
  }

 private:
  Byte* whole_;
  std::vector<std::int64_t> offsets_;
  std::size_t element_;
};
using Parts = PartsOf<std::byte>;
using ConstParts = PartsOf<const std::byte>;

/// The calls of one group. Run by one thread at a time.
class MessageGroup {
 public:
  MessageGroup(std::shared_ptr<MessageJob> job, std::string name, std::uint32_t number, std::vector<int> members,
               int rank)
      : links_(std::move(job), std::move(name), number, std::move(members), rank),
        points_(links_),
        isa_(kernels::best_isa()) {
    if (RankActivity* const activity = links_.job()->watched.activity())
      begun_ = activity->calls_begun(links_.watched_as());
  }

  [[nodiscard]] int rank() const { return links_.rank(); }
  [[nodiscard]] int size() const { return links_.size(); }
  [[nodiscard]] const MessageLinks& links() const { return links_; }
  [[nodiscard]] std::size_t staging_bytes() const { return staging_.size(); }
  void set_observer(std::shared_ptr<TrafficObserver> observer) { observer_ = std::move(observer); }
  void set_tag_names(TagNames names) { links_.set_tag_names(std::move(names)); }

  template <class Body>
  auto guarded(Body&& body) {
    const auto unless_aborted = [&] {
      links_.throw_if_aborted();
      return body();
    };
    return first_error_.guard(unless_aborted, [this] {
      try {
        throw;
      } catch (const JobVerdict&) {
        throw;
      } catch (const Error& error) {
        throw job().watched.dated(error);
      }
    });
  }

  void run(std::span<const Collective> calls) {
    guarded([&] {
      for_each_run(
          calls, [&](std::span<const Collective> points) { run_points(points); },
          [&](const Collective& call) { run_matched(call); });
    });
  }

  /// Messages that start() has begun, in the waits of all groups of the rank; whether some are under way.
  bool move_started() {
    if (first_error_) return false;
    guarded([&] { move_points(); });
    if (points_.empty()) points_progress_.reset();  // the wait that called this still holds it
    return !points_.empty();
  }
  void move_points() {
    points_.move([this](const TrafficEvent& event) { report(event); });
  }

  class Started;
  [[nodiscard]] static std::unique_ptr<PendingPoints> start(const std::shared_ptr<MessageGroup>& group,
                                                            std::span<const Collective> calls);

  [[nodiscard]] std::shared_ptr<MessageGroup> split(int color, int key, std::string_view name) {
    return guarded([&]() -> std::shared_ptr<MessageGroup> {
      call_ = {};
      call_.sequence = next_sequence_;
      call_.kind = PostKind::kSplit;
      call_.counts_digest = digest64(name);
      call_.color = color;
      call_.key = key;
      call_.send_offset = job().next_group;
      ZR_FAILPOINT_OF("messages.*.post", name_of(call_.kind));
      const std::vector<CallDescriptor> all = agree();
      ZR_FAILPOINT_OF("messages.*.mid", name_of(call_.kind));
      // Above every number that a member has seen: so no two groups of two ranks have the same.
      std::uint64_t number = 0;
      for (const CallDescriptor& theirs : all) number = std::max(number, theirs.send_offset);
      job().next_group = static_cast<std::uint32_t>(number) + 1;
      if (color < 0) return nullptr;
      const std::vector<int> ranks = members_of(
          color, size(), [&](int peer) -> const CallDescriptor& { return all[static_cast<std::size_t>(peer)]; });
      const auto place = static_cast<int>(std::ranges::find(ranks, rank()) - ranks.begin());
      std::vector<int> members;
      for (const int peer : ranks) members.push_back(links_.members()[static_cast<std::size_t>(peer)]);
      auto part = std::make_shared<MessageGroup>(links_.job(), links_.name() + "/" + std::string(name),
                                                 static_cast<std::uint32_t>(number), std::move(members), place);
      part->observer_ = observer_;
      ZR_FAILPOINT_OF("messages.*.end", name_of(call_.kind));
      return part;
    });
  }

  void report(const TrafficEvent& event) noexcept {
    if (observer_) observer_->observe(event);
  }

 private:
  using Transfers = MessageLinks::Transfers;

  [[nodiscard]] MessageJob& job() const { return *links_.job(); }
  [[nodiscard]] std::size_t ranks() const { return links_.members().size(); }

  void run_matched(const Collective& call) {
    call_ = describe_call(call, next_sequence_);
    ZR_FAILPOINT_OF("messages.*.post", name_of(call_.kind));
    received_ = far_ = 0;
    in_dtypes_.clear();
    const std::vector<CallDescriptor> all = call.kind == CollectiveKind::kAllToAll ? agree_on_parts(call) : agree();
    for (const CallDescriptor& theirs : all) in_dtypes_.push_back(static_cast<DType>(theirs.in_dtype));
    ZR_FAILPOINT_OF("messages.*.mid", name_of(call_.kind));
    move(call);
    ZR_FAILPOINT_OF("messages.*.end", name_of(call_.kind));
    const CountedAs counted(call);
    report({.group = links_.name(),
            .kind = counted.kind,
            .calls = counted.calls,
            .bytes = received_,
            .far_bytes = far_,
            .control_bytes = static_cast<std::uint64_t>(size() - 1) * sizeof(CallDescriptor)});
  }

  void run_points(std::span<const Collective> calls) {
    MessagePoints::Batch batch(points_, calls);
    points_.await(batch, [this](const TrafficEvent& event) { report(event); });
  }

  void send(Transfers& into, int peer, MessageKind kind, std::span<const std::byte> bytes) const {
    links_.send(into, peer, kind, bytes, call_);
  }
  void receive(Transfers& into, int peer, MessageKind kind, std::span<std::byte> bytes) {
    links_.receive(into, peer, kind, bytes, call_);
    if (kind != MessageKind::kData) return;
    received_ += bytes.size();
    if (links_.nodes().is_far(rank(), peer)) far_ += bytes.size();
  }

  /// Everybody's description of this call, once all are the same.
  std::vector<CallDescriptor> agree() { return agree(std::vector<CallDescriptor>(ranks(), call_)); }

  /// `told`: to each rank.
  std::vector<CallDescriptor> agree(const std::vector<CallDescriptor>& told) {
    ++next_sequence_;
    if (begun_) begun_->store(next_sequence_, std::memory_order_relaxed);
    std::vector<CallDescriptor> all(ranks(), call_);
    Transfers transfers;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const auto index = static_cast<std::size_t>(peer);
      send(transfers, peer, MessageKind::kDescription, std::as_bytes(std::span(&told[index], 1)));
      receive(transfers, peer, MessageKind::kDescription, std::as_writable_bytes(std::span(&all[index], 1)));
    }
    links_.await(transfers);
    for (int peer = 0; peer < size(); ++peer) {
      const CallDescriptor& theirs = all[static_cast<std::size_t>(peer)];
      if (same_call(call_, theirs)) [[likely]]
        continue;
      const Error mismatch =
          mismatch_error({call_, rank()}, {theirs, peer}, size(), links_.where_group(), links_.tag_names());
      job().watched.throw_mismatch(mismatch, links_.members());
    }
    return all;
  }

  /// Two ranks compare what one gives the other, in both directions.
  std::vector<CallDescriptor> agree_on_parts(const Collective& call) {
    std::vector<CallDescriptor> told(ranks(), call_);
    for (std::size_t peer = 0; peer < told.size(); ++peer) {
      told[peer].given = call.counts[peer];
      told[peer].taken = call.recv_counts[peer];
    }
    std::vector<CallDescriptor> all = agree(told);
    all[static_cast<std::size_t>(rank())] = told[static_cast<std::size_t>(rank())];
    for (int peer = 0; peer < size(); ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      for (const PartSize& part : {PartSize{peer, rank(), all[index].given, told[index].taken},
                                   PartSize{rank(), peer, told[index].given, all[index].taken}}) {
        if (part.given == part.taken) continue;
        job().watched.tell_and_throw(
            parts_error(call_, part, rank(), size(), links_.where_group(), links_.tag_names()));
      }
    }
    return all;
  }

  void move(const Collective& call) {
    switch (call.kind) {
      case CollectiveKind::kBarrier:
      case CollectiveKind::kSend:
      case CollectiveKind::kRecv:
        return;
      case CollectiveKind::kAllGather:
        return gather(call.send, call.recv, call.counts, size_of(call.in_dtype));
      case CollectiveKind::kReduceScatter:
        return reduce_scatter(call, call.recv, call.counts, offsets_of(call));
      case CollectiveKind::kAllReduce:
        return all_reduce(call);
      case CollectiveKind::kBroadcast:
        return broadcast(call);
      case CollectiveKind::kGather:
        return gather_at_root(call);
      case CollectiveKind::kScatter:
        return scatter(call);
      case CollectiveKind::kAllToAll:
        return all_to_all(call);
    }
  }

  /// [Note: Pieces] Parts are exchanged in pieces of staging_bytes; all messages of a piece are posted before the piece
  /// before it is awaited and used, so that no rank waits for a message that another one would send only later. A
  /// large part in one message would be slower, even where nothing is summed: a transport may give a link to one
  /// direction until the message has left, as gloo does, and both directions then take twice the time.
  template <class Post, class Use>
  void in_pieces(std::size_t pieces, Post&& post, Use&& use) {
    Transfers posted[2];
    if (pieces > 0) post(posted[0], std::size_t{0});
    for (std::size_t number = 0; number < pieces; ++number) {
      if (number + 1 < pieces) post(posted[(number + 1) % 2], number + 1);
      links_.await(posted[number % 2]);
      use(number);
    }
  }

  /// given(rank) to every other rank, taken(rank) from it. Posts the first piece, calls `meanwhile`, then the rest.
  template <class Given, class Taken, class Meanwhile>
  void exchange(Given&& given, Taken&& taken, Meanwhile&& meanwhile) {
    const std::size_t piece = job().options.staging_bytes;
    std::size_t most = 0;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) most = std::max({most, given(peer).size(), taken(peer).size()});
    }
    const auto piece_of = [piece](auto bytes, std::size_t number) {
      const std::size_t first = std::min(number * piece, bytes.size());
      return bytes.subspan(first, std::min(piece, bytes.size() - first));
    };
    const auto post = [&](Transfers& into, std::size_t number) {
      for (int distance = 1; distance < size(); ++distance) {  // every rank begins with another one
        const int to = (rank() + distance) % size();
        const int from = (rank() + size() - distance) % size();
        send(into, to, MessageKind::kData, piece_of(given(to), number));
        receive(into, from, MessageKind::kData, piece_of(taken(from), number));
      }
      if (number == 0) meanwhile();
    };
    if (most == 0) return meanwhile();
    in_pieces((most + piece - 1) / piece, post, [](std::size_t) {});
  }

  /// Own part from `own` to everybody, everybody's part to its place in `whole`.
  void gather(const std::byte* own, std::byte* whole, const std::vector<std::int64_t>& counts, std::size_t element) {
    const Parts part(whole, counts, element);
    const std::span<const std::byte> sent(own, part(rank()).size());
    exchange([&](int) { return sent; }, part,
             [&] {
               if (part(rank()).data() != own) copy(part(rank()).data(), own, sent.size());
             });
  }

  [[nodiscard]] std::size_t own_bytes(const Collective& call) const {
    return static_cast<std::size_t>(call.counts[static_cast<std::size_t>(rank())]) * size_of(call.in_dtype);
  }

  void gather_at_root(const Collective& call) {
    Transfers transfers;
    if (rank() != call.root) {
      send(transfers, call.root, MessageKind::kData, {call.send, own_bytes(call)});
      return links_.await(transfers);
    }
    const Parts part(call.recv, call.counts, size_of(call.in_dtype));
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) receive(transfers, peer, MessageKind::kData, part(peer));
    }
    if (part(rank()).data() != call.send) copy(part(rank()).data(), call.send, part(rank()).size());
    links_.await(transfers);
  }

  void scatter(const Collective& call) {
    Transfers transfers;
    if (rank() != call.root) {
      receive(transfers, call.root, MessageKind::kData, {call.recv, own_bytes(call)});
      return links_.await(transfers);
    }
    const ConstParts part(call.send, call.counts, size_of(call.in_dtype));
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) send(transfers, peer, MessageKind::kData, part(peer));
    }
    if (part(rank()).data() != call.recv) copy(call.recv, part(rank()).data(), part(rank()).size());
    links_.await(transfers);
  }

  void all_to_all(const Collective& call) {
    const ConstParts given(call.send, call.counts, size_of(call.in_dtype));
    const Parts taken(call.recv, call.recv_counts, size_of(call.in_dtype));
    exchange(given, taken, [&] { copy(taken(rank()).data(), given(rank()).data(), given(rank()).size()); });
  }

  void reduce_scatter(const Collective& call, std::byte* to, const std::vector<std::int64_t>& counts,
                      const std::vector<std::int64_t>& offsets) {
    const std::size_t in_size = size_of(call.in_dtype);
    // The same on all ranks, whatever dtype each gives.
    const auto piece =
        static_cast<std::int64_t>(job().options.staging_bytes / std::max(in_size, size_of(call.out_dtype)));
    const auto size_from = [this](int peer) { return size_of(in_dtypes_[static_cast<std::size_t>(peer)]); };
    const std::int64_t pieces = (*std::ranges::max_element(counts) + piece - 1) / piece;
    reserve_staging();
    const auto range = [&](int owner, std::int64_t number) {  // first element and length, in the owner's part
      const std::int64_t first = std::min(number * piece, counts[static_cast<std::size_t>(owner)]);
      return std::pair(first, std::min(piece, counts[static_cast<std::size_t>(owner)] - first));
    };
    const auto post = [&](Transfers& transfers, std::size_t index) {
      const auto number = static_cast<std::int64_t>(index);
      const auto own = static_cast<std::size_t>(range(rank(), number).second);
      for (int distance = 1; distance < size(); ++distance) {
        const int peer = (rank() + distance) % size();
        const auto [first, length] = range(peer, number);
        const std::int64_t begin = offsets[static_cast<std::size_t>(peer)] + first;
        send(transfers, peer, MessageKind::kData,
             {call.send + static_cast<std::size_t>(begin) * in_size, static_cast<std::size_t>(length) * in_size});
        receive(transfers, peer, MessageKind::kData, {staging(peer, number), own * size_from(peer)});
      }
    };
    const auto sum = [&](std::size_t index) {
      const auto number = static_cast<std::int64_t>(index);
      const auto [first, length] = range(rank(), number);
      Summands sources;
      for (int peer = 0; peer < size(); ++peer) {
        const std::int64_t begin = offsets[static_cast<std::size_t>(rank())] + first;
        sources.add(peer == rank() ? call.send + static_cast<std::size_t>(begin) * in_size : staging(peer, number),
                    in_dtypes_[static_cast<std::size_t>(peer)]);
      }
      reduce(call, to + static_cast<std::size_t>(first) * size_of(call.out_dtype), sources, length);
    };
    in_pieces(static_cast<std::size_t>(pieces), post, sum);
  }

  void all_reduce(const Collective& call) {
    const std::size_t in_size = size_of(call.in_dtype);
    const auto elements = call.counts.front();
    const auto bytes = static_cast<std::size_t>(elements) * in_size;
    if (bytes <= kInlineBytes) {
      std::vector<std::byte> all(bytes * ranks());
      gather(call.send, all.data(), std::vector<std::int64_t>(ranks(), elements), in_size);
      Summands sources;
      for (std::size_t peer = 0; peer < ranks(); ++peer) sources.add(all.data() + peer * bytes, call.in_dtype);
      reduce(call, call.recv, sources, elements);
      return;
    }
    // A rank's own part is sent to nobody, so its sum may take that place while others' parts are still under way.
    const std::vector<std::int64_t> counts = even_parts(elements, size());
    const std::size_t out_size = size_of(call.out_dtype);
    std::byte* own = Parts(call.recv, counts, out_size)(rank()).data();
    reduce_scatter(call, own, counts, offsets_of(counts));
    gather(own, call.recv, counts, out_size);
  }

  /// A large message leaves the root once, in parts that the others pass on.
  void broadcast(const Collective& call) {
    const std::size_t element = size_of(call.in_dtype);
    const auto bytes = static_cast<std::size_t>(call.counts.front()) * element;
    const bool root = rank() == call.root;
    if (root && call.recv != call.send) copy(call.recv, call.send, bytes);
    Transfers transfers;
    if (bytes <= kInlineBytes || size() == 2) {
      for (int peer = 0; root && peer < size(); ++peer) {
        if (peer != rank()) send(transfers, peer, MessageKind::kData, {call.recv, bytes});
      }
      if (!root) receive(transfers, call.root, MessageKind::kData, {call.recv, bytes});
      return links_.await(transfers);
    }
    const Parts part(call.recv, even_parts(call.counts.front(), size()), element);
    for (int peer = 0; root && peer < size(); ++peer) {
      if (peer != rank()) send(transfers, peer, MessageKind::kData, part(peer));
    }
    if (!root) receive(transfers, call.root, MessageKind::kData, part(rank()));
    links_.await(transfers);
    // The root has everything: nobody sends to it, and it sends its own part only.
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      if (peer != call.root) send(transfers, peer, MessageKind::kData, part(rank()));
      if (!root) receive(transfers, peer, MessageKind::kData, part(peer));
    }
    links_.await(transfers);
  }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (bytes > 0) kernels::copy_stream(to, from, static_cast<std::int64_t>(bytes), isa_);
  }

  void reduce(const Collective& call, std::byte* to, const Summands& sources, std::int64_t elements) const {
    reduce_in_rank_order(call, rank(), to, sources, elements, links_.nodes(), isa_);
  }

  void reserve_staging() {
    const std::size_t bytes = 2 * static_cast<std::size_t>(size() - 1) * job().options.staging_bytes;
    if (staging_.size() >= bytes) return;
    staging_.resize(bytes);
    if (job().options.ledger) staging_hold_ = job().options.ledger->hold({-1, MemoryState::kControl}, bytes);
  }

  /// Where the peer's contribution to piece `number` lies; two pieces at a time.
  [[nodiscard]] std::byte* staging(int peer, std::int64_t number) {
    const int place = (peer < rank() ? peer : peer - 1) + static_cast<int>(number % 2) * (size() - 1);
    return staging_.data() + static_cast<std::size_t>(place) * job().options.staging_bytes;
  }

  MessageLinks links_;
  MessagePoints points_;
  std::shared_ptr<Progress> points_progress_;  // while messages that start() began are under way
  kernels::Isa isa_;
  std::shared_ptr<TrafficObserver> observer_;
  CallDescriptor call_{};         // the one that runs
  std::vector<DType> in_dtypes_;  // what each rank gives to it
  std::uint64_t received_ = 0;    // by it
  std::uint64_t far_ = 0;         // from other nodes
  std::uint64_t next_sequence_ = 0;
  std::shared_ptr<std::atomic<std::uint64_t>> begun_;  // next_sequence_, for others to see
  std::vector<std::byte> staging_;
  MemoryHold staging_hold_;
  FirstError first_error_;
};

class PointsProgress final : public Progress {
 public:
  explicit PointsProgress(MessageGroup& group) : group_(group) {}
  bool advance() override { return group_.move_started(); }
  void set_awaited(int /*rank*/) override {}
  void clear_awaited() noexcept override {}

 private:
  MessageGroup& group_;  // owns this one
};

class MessageGroup::Started final : public PendingPoints {
 public:
  Started(std::shared_ptr<MessageGroup> group, std::span<const Collective> calls)
      : group_(std::move(group)), batch_(group_->points_, calls) {}
  ~Started() override {
    if (batch_.done() || group_->first_error_) return;
    try {
      throw given_up(group_->links_.where_group(), group_->links_.who());
    } catch (...) {
      group_->first_error_.set(std::current_exception());
    }
  }

  bool done() override {
    if (batch_.done()) return true;
    group_->guarded([this] {
      group_->move_points();
      if (!batch_.done()) group_->points_.check(batch_);
    });
    return batch_.done();
  }

  void wait() override {
    if (batch_.done()) return;
    group_->guarded(
        [this] { group_->points_.await(batch_, [this](const TrafficEvent& event) { group_->report(event); }); });
  }

 private:
  std::shared_ptr<MessageGroup> group_;
  MessagePoints::Batch batch_;
};

std::unique_ptr<PendingPoints> MessageGroup::start(const std::shared_ptr<MessageGroup>& group,
                                                   std::span<const Collective> calls) {
  std::unique_ptr<Started> started;
  group->guarded([&] {
    started = std::make_unique<Started>(group, calls);
    group->move_points();
  });
  if (!group->points_.empty() && !group->points_progress_) {
    group->points_progress_ = std::make_shared<PointsProgress>(*group);
    group->job().progress.add(group->points_progress_);
  }
  return started;
}

class MessageBackend final : public CommBackend {
 public:
  explicit MessageBackend(std::shared_ptr<MessageGroup> group) : group_(std::move(group)) {}

  [[nodiscard]] int rank() const override { return links().rank(); }
  [[nodiscard]] int size() const override { return links().size(); }
  [[nodiscard]] const std::string& group_name() const override { return links().name(); }
  [[nodiscard]] std::string_view kind() const override { return job().transport->kind(); }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.one_sided = false, .window_kind = ArenaKind::kPrivate, .separate_processes = true};
  }
  [[nodiscard]] std::span<const int> node_sizes() const override { return links().nodes().sizes; }
  [[nodiscard]] std::size_t memory_bytes() const override { return group_->staging_bytes(); }

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    WorkInfo info = validated(collectives, rank(), size(), links().where());
    Event& last_call = job().last_call;
    stream.order_after(last_call);
    enqueue_calls(stream, collectives, group_, &MessageGroup::run);
    last_call = stream.record();
    return {last_call, std::move(info)};
  }

  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    validate_points(points, rank(), size(), links().where());
    stream.synchronize();
    job().last_call.wait();
    return MessageGroup::start(group_, points);
  }

  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    job().last_call.wait();
    std::shared_ptr<MessageGroup> part = group_->split(color, key, name);
    return part ? std::make_unique<MessageBackend>(std::move(part)) : nullptr;
  }

  [[nodiscard]] PeerWindow attach(const Arena& /*arena*/, std::string_view name) override {
    throw Error(ErrorCode::kUsage, "this transport has no memory that peers can read",
                {.where = links().where() + ".attach",
                 .which = std::string(name),
                 .hint = "look at capabilities().one_sided, and use collectives"});
  }
  void wait_until(const std::function<bool()>& /*predicate*/, const WaitContext& context) override {
    throw Error(ErrorCode::kUsage, "this transport has no memory that peers can write",
                {.where = links().where() + ".wait_until", .which = context.what});
  }
  void notify() override {}
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    job().progress.add(std::move(progress));
    return job().watched.job_rank(job().transport->rank());
  }
  void check_peers(const WaitContext& /*context*/) override {
    links().throw_if_aborted();
    job().transport->check();
  }

  void abort(const Error& error) noexcept override {
    MessageJob& job = this->job();
    {
      const std::lock_guard lock(job.mutex);
      if (!job.abort_text.empty()) return;
      job.abort_text = error.what();
    }
    ZR_FAILPOINT("abort.messages");
    job.transport->abort(error.what());
  }

  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override {
    group_->report({.group = links().name(),
                    .kind = kind,
                    .one_sided = true,
                    .calls = 1,
                    .bytes = bytes,
                    .far_bytes = links().nodes().is_far(rank(), peer) ? bytes : 0});
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override { group_->set_observer(std::move(observer)); }
  void set_tag_names(TagNames names) override { group_->set_tag_names(std::move(names)); }

 private:
  [[nodiscard]] const MessageLinks& links() const { return group_->links(); }
  [[nodiscard]] MessageJob& job() const { return *links().job(); }

  std::shared_ptr<MessageGroup> group_;
};

}  // namespace
}  // namespace zeroth::detail

namespace zeroth {

std::unique_ptr<CommBackend> make_message_backend(std::shared_ptr<MessageTransport> transport,
                                                  const CommOptions& options) {
  std::vector<int> members(static_cast<std::size_t>(transport->size()));
  std::iota(members.begin(), members.end(), 0);
  const int rank = transport->rank();
  detail::check_nodes(options.nodes, transport->size(), "comm." + std::string(transport->kind()));
  auto job = std::make_shared<detail::MessageJob>();
  job->transport = std::move(transport);
  job->options = options;
  job->watched = detail::Watched(options);
  return std::make_unique<detail::MessageBackend>(
      std::make_shared<detail::MessageGroup>(std::move(job), "world", 0, std::move(members), rank));
}

}  // namespace zeroth
