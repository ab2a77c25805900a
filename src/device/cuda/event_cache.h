// CUDA events that are used again: making one costs a call of the driver, and a step needs thousands.
#pragma once

#include "device/cuda/cuda_table.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zeroth::detail {

/// Events without timing, of one device. Thread safe. An event goes back when its last owner lets go; that may be
/// before it has happened: a stream that was told to wait for it waits for what was recorded then, whatever is recorded
/// later.
class EventCache : public std::enable_shared_from_this<EventCache> {
 public:
  EventCache(const CudaTable& cuda, int device, std::string where)
      : cuda_(cuda), device_(device), where_(std::move(where)) {}
  EventCache(const EventCache&) = delete;
  EventCache& operator=(const EventCache&) = delete;
  ~EventCache();

  /// Throws kResource. Owns the cache as well.
  [[nodiscard]] std::shared_ptr<void> take();
  /// Made so far, and of these waiting to be taken.
  [[nodiscard]] std::size_t made() const;
  [[nodiscard]] std::size_t idle() const;

 private:
  void put_back(void* event) noexcept;

  const CudaTable& cuda_;
  const int device_;
  const std::string where_;
  mutable std::mutex mutex_;
  std::vector<void*> idle_;
  std::size_t made_ = 0;
};

}  // namespace zeroth::detail
