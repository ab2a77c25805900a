// Decorators of CommBackend: one counts, one records, one compares calls. They hold the seat that they wrap.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/rank_watch.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace zeroth {

class ControlPlane;

/// Received from other ranks, by kind.
struct TrafficRow {
  std::uint64_t calls = 0;
  std::uint64_t bytes = 0;
  std::uint64_t one_sided_calls = 0;
  std::uint64_t one_sided_bytes = 0;
  std::uint64_t far_bytes = 0;  ///< of both, from other nodes
  TrafficRow& operator+=(const TrafficRow& other);
  bool operator==(const TrafficRow&) const = default;
};

/// Traffic by group and kind. Thread safe; may be shared by several seats.
class TrafficTable final : public TrafficObserver {
 public:
  void observe(const TrafficEvent& event) noexcept override;

  [[nodiscard]] TrafficRow row(std::string_view group, CollectiveKind kind) const;
  /// Sum over groups.
  [[nodiscard]] TrafficRow row(CollectiveKind kind) const;
  /// Payload bytes of all groups and kinds, matched and one-sided.
  [[nodiscard]] std::uint64_t bytes() const;
  /// Of these, what came from ranks on other nodes.
  [[nodiscard]] std::uint64_t far_bytes() const;
  [[nodiscard]] std::uint64_t control_bytes() const;
  /// One line per group and kind.
  [[nodiscard]] std::string text() const;
  void reset();

 private:
  using Rows = std::array<TrafficRow, kNumCollectiveKinds>;
  mutable std::mutex mutex_;
  std::map<std::string, Rows, std::less<>> groups_;
  std::uint64_t control_bytes_ = 0;
};

/// Passes everything on. Base of decorators.
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

/// Counts into a table, which may outlive it. Parts made by split() count into the same table under their own
/// group names.
class CountingBackend final : public ForwardingBackend {
 public:
  CountingBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<TrafficTable> table);
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  [[nodiscard]] const TrafficTable& table() const { return *table_; }

 private:
  std::shared_ptr<TrafficTable> table_;
};

/// Writes every call, and every wait_until(), into the rank's flight recorder, and makes none once the job has been
/// judged. A mismatch that a wait finds by itself, in memory that only this rank looked at, is told to all ranks, and
/// so is an abort. Parts made by split() do the same.
class RecordingBackend final : public ForwardingBackend {
 public:
  /// `control` lives as long as this and its parts; null: there is nobody to tell.
  RecordingBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<RankWatch> watch,
                   std::shared_ptr<ControlPlane> control = nullptr);
  ~RecordingBackend() override;
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override;
  void abort(const Error& error) noexcept override;
  void set_tag_names(TagNames names) override;

 private:
  [[nodiscard]] std::int32_t about(const MessageTag& tag);

  std::shared_ptr<ControlPlane> control_;
  std::shared_ptr<RankWatch> watch_;
  std::int32_t group_;
  std::uint64_t calls_ = 0;
  std::atomic<std::uint64_t> waits_{0};
  TagNames tag_names_;
  std::unordered_map<std::uint64_t, std::int32_t> abouts_;  ///< by unit and label: of FlightRecorder::names()
};

/// For transports whose calls do not carry what ranks compare (MPI's own algorithms; NCCL): before each matched call
/// every rank hears 16 bytes of every other one over another transport, and where they differ, the whole description: a
/// skipped, swapped, differently sized or typed call is kMismatch on every rank, with both sides, and the call is not
/// made. The counts of an all_to_all are compared between all ranks, too. Costs two rounds of small messages a call.
/// Sends and receives are left to the transport. As with any transport, a rank that makes no call at all is waited for
/// until the deadline.
class CheckedBackend final : public ForwardingBackend {
 public:
  /// `inner` makes its calls in tasks of the stream: a comparison fails the stream, which is what keeps them back.
  /// (NCCL's seat does not, so it has this one as a gate that makes no calls.) `side`: a seat in a group of the same
  /// ranks in the same order, over a transport that compares calls itself. Nobody else makes calls in it.
  CheckedBackend(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> side);
  [[nodiscard]] std::size_t memory_bytes() const override;
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  void abort(const Error& error) noexcept override;
  void set_observer(std::shared_ptr<TrafficObserver> observer) override;
  void set_tag_names(TagNames names) override;

 private:
  class Comparison;
  void follow(const Work& work, const Stream& stream);
  CheckedBackend(std::unique_ptr<CommBackend> inner, std::unique_ptr<CommBackend> side,
                 std::shared_ptr<Event> last_call);
  std::shared_ptr<Comparison> comparison_;
  std::shared_ptr<Event> last_call_;  ///< of this rank, in this group or in the parts that it was split into:
                                      ///< comparisons have one order, too
};

}  // namespace zeroth
