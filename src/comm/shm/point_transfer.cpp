// Sends and receives between two ranks; see [Note: Rings] in control_block.h.
#include "comm/call_descriptor.h"
#include "comm/shm/shared_memory_engine.h"
#include "comm/started_points.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/comm/rank_activity.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroth::detail {
namespace {

/// Data that the receiver can read is read where it lies instead of flowing through the ring. The sender then has to
/// wait for the receiver.
constexpr std::size_t kDirectBytes = kRingBytes;
/// Of started ones, whose sender does not wait: from about here on one read is as fast as two copies through a ring.
constexpr std::size_t kStartedDirectBytes = std::size_t{16} << 10U;

std::size_t message_bytes(const Collective& call) {
  return static_cast<std::size_t>(call.counts.front()) * size_of(call.in_dtype);
}

}  // namespace

/// A send or receive in progress.
struct SharedMemoryEngine::Point {
  Points& all;  ///< that it is one of
  const CollectiveKind kind;
  const int peer;
  const std::byte* const send;
  std::byte* const recv;
  const std::size_t bytes;
  const CountedAs counted;
  CallDescriptor own;       ///< what this rank means
  CallDescriptor header{};  ///< what the sender says
  std::size_t header_done = 0;
  std::size_t data_done = 0;
  bool direct = false;  ///< of a send: the receiver reads the data where it lies
  bool put = false;     ///< of a send: nothing is left to put into the ring
  bool done = false;

  [[nodiscard]] bool sends() const { return kind == CollectiveKind::kSend; }
  [[nodiscard]] bool header_complete() const { return header_done == sizeof(CallDescriptor); }
};

/// Sends and receives that begin together. They are under way in the engine as long as this lives.
class SharedMemoryEngine::Points {
 public:
  Points(SharedMemoryEngine& engine, std::span<const Collective> calls, bool started)
      : engine_(engine), started_(started) {
    points_.reserve(calls.size());
    engine.points_.reserve(engine.points_.size() + calls.size());
    for (const Collective& call : calls) begin(call);
    for (Point& point : points_) engine.points_.push_back(&point);
    left_ = points_.size();
    if (started_) engine.started_ += left_;
  }
  Points(const Points&) = delete;
  Points& operator=(const Points&) = delete;
  ~Points() {
    if (left_ > 0) give_up();
    if (engine_.points_.empty()) return;
    std::erase_if(engine_.points_, [this](const Point* point) {
      return point >= points_.data() && point < points_.data() + points_.size();
    });
  }

  [[nodiscard]] const std::vector<Point>& points() const { return points_; }
  [[nodiscard]] bool done() const { return left_ == 0; }
  [[nodiscard]] bool started() const { return started_; }
  void end_one() {
    --left_;
    if (started_) --engine_.started_;
  }

 private:
  void begin(const Collective& call);
  void give_up() noexcept;

  SharedMemoryEngine& engine_;
  const bool started_;
  std::vector<Point> points_;  // which do not move
  std::size_t left_ = 0;       // not done
};

void SharedMemoryEngine::Points::begin(const Collective& call) {
  SharedMemoryEngine& engine = engine_;
  const auto peer = static_cast<std::size_t>(call.root);
  const bool sends = call.kind == CollectiveKind::kSend;
  std::uint64_t& sequence = sends ? engine.sent_[peer] : engine.received_[peer];
  if (sends && sequence == 0) {
    engine.held_bytes_ += kRingBytes;
    if (engine.options_.ledger)
      engine.ring_holds_.push_back(engine.options_.ledger->hold({-1, MemoryState::kControl}, kRingBytes));
  }
  ZR_FAILPOINT_OF("shm.*.start", name_of(call.kind));
  points_.push_back({.all = *this,
                     .kind = call.kind,
                     .peer = call.root,
                     .send = call.send,
                     .recv = call.recv,
                     .bytes = message_bytes(call),
                     .counted = CountedAs(call),
                     .own = describe_call(call, sequence++)});
  Point& point = points_.back();
  if (sends && point.bytes > (started_ ? kStartedDirectBytes : kDirectBytes)) engine.send_directly(point);
  if (!sends) point.header = point.own;
}

