// The CUDA runtime behind a table of its C functions. The library is looked for when a CUDA device is asked for:
// nothing here is compiled or linked against it, and a test's table stands in for it. Types and numbers are those of
// its ABI, which tests/cuda compares with its headers.
//
// Every function returns kCudaSuccess or an error that error_string() explains. Any thread may call them; the device is
// the thread's.
#pragma once

#include <zeroth/base/error.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace zeroth::detail {

using CudaStatus = int;
inline constexpr CudaStatus kCudaSuccess = 0;
inline constexpr CudaStatus kCudaInvalidValue = 1;
inline constexpr CudaStatus kCudaOutOfMemory = 2;
inline constexpr CudaStatus kCudaInsufficientDriver = 35;
inline constexpr CudaStatus kCudaNoDevice = 100;
inline constexpr CudaStatus kCudaNotReady = 600;

inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr unsigned kCudaHostPortable = 1;
inline constexpr int kCudaCopyAnyWay = 4;  ///< cudaMemcpyDefault: the addresses say from where to where

inline constexpr int kCudaMemoryUnknown = 0;  ///< pageable memory of the host
inline constexpr int kCudaMemoryHost = 1;     ///< pinned
inline constexpr int kCudaMemoryDevice = 2;
inline constexpr int kCudaMemoryManaged = 3;

/// cudaPointerAttributes, with room for what later versions add.
struct CudaPointer {
  int type = kCudaMemoryUnknown;
  int device = -1;
  void* device_address = nullptr;
  void* host_address = nullptr;
  std::byte later[128]{};
};

struct CudaTable {
  std::string library{};  ///< its file
  int version = 0;        ///< 13000 for 13.0

  CudaStatus (*driver_version)(int* version) = nullptr;
  CudaStatus (*device_count)(int* count) = nullptr;
  CudaStatus (*set_device)(int device) = nullptr;
  CudaStatus (*get_device)(int* device) = nullptr;
  CudaStatus (*device_bus_id)(char* text, int bytes, int device) = nullptr;
  CudaStatus (*stream_create)(void** stream, unsigned flags) = nullptr;
  CudaStatus (*stream_destroy)(void* stream) = nullptr;
  CudaStatus (*stream_wait_event)(void* stream, void* event, unsigned flags) = nullptr;
  CudaStatus (*event_create)(void** event, unsigned flags) = nullptr;
  CudaStatus (*event_destroy)(void* event) = nullptr;
  CudaStatus (*event_record)(void* event, void* stream) = nullptr;
  CudaStatus (*event_query)(void* event) = nullptr;
  CudaStatus (*copy)(void* to, const void* from, std::size_t bytes, int way, void* stream) = nullptr;
  CudaStatus (*allocate)(void** memory, std::size_t bytes) = nullptr;
  CudaStatus (*release)(void* memory) = nullptr;
  CudaStatus (*allocate_pinned)(void** memory, std::size_t bytes, unsigned flags) = nullptr;
  CudaStatus (*release_pinned)(void* memory) = nullptr;
  CudaStatus (*pointer)(CudaPointer* about, const void* address) = nullptr;
  const char* (*error_string)(CudaStatus status) = nullptr;
  CudaStatus (*take_last_error)() = nullptr;
};

/// "13.0".
[[nodiscard]] std::string cuda_version_text(int version);

/// The CUDA runtime of this process, else that of the system or of ZEROTH_CUDA_LIBRARY; looked for once. Throws
/// kEnvironment with what each place said, or with the function or version that is missing. Needs no GPU.
[[nodiscard]] const CudaTable& load_cuda();

/// Throws for a status that is no success: kOutOfMemory for its own, else kResource. `call`: "to record an event".
void check_cuda(const CudaTable& cuda, CudaStatus status, std::string_view call, std::string_view where,
                std::string_view who = {});

/// Number of devices; throws kEnvironment where there is none, with the driver's word.
[[nodiscard]] int count_cuda_devices(const CudaTable& cuda, std::string_view where);

struct ReleasePinned {
  const CudaTable* cuda = nullptr;
  void operator()(std::byte* memory) const { (void)cuda->release_pinned(memory); }
};
using PinnedMemory = std::unique_ptr<std::byte, ReleasePinned>;
/// Memory of the host that all devices may copy from and to while nobody waits; not zeroed. `memory` is null where the
/// status is no success. `bytes`: 1 or more; the thread's device must be current.
struct PinResult {
  PinnedMemory memory{};
  CudaStatus status = 0;
};
[[nodiscard]] PinResult pin_memory(const CudaTable& cuda, std::size_t bytes);

/// The thread's device is `device` until the end of the scope. Throws kResource.
class CudaDeviceScope {
 public:
  CudaDeviceScope(const CudaTable& cuda, int device, std::string_view where);
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;
  ~CudaDeviceScope();

 private:
  const CudaTable& cuda_;
  int device_;
  int before_ = -1;
};

}  // namespace zeroth::detail
