// Sends and receives between two ranks, over messages.
#pragma once

#include "comm/call_descriptor.h"
#include "comm/function_ref.h"
#include "comm/matched_calls.h"
#include "comm/messages/message_links.h"

#include <zeroth/comm/collective.h>
#include <zeroth/comm/traffic.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace zeroth::detail {

/// Those of one group, under way. Run by one thread at a time.
///
/// Data of another length than its receive must not be on its way: so the receive of data is posted once its header has
/// come and is the right one. A send posts both at once. Of each sender one header is awaited at a time, and what is
/// posted for it is in the order header, data, header, ...: a transport that looks at the transfers of two ranks one
/// after the other sees none late.
class MessagePoints {
 public:
  /// Told of each message that is done.
  using Report = FunctionRef<void(const TrafficEvent&)>;

  /// `links` outlives it.
  explicit MessagePoints(const MessageLinks& links);

  struct Point;
  /// Messages that begin together. Those that are not done when it goes are cancelled.
  class Batch {
   public:
    /// Posts what can be posted.
    Batch(MessagePoints& points, std::span<const Collective> calls);
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch();
    [[nodiscard]] bool done() const { return left_ == 0; }

   private:
    friend class MessagePoints;
    MessagePoints& points_;
    std::vector<std::unique_ptr<Point>> own_;
    std::size_t left_ = 0;
  };

  [[nodiscard]] bool empty() const { return under_way_.empty(); }
  /// Goes on with all messages; whether anything has come or gone.
  bool move(const Report& report);
  /// Blocks until all of `batch` are done. Throws the errors of waits, and kMismatch.
  void await(Batch& batch, const Report& report);
  /// Throws kAborted, as far as this is known, with the call for which it is asked.
  void check(const Batch& batch) const;

 private:
  struct Awaited {
    Transfer* transfer = nullptr;
    const Point* of = nullptr;
  };
  void post_header(Point& point);
  void take_header(Point& point);
  bool move(Point& point);
  void end(Point& point, const Report& report);
  /// What `batch` cannot go on without.
  [[nodiscard]] Awaited awaited(const Batch& batch) const;

  const MessageLinks& links_;
  std::vector<std::uint64_t> sent_;    // messages to each rank, begun
  std::vector<std::uint64_t> taken_;   // messages from each rank, begun
  std::vector<std::uint64_t> posted_;  // of these, those for whose data a receive is posted
  std::vector<Point*> under_way_;      // in the order of their beginning
  bool moving_ = false;                // a wait inside does not come in again
};

}  // namespace zeroth::detail
