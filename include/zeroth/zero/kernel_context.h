// The engine's thread pool and instruction set for kernels. Neither changes the bits.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/device/thread_pool.h>

#include <cstdint>
#include <functional>

namespace zeroth {

struct KernelContext {
  ThreadPool* pool = nullptr;
  kernels::Isa isa = kernels::Isa::kScalar;

  /// Runs body(begin, end) over [0, elements), split among the pool's threads at multiples of 64 Ki elements. Blocks.
  void for_ranges(std::int64_t elements, const std::function<void(std::int64_t, std::int64_t)>& body) const {
    static constexpr std::size_t kGrain = std::size_t{64} << 10U;
    pool->parallel_for(static_cast<std::size_t>(elements), kGrain, [&body](std::size_t begin, std::size_t end) {
      body(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end));
    });
  }
};

}  // namespace zeroth
