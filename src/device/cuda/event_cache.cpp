#include "device/cuda/event_cache.h"

namespace zeroth::detail {

EventCache::~EventCache() {
  for (void* const event : idle_) (void)cuda_.event_destroy(event);
}

std::shared_ptr<void> EventCache::take() {
  void* event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    } else {
      idle_.reserve(made_ + 1);  // so that putting back needs no memory
      const CudaDeviceScope scope(cuda_, device_, where_);
      check_cuda(cuda_, cuda_.event_create(&event, kCudaEventDisableTiming), "an event", where_);
      ++made_;
    }
  }
  return {event, [cache = shared_from_this()](void* given) { cache->put_back(given); }};
}

std::size_t EventCache::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

std::size_t EventCache::idle() const {
  const std::lock_guard lock(mutex_);
  return idle_.size();
}

void EventCache::put_back(void* event) noexcept {
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

}  // namespace zeroth::detail
