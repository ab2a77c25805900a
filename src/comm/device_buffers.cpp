#include "comm/device_buffers.h"

#include <fmt/format.h>

#include <string>

namespace zeroth::detail {

int choose_device(const CudaTable& cuda, int wanted, std::string_view where) {
  const int count = count_cuda_devices(cuda, where);
  int device = wanted;
  if (wanted < 0) check_cuda(cuda, cuda.get_device(&device), "to say which device is current", where);
  ZR_CHECK(device < count, ErrorCode::kConfig, "there is no such CUDA device",
           {.where = std::string(where),
            .which = "CommOptions::device",
            .expected = fmt::format("0 to {}", count - 1),
            .got = fmt::format("{}", device)});
  return device;
}

void check_device_buffers(const CudaTable& cuda, int device, const Collective& call, int rank, std::string_view where,
                          std::string_view who) {
  const CallExtent extent = extent_of(call, rank);
  const auto check = [&](const void* address, std::int64_t elements, std::string_view name) {
    if (elements == 0) return;
    CudaPointer about;
    const CudaStatus status = cuda.pointer(&about, address);
    if (status == kCudaInvalidValue)
      (void)cuda.take_last_error();  // what CUDA before 11 says of memory that it does not know
    if (status != kCudaInvalidValue) check_cuda(cuda, status, "to say where a buffer is", where, who);
    const bool known = status == kCudaSuccess && about.type != kCudaMemoryUnknown && about.device_address != nullptr;
    const bool here = about.type != kCudaMemoryDevice || about.device == device;
    ZR_CHECK(known && here, ErrorCode::kUsage,
             known ? "a buffer is on another device" : "a buffer on a CUDA stream is memory of the host",
             {.where = std::string(where),
              .who = std::string(who),
              .which = fmt::format("{} of {}", name, describe(call)),
              .expected = fmt::format("memory of device {}", device),
              .got = known ? fmt::format("memory of device {}", about.device) : "pageable memory of the host",
              .hint = known ? "each rank has one device: CommOptions::device"
                            : "submit calls with buffers of the host on a stream of the host"});
  };
  check(call.send, extent.send, "send");
  check(call.recv, extent.recv, "recv");
}

void check_host_buffers(const CudaTable& cuda, std::span<const Collective> calls, int rank, std::string_view where,
                        std::string_view who) {
  for (const Collective& call : calls) {
    const CallExtent extent = extent_of(call, rank);
    const auto check = [&](const void* address, std::int64_t elements, std::string_view name) {
      if (elements == 0) return;  // its address says nothing
      CudaPointer about;
      if (cuda.pointer(&about, address) != kCudaSuccess) (void)cuda.take_last_error();
      ZR_CHECK(about.type != kCudaMemoryDevice, ErrorCode::kUsage,
               "a buffer on a stream of the host is memory of a device",
               {.where = std::string(where),
                .who = std::string(who),
                .which = fmt::format("{} of {}", name, describe(call)),
                .expected = "memory of the host",
                .got = fmt::format("memory of device {}", about.device),
                .hint = "submit it on a stream of the CUDA device"});
    };
    check(call.send, extent.send, "send");
    check(call.recv, extent.recv, "recv");
  }
}

}  // namespace zeroth::detail
