#include "comm/messages/message_points.h"

#include <zeroth/base/failpoint.h>

#include <algorithm>
#include <utility>

namespace zeroth::detail {

struct MessagePoints::Point {
  Batch& all;  ///< that it is one of
  CollectiveKind kind;
  int peer;
  std::span<const std::byte> send;
  std::span<std::byte> recv;
  CountedAs counted;
  CallDescriptor own;
  CallDescriptor header;
  std::unique_ptr<Transfer> arriving{};  ///< of a receive: its header
  MessageLinks::Transfers moving{};      ///< of a send header and data, of a receive data
  bool headed = false;                   ///< of a receive: its header has come
  bool done = false;

  [[nodiscard]] bool sends() const { return kind == CollectiveKind::kSend; }
  [[nodiscard]] bool complete() const { return (sends() || headed) && moving.empty(); }
};

MessagePoints::MessagePoints(const MessageLinks& links) : links_(links) {
  for (auto* messages : {&sent_, &taken_, &posted_}) messages->resize(links.members().size());
}

MessagePoints::Batch::Batch(MessagePoints& points, std::span<const Collective> calls) : points_(points) {
  for (const Collective& call : calls) {
    const auto peer = static_cast<std::size_t>(call.root);
    const bool sends = call.kind == CollectiveKind::kSend;
    const std::size_t bytes = static_cast<std::size_t>(call.counts.front()) * size_of(call.in_dtype);
    const CallDescriptor own = describe_call(call, sends ? points.sent_[peer]++ : points.taken_[peer]++);
    own_.push_back(std::make_unique<Point>(Point{.all = *this,
                                                 .kind = call.kind,
                                                 .peer = call.root,
                                                 .send = {call.send, sends ? bytes : 0},
                                                 .recv = {call.recv, sends ? 0 : bytes},
                                                 .counted = CountedAs(call),
                                                 .own = own,
                                                 .header = own}));
  }
  points.under_way_.reserve(points.under_way_.size() + own_.size());
  for (const auto& point : own_) {
    if (!point->sends()) points.post_header(*point);
  }
  for (const auto& point : own_) {
    if (!point->sends()) continue;
    points.links_.send(point->moving, point->peer, MessageKind::kHeader, std::as_bytes(std::span(&point->own, 1)),
                       point->own);
    points.links_.send(point->moving, point->peer, MessageKind::kMessage, point->send, point->own);
  }
  ZR_FAILPOINT("messages.headers");
  for (const auto& point : own_) points.under_way_.push_back(point.get());
  left_ = own_.size();
}

MessagePoints::Batch::~Batch() {
  std::erase_if(points_.under_way_, [this](const Point* point) {
    return std::ranges::any_of(own_, [&](const auto& own) { return own.get() == point; });
  });
}

/// If it is the next one of its sender.
void MessagePoints::post_header(Point& point) {
  if (point.arriving || point.headed || posted_[static_cast<std::size_t>(point.peer)] != point.own.sequence) return;
  point.arriving = links_.expect_header(point.peer, point.header);
}

/// It has come: compares it, and posts the receive of the data.
void MessagePoints::take_header(Point& point) {
  point.arriving.reset();
  point.headed = true;
  if (!same_message(point.header, point.own)) {
    links_.job()->watched.tell_and_throw(mismatch_error({point.own, links_.rank()}, {point.header, point.peer},
                                                        links_.size(), links_.where_group(), links_.tag_names()));
  }
  links_.receive(point.moving, point.peer, MessageKind::kMessage, point.recv, point.own);
  ++posted_[static_cast<std::size_t>(point.peer)];
}

bool MessagePoints::move(Point& point) {
  bool moved = false;
  if (!point.sends() && !point.headed) {
    post_header(point);
    if (!point.arriving || !links_.look_at(*point.arriving, point.peer, point.own)) return false;
    take_header(point);
    moved = true;
  }
  std::size_t over = 0;  // in the order in which their ends become visible
  while (over < point.moving.size() && links_.look_at(*point.moving[over].transfer, point.peer, point.own)) ++over;
  point.moving.erase(point.moving.begin(), point.moving.begin() + static_cast<std::ptrdiff_t>(over));
  return moved || over > 0;
}

bool MessagePoints::move(const Report& report) {
  if (moving_ || under_way_.empty()) return false;
  moving_ = true;
  const auto leave = [](bool* inside) { *inside = false; };
  const std::unique_ptr<bool, decltype(leave)> inside(&moving_, leave);
  bool moved = false;
  bool ended = false;
  for (Point* const point : under_way_) {
    moved = move(*point) || moved;
    if (!point->complete()) continue;
    end(*point, report);
    moved = ended = true;
  }
  if (ended) std::erase_if(under_way_, [](const Point* point) { return point->done; });
  return moved;
}

void MessagePoints::end(Point& point, const Report& report) {
  point.done = true;
  --point.all.left_;
  const std::size_t bytes = point.recv.size();
  report({.group = links_.name(),
          .kind = point.counted.kind,
          .calls = point.counted.calls,
          .bytes = bytes,
          .far_bytes = links_.nodes().is_far(links_.rank(), point.peer) ? bytes : 0,
          .control_bytes = point.sends() ? 0 : sizeof(CallDescriptor)});
}

MessagePoints::Awaited MessagePoints::awaited(const Batch& batch) const {
  const Point* chosen = nullptr;
  for (const auto& point : batch.own_) {
    if (point->done) continue;
    if (chosen == nullptr) chosen = point.get();
    if (point->sends() || point->headed) continue;
    chosen = point.get();  // without a header nothing goes on; what is on its way does
    break;
  }
  if (chosen->moving.empty() && !chosen->arriving) {  // its turn comes after another one's header
    chosen = *std::ranges::find_if(under_way_, [&](const Point* point) {
      return !point->sends() && point->peer == chosen->peer && point->arriving;
    });
  }
  return {chosen->arriving ? chosen->arriving.get() : chosen->moving.front().transfer.get(), chosen};
}

void MessagePoints::await(Batch& batch, const Report& report) {
  constexpr Milliseconds kShort{1};
  MessageLinks::Waiting waiting = links_.begin_wait();
  while (!batch.done()) {
    if (move(report)) {
      links_.renew(waiting);
      continue;
    }
    const Awaited next = awaited(batch);
    // Another header must not be seen late: after it something is to be done here.
    const bool alone =
        std::ranges::none_of(under_way_, [&](const Point* point) { return point != next.of && point->arriving; });
    const Milliseconds slice = alone ? waiting.slice() : std::min(kShort, waiting.slice());
    if (!links_.wait_for(waiting, *next.transfer, slice, next.of->peer, next.of->own))
      links_.check_wait(waiting, next.of->peer, next.of->own);
  }
}

void MessagePoints::check(const Batch& batch) const {
  for (const auto& point : batch.own_) {
    if (!point->done) return links_.check_now(point->peer, point->own);
  }
}

}  // namespace zeroth::detail
