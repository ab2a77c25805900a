#include "comm/shm/segment_backend.h"

#include "comm/matched_calls.h"
#include "comm/started_points.h"

#include <utility>
#include <vector>

namespace zeroth::detail {

Work SegmentBackend::submit(std::span<const Collective> collectives, const Stream& stream) {
  WorkInfo info = validated(collectives, rank(), size(), engine_->where());
  Peers& peers = engine_->peers();
  stream.order_after(peers.last_call);
  enqueue_calls(stream, collectives, engine_, &SharedMemoryEngine::run);
  peers.last_call = stream.record();
  return {peers.last_call, std::move(info)};
}

std::unique_ptr<PendingPoints> SegmentBackend::start(std::span<const Collective> points, const Stream& stream) {
  validate_points(points, rank(), size(), engine_->where());
  stream.synchronize();
  finish_earlier_calls();
  return SharedMemoryEngine::start(engine_, points);
}

/// attach() and split() are collectives too: they come after what this rank has already enqueued.
void SegmentBackend::finish_earlier_calls() {
  engine_->peers().last_call.wait();
}

std::unique_ptr<CommBackend> SegmentBackend::split(int color, int key, std::string_view name) {
  finish_earlier_calls();
  std::shared_ptr<SharedMemoryEngine> part = engine_->split(color, key, name);
  if (!part) return nullptr;
  return std::make_unique<SegmentBackend>(std::move(part));
}

PeerWindow SegmentBackend::attach(const Arena& arena, std::string_view name) {
  finish_earlier_calls();
  return engine_->attach(arena, name);
}

}  // namespace zeroth::detail