/// See [Note: Given up]. The group is broken: messages of a pair come in order. A forked child that drops its copy
/// gives up nothing.
void SharedMemoryEngine::Points::give_up() noexcept {
  if (started_) engine_.started_ -= left_;
  if (::getpid() != engine_.owner_) return;
  for (const Point& point : points_) {
    if (point.done || !point.sends()) continue;
    SharedWord& given_up = engine_.link(engine_.rank_, point.peer).given_up;
    const std::uint64_t known = given_up.load();  // a stack unwinds from the last ones to the first
    if (known == 0 || point.own.sequence + 1 < known) given_up.store(point.own.sequence + 1);
  }
  engine_.notify();
}

/// The data stays where it lies, if its receiver can read it there.
void SharedMemoryEngine::send_directly(Point& point) const {
  Location place = find(point.send, point.bytes);
  const GroupControl& theirs = *controls_[static_cast<std::size_t>(point.peer)];
  if (place.window == kPrivateMemory && theirs.reads_private.load() == 0) place = {};
  point.own.send_window = place.window;
  point.own.send_offset = place.offset;
  point.direct = place.window != -1;
}

void SharedMemoryEngine::run_points(std::span<const Collective> calls) {
  Points points(*this, calls, false);
  peers_->throw_if_aborted(view(), [&] { return context_of(points); });
  await(points);
}

// A wait for each piece: the deadline is of one that does not come, however long the message.
void SharedMemoryEngine::await(Points& points) {
  while (!points.done()) {
    const std::uint64_t before = moves_;
    const auto moved = [&] {
      move_points();
      return points.done() || moves_ != before;
    };
    peers_->wait(view(), moved, [&] { return context_of(points); });
  }
}

WaitContext SharedMemoryEngine::context_of(const Points& points) const {
  WaitContext waited;
  const Point* first = nullptr;
  for (const Point& point : points.points()) {
    if (point.done) continue;
    waited.ranks.push_back(point.peer);
    if (first == nullptr) first = &point;
  }
  if (first == nullptr) return waited;
  waited.what = text_of(first->own, tag_names_);
  if (waited.ranks.size() > 1) waited.what += fmt::format(", and {} more", waited.ranks.size() - 1);
  waited.names_ranks = true;
  waited.unit = meaning_of(first->own, tag_names_);
  waited.progress = [first] {
    return fmt::format("{} of {} B {}", first->data_done, first->bytes, first->sends() ? "sent" : "received");
  };
  return waited;
}

// Messages between two ranks in one direction go one after the other: a receive when the one before has come, a send
// when the ring has all that it gets of the one before.
void SharedMemoryEngine::move_points() {
  if (moves_points_) return;
  moves_points_ = true;
  const auto leave = [](bool* inside) { *inside = false; };
  const std::unique_ptr<bool, decltype(leave)> inside(&moves_points_, leave);
  moved_ranks_.clear();
  bool ended = false;
  for (Point* const point : points_) {
    const auto peer = static_cast<std::size_t>(point->peer);
    const bool is_next =
        point->sends() ? point->put || put_[peer] == point->own.sequence : taken_[peer] == point->own.sequence;
    if (!is_next || !progress(*point)) continue;
    ended = ended || point->done;
    moved_ranks_.push_back(world_ranks_[peer]);
  }
  if (moved_ranks_.empty()) return;
  ++moves_;
  if (ended) std::erase_if(points_, [](const Point* point) { return point->done; });
  peers_->notify(moved_ranks_);
}

bool SharedMemoryEngine::move_started() {
  if (first_error_ || moves_points_) return false;
  first_error_.guard([this] { move_points(); });
  if (started_ == 0) points_progress_.reset();  // the wait that called this still holds it
  return started_ > 0;
}

/// What was started, in the waits of all groups of the rank.
class SharedMemoryEngine::PointsProgress final : public Progress {
 public:
  explicit PointsProgress(SharedMemoryEngine& engine) : engine_(engine) {}
  bool advance() override { return engine_.move_started(); }
  void set_awaited(int /*rank*/) override {}
  void clear_awaited() noexcept override {}

 private:
  SharedMemoryEngine& engine_;
};

class SharedMemoryEngine::StartedPoints final : public PendingPoints {
 public:
  StartedPoints(std::shared_ptr<SharedMemoryEngine> engine, std::span<const Collective> calls)
      : engine_(std::move(engine)), points_(*engine_, calls, true) {}
  ~StartedPoints() override {
    if (points_.done() || engine_->first_error_) return;
    try {
      throw given_up(fmt::format("{} group={}", engine_->where_, engine_->group_),
                     fmt::format("rank {}/{}", engine_->rank_, engine_->size_));
    } catch (...) {
      engine_->first_error_.set(std::current_exception());
    }
  }

