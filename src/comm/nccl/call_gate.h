// The call gate: ranks compare a call before any of them gives it to NCCL (CommOptions::check_calls). The board is
// there in any case; it compares without a meeting, and so after the data.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/comm/backend.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::detail {

/// The ranks of a group over NCCL, seen by the CheckedBackend that compares their calls. It makes none: NCCL does, once
/// they have passed.
class NoCalls final : public CommBackend {
 public:
  explicit NoCalls(const CommBackend& base)
      : rank_(base.rank()),
        size_(base.size()),
        name_(base.group_name()),
        node_sizes_(base.node_sizes().begin(), base.node_sizes().end()) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] const std::string& group_name() const override { return name_; }
  [[nodiscard]] std::string_view kind() const override { return "nccl"; }
  [[nodiscard]] Capabilities capabilities() const override { return {}; }
  [[nodiscard]] std::size_t memory_bytes() const override { return 0; }
  [[nodiscard]] std::span<const int> node_sizes() const override { return node_sizes_; }
  Work submit(std::span<const Collective> /*collectives*/, const Stream& /*stream*/) override { return {}; }
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> /*points*/,
                                                     const Stream& /*stream*/) override {
    refuse("start()");
  }
  [[nodiscard]] std::unique_ptr<CommBackend> split(int /*color*/, int /*key*/, std::string_view /*name*/) override {
    refuse("split()");
  }
  [[nodiscard]] PeerWindow attach(const Arena& /*arena*/, std::string_view /*name*/) override { refuse("attach()"); }
  void wait_until(const std::function<bool()>& /*predicate*/, const WaitContext& /*context*/) override {
    refuse("wait_until()");
  }
  void notify() override {}
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> /*progress*/) override { return 0; }  // it never waits
  void check_peers(const WaitContext& /*context*/) override {}                                 // the base is asked
  void abort(const Error& /*error*/) noexcept override {}
  void count_one_sided(CollectiveKind /*kind*/, int /*peer*/, std::uint64_t /*bytes*/) override {}
  void set_observer(std::shared_ptr<TrafficObserver> /*observer*/) override {}
  void set_tag_names(TagNames /*names*/) override {}

 private:
  [[noreturn]] static void refuse(std::string_view call) {
    throw Error(ErrorCode::kInternal, "the backend behind the gate has no calls of its own",
                {.where = "comm.nccl", .which = std::string(call)});
  }

  int rank_;
  int size_;
  std::string name_;
  std::vector<int> node_sizes_;
};

/// One a rank and group; one thread at a time. Messages between two ranks do not come here.
class CallGate {
 public:
  /// Collective over `base`, of which it splits a group for the comparisons; blocks. `base` outlives it.
  explicit CallGate(CommBackend& base)
      : base_(base),
        device_(make_cpu_device()),
        stream_(device_->make_stream("gate")),
        checked_(std::make_unique<NoCalls>(base), side_of(base)) {}

  /// Blocks the host until every rank of the group has come. Throws kMismatch with both sides where one makes another
  /// call, and what the base throws for a rank that is lost, aborts or does not come; then nobody has passed.
  void pass(const Collective& call) {
    base_.submit({}, stream_).wait();  // calls of the base that were submitted before may wait in a stream that runs
                                       // later, on another rank not
    checked_.submit({&call, 1}, stream_).wait();
  }

  [[nodiscard]] std::size_t memory_bytes() const { return checked_.memory_bytes(); }
  void set_observer(std::shared_ptr<TrafficObserver> observer) { checked_.set_observer(std::move(observer)); }
  void set_tag_names(TagNames names) { checked_.set_tag_names(std::move(names)); }

 private:
  static std::unique_ptr<CommBackend> side_of(CommBackend& base) {
    std::unique_ptr<CommBackend> side = base.split(0, base.rank(), "checks");
    side->set_observer(nullptr);  // what ranks say there is reported as control bytes of the group
    return side;
  }

  CommBackend& base_;
  std::unique_ptr<Device> device_;
  Stream stream_;
  CheckedBackend checked_;
};

}  // namespace zeroth::detail
