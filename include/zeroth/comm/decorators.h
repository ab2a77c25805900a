// Decorators of CommBackend: they count, record or compare calls, plant faults, or emulate slow links. Each owns the
// backend that it wraps.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/rank_activity.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace zeroth {

class ControlPlane;

/// Calls, and bytes received from other ranks, of one kind of call.
struct TrafficRow {
  std::uint64_t calls = 0;
  std::uint64_t bytes = 0;
  std::uint64_t one_sided_calls = 0;
  std::uint64_t one_sided_bytes = 0;
  std::uint64_t far_bytes = 0;  ///< part of both byte counts that came from other nodes
  TrafficRow& operator+=(const TrafficRow& other);
  bool operator==(const TrafficRow&) const = default;
};

/// Traffic by group and kind. Thread safe; may be shared by several groups.
class TrafficTable final : public TrafficObserver {
 public:
  void observe(const TrafficEvent& event) noexcept override;

  [[nodiscard]] TrafficRow row(std::string_view group, CollectiveKind kind) const;
  /// Sum over groups.
  [[nodiscard]] TrafficRow row(CollectiveKind kind) const;
  /// Payload bytes of all groups and kinds, matched and one-sided.
  [[nodiscard]] std::uint64_t bytes() const;
  /// The part of bytes() that came from ranks on other nodes.
  [[nodiscard]] std::uint64_t far_bytes() const;
  [[nodiscard]] std::uint64_t control_bytes() const;
  /// One line per group and kind.
  [[nodiscard]] std::string text() const;
  void reset();
  /// Forgets one group.
  void reset(std::string_view group);

 private:
  using Rows = std::array<TrafficRow, kNumCollectiveKinds>;
  mutable std::mutex mutex_;
  std::map<std::string, Rows, std::less<>> groups_;
  std::uint64_t control_bytes_ = 0;
};

/// Passes every call on. Base of the decorators.
class ForwardingBackend : public CommBackend {
 public:
  explicit ForwardingBackend(std::unique_ptr<CommBackend> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] const std::string& group_name() const override { return inner_->group_name(); }
  [[nodiscard]] std::string_view kind() const override { return inner_->kind(); }
  [[nodiscard]] Capabilities capabilities() const override { return inner_->capabilities(); }
  [[nodiscard]] std::size_t memory_bytes() const override { return inner_->memory_bytes(); }
  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    return inner_->submit(collectives, stream);
  }
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    return inner_->start(points, stream);
  }
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    return inner_->split(color, key, name);
  }
  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name) override {
    return inner_->attach(arena, name);
  }
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    inner_->wait_until(predicate, context);
  }
  void notify() override { inner_->notify(); }
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    return inner_->add_progress(std::move(progress));
  }
  void check_peers(const WaitContext& context) override { inner_->check_peers(context); }
  void abort(const Error& error) noexcept override { inner_->abort(error); }
  [[nodiscard]] std::span<const int> node_sizes() const override { return inner_->node_sizes(); }
  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override {
    inner_->count_one_sided(kind, peer, bytes);
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override { inner_->set_observer(std::move(observer)); }
  void set_tag_names(TagNames names) override { inner_->set_tag_names(std::move(names)); }

 protected:
  [[nodiscard]] CommBackend& inner() const { return *inner_; }

 private:
  std::unique_ptr<CommBackend> inner_;
};

/// Counts traffic in a table, which it shares. Parts made by split() count in the same table under their own group
/// names.
class CountingBackend final : public ForwardingBackend {
 public:
  CountingBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<TrafficTable> table);
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  [[nodiscard]] const TrafficTable& table() const { return *table_; }
  /// Forgets what was counted in this group.
  void reset() const { table_->reset(group_name()); }

 private:
  std::shared_ptr<TrafficTable> table_;
};

/// Records every call and every wait_until() in the rank's flight recorder. After the job's verdict it makes no more
/// calls. It tells all ranks about an abort, and about a mismatch that a one-sided wait of this rank has found. Parts
/// made by split() do the same.
class RecordingBackend final : public ForwardingBackend {
 public:
  /// `control` and `activity` are shared. Null `control`: errors are not told.
  RecordingBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<RankActivity> activity,
                   std::shared_ptr<ControlPlane> control = nullptr);
  ~RecordingBackend() override;
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override;
  void abort(const Error& error) noexcept override;
  void set_tag_names(TagNames names) override;

 private:
  /// A record for each of the calls.
  [[nodiscard]] std::vector<std::uint64_t> begin(std::span<const Collective> calls);
  [[nodiscard]] std::int32_t about(const MessageTag& tag);

  std::shared_ptr<ControlPlane> control_;
  std::shared_ptr<RankActivity> activity_;
  std::int32_t group_;
  std::uint64_t calls_ = 0;
  std::atomic<std::uint64_t> waits_{0};
  TagNames tag_names_;
  std::unordered_map<std::uint64_t, std::int32_t> abouts_;  ///< by unit and label: of FlightRecorder::names()
};

/// Compares calls for transports that do not compare them (MPI's own algorithms; NCCL). Before each collective every
/// rank gets 16 bytes of every other rank over another transport, and the whole description if they differ. A skipped
/// or swapped call, or one of another size or type, is kMismatch on every rank, with both sides, and the call is not
/// made. The counts of an all_to_all are compared between all ranks too. Sends and receives are not compared. Costs two
/// rounds of small messages per call. A rank that makes no call is awaited until the deadline, as with any transport.
class CheckedBackend final : public ForwardingBackend {
 public:
  /// `inner` must make its calls in tasks of the stream: a failed comparison fails the stream, so they do not run.
  /// (The backend over NCCL does not do this and uses this class as a gate that makes no calls.) `side`: a group of the
  /// same ranks in the same order, over a transport that compares calls; no other code may make calls on it. Owns both.
  CheckedBackend(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> side);
  [[nodiscard]] std::size_t memory_bytes() const override;
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override;
  void abort(const Error& error) noexcept override;
  void set_observer(std::shared_ptr<TrafficObserver> observer) override;
  void set_tag_names(TagNames names) override;

 private:
  class Comparison;
  void follow(const Work& work, const Stream& stream);
  CheckedBackend(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> side,
                 std::shared_ptr<Event> last_call);
  std::shared_ptr<Comparison> comparison_;
  std::shared_ptr<Event> last_call_;  ///< of this rank, in this group and the parts split from it: comparisons
                                      ///< have one order
};

}  // namespace zeroth
