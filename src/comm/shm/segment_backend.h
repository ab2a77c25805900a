// SegmentBackend: CommBackend on top of a SharedMemoryEngine; `inproc` and `shm` are this with different
// exchanges.
#pragma once

#include "comm/shm/shared_memory_engine.h"

#include <memory>
#include <string>
#include <utility>

namespace zeroth::detail {

class SegmentBackend final : public CommBackend {
 public:
  explicit SegmentBackend(std::shared_ptr<SharedMemoryEngine> engine) : engine_(std::move(engine)) {}
  ~SegmentBackend() override { engine_->depart(); }

  [[nodiscard]] int rank() const override { return engine_->rank(); }
  [[nodiscard]] int size() const override { return engine_->size(); }
  [[nodiscard]] const std::string& group_name() const override { return engine_->group(); }
  [[nodiscard]] std::string_view kind() const override { return engine_->exchange().kind(); }
  [[nodiscard]] Capabilities capabilities() const override { return engine_->exchange().capabilities(); }
  [[nodiscard]] std::span<const int> node_sizes() const override { return engine_->nodes().sizes; }
  [[nodiscard]] std::size_t memory_bytes() const override { return engine_->memory_bytes(); }
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  [[nodiscard]] PeerWindow attach(const Arena& arena, std::string_view name) override;
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    engine_->wait_until(predicate, context);
  }
  void notify() override { engine_->notify(); }
  [[nodiscard]] int add_progress(std::weak_ptr<Progress> progress) override {
    engine_->peers().progress.add(std::move(progress));
    return engine_->peers().job_rank();
  }
  void check_peers(const WaitContext& context) override { engine_->check_peers(context); }
  void abort(const Error& error) noexcept override { engine_->peers().abort(error); }
  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override {
    engine_->count_one_sided(kind, peer, bytes);
  }
  void set_observer(std::shared_ptr<TrafficObserver> observer) override { engine_->set_observer(std::move(observer)); }
  void set_tag_names(TagNames names) override { engine_->set_tag_names(std::move(names)); }

 private:
  void finish_earlier_calls();

  std::shared_ptr<SharedMemoryEngine> engine_;
};

}  // namespace zeroth::detail
