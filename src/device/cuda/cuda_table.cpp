#include "device/cuda/cuda_table.h"

#include "device/shared_library.h"

namespace zeroth::detail {
namespace {

constexpr int kLeastVersion = 11'080;  // what NCCL 2.18, the least that is taken, is built with or later

CudaTable make_table() {
  const SharedLibrary library = SharedLibrary::open(
      {.where = "device.cuda",
       .what = "the CUDA runtime",
       .names = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"},
       .variable = "ZEROTH_CUDA_LIBRARY",
       .probe = "cudaRuntimeGetVersion",
       .hint = "install the CUDA runtime, or set ZEROTH_CUDA_LIBRARY to its file; inside Python import torch first"});
  CudaTable table;
  table.library = library.file();
  CudaStatus (*runtime_version)(int*) = nullptr;
  library.find(runtime_version, "cudaRuntimeGetVersion");
  library.find(table.driver_version, "cudaDriverGetVersion");
  library.find(table.device_count, "cudaGetDeviceCount");
  library.find(table.set_device, "cudaSetDevice");
  library.find(table.get_device, "cudaGetDevice");
  library.find(table.device_bus_id, "cudaDeviceGetPCIBusId");
  library.find(table.stream_create, "cudaStreamCreateWithFlags");
  library.find(table.stream_destroy, "cudaStreamDestroy");
  library.find(table.stream_wait_event, "cudaStreamWaitEvent");
  library.find(table.event_create, "cudaEventCreateWithFlags");
  library.find(table.event_destroy, "cudaEventDestroy");
  library.find(table.event_record, "cudaEventRecord");
  library.find(table.event_query, "cudaEventQuery");
  library.find(table.copy, "cudaMemcpyAsync");
  library.find(table.allocate, "cudaMalloc");
  library.find(table.release, "cudaFree");
  library.find(table.allocate_pinned, "cudaHostAlloc");
  library.find(table.release_pinned, "cudaFreeHost");
  library.find(table.pointer, "cudaPointerGetAttributes");
  library.find(table.error_string, "cudaGetErrorString");
  library.find(table.take_last_error, "cudaGetLastError");
  check_cuda(table, runtime_version(&table.version), "to say its version", "device.cuda");
  ZR_CHECK(table.version >= kLeastVersion, ErrorCode::kEnvironment, "this CUDA runtime is too old",
           {.where = "device.cuda",
            .which = table.library,
            .expected = cuda_version_text(kLeastVersion) + " or later",
            .got = cuda_version_text(table.version)});
  return table;
}

}  // namespace

std::string cuda_version_text(int version) {
  return std::to_string(version / 1'000) + "." + std::to_string(version % 1'000 / 10);
}

const CudaTable& load_cuda() {
  static const CudaTable table = make_table();  // a library is one for the process; a failure is tried again
  return table;
}

void check_cuda(const CudaTable& cuda, CudaStatus status, std::string_view call, std::string_view where,
                std::string_view who) {
  if (status == kCudaSuccess) [[likely]]
    return;
  // It stays as the thread's last error, where the next caller of CUDA would take it for his own.
  (void)cuda.take_last_error();
  const char* const text = cuda.error_string(status);
  throw Error(status == kCudaOutOfMemory ? ErrorCode::kOutOfMemory : ErrorCode::kResource,
              "CUDA refused " + std::string(call),
              {.where = std::string(where),
               .who = std::string(who),
               .got = "error " + std::to_string(status) + (text == nullptr ? "" : std::string(", ") + text),
               .hint = status == kCudaOutOfMemory
                           ? ""
                           : "an error of an earlier kernel or copy shows only now: CUDA_LAUNCH_BLOCKING=1 finds it"});
}

int count_cuda_devices(const CudaTable& cuda, std::string_view where) {
  int count = 0;
  const CudaStatus status = cuda.device_count(&count);
  if (status != kCudaSuccess) (void)cuda.take_last_error();
  int driver = 0;
  if (cuda.driver_version(&driver) != kCudaSuccess) driver = 0;
  const char* const text = status == kCudaSuccess ? "no device" : cuda.error_string(status);
  ZR_CHECK(status == kCudaSuccess && count > 0, ErrorCode::kEnvironment, "there is no CUDA device",
           {.where = std::string(where),
            .expected = "a GPU that this process may use",
            .got = std::string(text == nullptr ? "" : text) + ", driver for CUDA " + std::to_string(driver) +
                   ", runtime " + std::to_string(cuda.version) + " (" + cuda.library + ")",
            .hint = "look at nvidia-smi and CUDA_VISIBLE_DEVICES"});
  return count;
}

PinResult pin_memory(const CudaTable& cuda, std::size_t bytes) {
  void* memory = nullptr;
  const CudaStatus status = cuda.allocate_pinned(&memory, bytes, kCudaHostPortable);
  return {.memory = {status == kCudaSuccess ? static_cast<std::byte*>(memory) : nullptr, {&cuda}}, .status = status};
}

CudaDeviceScope::CudaDeviceScope(const CudaTable& cuda, int device, std::string_view where)
    : cuda_(cuda), device_(device) {
  check_cuda(cuda_, cuda_.get_device(&before_), "to say which device is current", where);
  if (before_ != device_) check_cuda(cuda_, cuda_.set_device(device_), "device " + std::to_string(device_), where);
}

CudaDeviceScope::~CudaDeviceScope() {
  if (before_ != device_) (void)cuda_.set_device(before_);
}

}  // namespace zeroth::detail