  /// The first look.
  void begin() {
    engine_->peers_->throw_if_aborted(engine_->view(), [this] { return engine_->context_of(points_); });
    engine_->move_points();
    if (points_.done() || engine_->points_progress_) return;
    engine_->points_progress_ = std::make_shared<PointsProgress>(*engine_);
    engine_->peers_->progress.add(engine_->points_progress_);
  }

  bool done() override {
    if (points_.done()) return true;
    engine_->first_error_.guard([this] {
      if (!move()) look_for_peers();
    });
    return points_.done();
  }

  void wait() override {
    if (points_.done()) return;
    engine_->first_error_.guard([this] { engine_->await(points_); });
  }

 private:
  bool move() {
    engine_->move_points();
    return points_.done();
  }

  /// From time to time: it costs a call of the system for each rank.
  void look_for_peers() {
    const auto now = SteadyClock::now();
    if (now < next_look_) return;
    next_look_ = now + kWaitSlice;
    ZR_FAILPOINT("shm.look");
    // A peer that refused the message, or took it, may have left since the last look.
    engine_->peers_->check(
        engine_->view(), Deadline(kWaitSlice), [this] { return move(); },
        [this] { return engine_->context_of(points_); });
  }

  std::shared_ptr<SharedMemoryEngine> engine_;
  Points points_;
  SteadyClock::time_point next_look_{};
};

std::unique_ptr<PendingPoints> SharedMemoryEngine::start(const std::shared_ptr<SharedMemoryEngine>& engine,
                                                         std::span<const Collective> points) {
  std::unique_ptr<StartedPoints> started;
  engine->first_error_.guard([&] {
    started = std::make_unique<StartedPoints>(engine, points);
    started->begin();
  });
  return started;
}

bool SharedMemoryEngine::progress(Point& point) {
  const bool moved = point.sends() ? progress_send(point) : progress_recv(point);
  if (!point.done) return moved;
  point.all.end_one();
  const std::size_t bytes = point.sends() ? 0 : point.bytes;
  report({.group = group_,
          .kind = point.counted.kind,
          .calls = point.counted.calls,
          .bytes = bytes,
          .far_bytes = nodes_.is_far(rank_, point.peer) ? bytes : 0,
          .control_bytes = point.sends() ? 0 : sizeof(CallDescriptor)});
  return true;
}

bool SharedMemoryEngine::progress_send(Point& point) {
  const PeerLink& theirs = link(point.peer, rank_);
  if (theirs.refused.load() != 0) {
    peers_->watched().tell_and_throw(mismatch_error({theirs.offered, rank_}, {theirs.wanted, point.peer}, size_,
                                                    fmt::format("{} group={}", where_, group_), tag_names_));
  }
  const std::size_t before = point.header_done + point.data_done;
  if (!point.header_complete()) {
    if (point.header_done == 0) {
      // Nobody waits for a started send, so nobody may look for long: what does not fit goes without this rank.
      const std::size_t room = kRingBytes - in_ring(rank_, point.peer);
      if (point.all.started() && !point.direct && point.bytes > 0 && room < sizeof(CallDescriptor) + point.bytes)
        send_directly(point);
      point.header = point.own;
    }
    point.header_done += put(point.peer, std::as_bytes(std::span(&point.header, 1)).subspan(point.header_done));
    ZR_FAILPOINT_OF("shm.*.data", name_of(point.kind));
  }
  if (point.header_complete() && !point.direct) {
    const std::span<const std::byte> data(point.send, point.bytes);
    point.data_done += put(point.peer, data.subspan(point.data_done));
    point.done = point.data_done == data.size();
  } else if (point.header_complete()) {
    point.done = theirs.received.load() > point.own.sequence;
  }
  if (!point.put && point.header_complete() && (point.direct || point.done)) {
    point.put = true;
    ++put_[static_cast<std::size_t>(point.peer)];
  }
  return point.header_done + point.data_done > before;
}

