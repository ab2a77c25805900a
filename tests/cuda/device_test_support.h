// What the tests of CUDA kernels share: entry points of the module, memory on a device.
#pragma once

#include "unit/kernels/kernel_test_support.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeroth::kernels::test {

/// The module is loaded as a program would load it; it stays until the end.
template <class Entry>
Entry* load_entry(const char* name) {
  void* const module = ::dlopen(ZEROTH_CUDA_MODULE, RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) throw std::runtime_error(::dlerror());
  void* const entry = ::dlsym(module, name);
  if (entry == nullptr) throw std::runtime_error(::dlerror());
  return reinterpret_cast<Entry*>(entry);
}

inline void require_ok(int status, const std::string& what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(what + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)));
}

/// Why nothing can run here, or "".
inline std::string why_no_device() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver || status == cudaErrorStubLibrary) {
    return cudaGetErrorString(status);
  }
  require_ok(status, "cudaGetDeviceCount");
  if (devices == 0) return "none is visible";
  int major = 0;
  require_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
  return major >= 8 ? ""
                    : "the kernels are built for compute capability 8.0 and up, this one has " + std::to_string(major);
}

/// n elements on the device, `misalign` elements past what cudaMalloc aligns, between guards.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const GuardedArray<T>& from, std::int64_t misalign)
      : n_(static_cast<std::size_t>(from.size())), first_(kGuard + static_cast<std::size_t>(misalign)) {
    require_ok(cudaMalloc(&data_, bytes()), "cudaMalloc");
    require_ok(cudaMemset(data_, kPattern, bytes()), "cudaMemset");
    require_ok(cudaMemcpy(data(), from.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return static_cast<T*>(data_) + first_; }

  [[nodiscard]] std::vector<T> to_host() const {
    std::vector<T> elements(n_);
    require_ok(cudaMemcpy(elements.data(), data(), n_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    return elements;
  }

  /// Success if the elements have the bits of `want` and nothing beside them was written.
  [[nodiscard]] ::testing::AssertionResult has_bits_of(const GuardedArray<T>& want) const {
    std::vector<Bits<T>> all(n_ + 2 * kGuard + kMostMisalign);
    require_ok(cudaMemcpy(all.data(), data_, bytes(), cudaMemcpyDeviceToHost), "copy from the device");
    const Bits<T> pattern = static_cast<Bits<T>>(0x5a5a5a5a5a5a5a5aULL);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i >= first_ && i < first_ + n_) {
        const Bits<T> expected = bits_of(want[static_cast<std::int64_t>(i - first_)]);
        if (all[i] == expected) continue;
        return ::testing::AssertionFailure() << "element " << i - first_ << " of " << n_ << ": want 0x" << std::hex
                                             << expected << ", got 0x" << all[i];
      }
      if (all[i] != pattern) return ::testing::AssertionFailure() << "wrote outside the range";
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr std::size_t kGuard = 32;  // keeps what cudaMalloc aligns aligned
  static constexpr std::size_t kMostMisalign = 4;
  static constexpr int kPattern = 0x5a;

  [[nodiscard]] std::size_t bytes() const { return (n_ + 2 * kGuard + kMostMisalign) * sizeof(T); }

  std::size_t n_;
  std::size_t first_;
  void* data_ = nullptr;
};

}  // namespace zeroth::kernels::test
