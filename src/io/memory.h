// Small aligned memory, for probes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

namespace zeroth::detail {

/// `bytes` of memory at a multiple of `alignment`, not initialised. Move-only.
class AlignedMemory {
 public:
  AlignedMemory() = default;
  explicit AlignedMemory(std::size_t bytes, std::size_t alignment = 4096) : bytes_(bytes) {
    const std::size_t whole = (bytes + alignment - 1) / alignment * alignment;
    memory_.reset(
        static_cast<std::byte*>(std::aligned_alloc(alignment, whole)));  // NOLINT(cppcoreguidelines-no-malloc)
    if (!memory_) throw std::bad_alloc();
  }

  [[nodiscard]] std::byte* data() const { return memory_.get(); }
  [[nodiscard]] std::span<std::byte> bytes() const { return {memory_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace zeroth::detail