bool SharedMemoryEngine::progress_recv(Point& point) {
  const std::size_t before = point.header_done + point.data_done;
  if (!point.header_complete()) {
    point.header_done +=
        take(point.peer, std::as_writable_bytes(std::span(&point.header, 1)).subspan(point.header_done));
    if (point.header_complete()) compare(point);
    ZR_FAILPOINT_OF("shm.*.data", name_of(point.kind));
  }
  const std::span<std::byte> data(point.recv, point.bytes);
  if (point.header_complete() && point.header.send_window != -1) {
    fetch_message(point, data);
  } else if (point.header_complete()) {
    point.data_done += take(point.peer, data.subspan(point.data_done));
  }
  point.done = point.header_complete() && point.data_done == data.size();
  const bool moved = point.header_done + point.data_done > before;
  if (point.done) {
    ++taken_[static_cast<std::size_t>(point.peer)];
    link(rank_, point.peer).received.store(point.own.sequence + 1);
  } else if (!moved) {
    throw_if_given_up(point);
  }
  return moved;
}

void SharedMemoryEngine::fetch_message(Point& point, std::span<std::byte> data) {
  const CallDescriptor& sent = point.header;
  try {
    fetch(data, source_at(point.peer, sent, sent.send_window, sent.send_offset, data.size()), point.own);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kResource) throw_if_given_up(point);
    throw;
  }
  throw_if_given_up(point);
  point.data_done = data.size();
}

void SharedMemoryEngine::throw_if_given_up(const Point& point) {
  const std::uint64_t given_up = link(point.peer, rank_).given_up.load();
  if (given_up == 0 || point.own.sequence + 1 < given_up) [[likely]]
    return;
  // Why it did so, the others hear within a moment: from who stops the job, or leaves.
  const Deadline deadline(WatchedWait::kLastWord);
  wait_for(point.peer, point.own, [&] { return deadline.passed(); });
  throw Error(ErrorCode::kPeerLost, fmt::format("rank {} gave up a message before it had come", point.peer),
              {.where = fmt::format("{} group={}", where_, group_),
               .who = fmt::format("rank {}/{}", rank_, size_),
               .which = meaning_of(point.own, tag_names_),
               .expected = text_of(point.own, tag_names_),
               .hint = "look at the output of that rank: an exception ended what it was doing"});
}

void SharedMemoryEngine::compare(Point& point) {
  if (same_message(point.header, point.own)) [[likely]]
    return;
  PeerLink& mine = link(rank_, point.peer);
  mine.wanted = point.own;
  mine.offered = point.header;
  mine.refused.store(1);
  notify();
  peers_->watched().tell_and_throw(mismatch_error({point.own, rank_}, {point.header, point.peer}, size_,
                                                  fmt::format("{} group={}", where_, group_), tag_names_));
}

std::size_t SharedMemoryEngine::in_ring(int from, int to) const {
  const std::uint64_t bytes = link(from, to).filled.load() - link(to, from).taken.load();
  ZR_CHECK(bytes <= kRingBytes, ErrorCode::kInternal,
           fmt::format("the words about messages from rank {} to rank {} are damaged", from, to),
           {.where = fmt::format("{} group={}", where_, group_),
            .who = fmt::format("rank {}/{}", rank_, size_),
            .expected = fmt::format("at most {} bytes on their way", kRingBytes),
            .got = std::to_string(bytes),
            .hint = "something wrote where it should not: run the program under an address sanitizer"});
  return static_cast<std::size_t>(bytes);
}

std::size_t SharedMemoryEngine::put(int peer, std::span<const std::byte> bytes) {
  const std::size_t length = std::min(kRingBytes - in_ring(rank_, peer), bytes.size());
  if (length == 0) return 0;
  SharedWord& filled = link(rank_, peer).filled;
  const std::uint64_t before = filled.load();
  const std::size_t at = before % kRingBytes;
  const std::size_t first = std::min(length, kRingBytes - at);
  std::byte* const ring = ring_towards(rank_, peer);
  // Ordinary copies, not streaming ones: the other rank reads them from the cache.
  std::memcpy(ring + at, bytes.data(), first);
  if (length > first) std::memcpy(ring, bytes.data() + first, length - first);
  filled.store(before + length);
  return length;
}

std::size_t SharedMemoryEngine::take(int peer, std::span<std::byte> bytes) {
  const std::size_t length = std::min(in_ring(peer, rank_), bytes.size());
  if (length == 0) return 0;
  SharedWord& taken = link(rank_, peer).taken;
  const std::uint64_t before = taken.load();
  const std::size_t at = before % kRingBytes;
  const std::size_t first = std::min(length, kRingBytes - at);
  const std::byte* const ring = ring_towards(peer, rank_);
  std::memcpy(bytes.data(), ring + at, first);
  if (length > first) std::memcpy(bytes.data() + first, ring, length - first);
  taken.store(before + length);
  return length;
}

}  // namespace zeroth::detail
