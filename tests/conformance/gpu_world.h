// Worlds of GPUs in the conformance suite: ranks are threads, the GPUs and NCCL are fakes. A body says nothing of
// devices: its buffers are memory that the fake takes for managed, and its calls are made on streams of a GPU.
#pragma once

#include "comm/decorators/staging_backend.h"
#include "comm/nccl/nccl_backend.h"
#include "device/cuda/cuda_device.h"
#include "support/fake_gpu.h"
#include "support/thread_ranks.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <gmock/gmock.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {

/// "nccl" has a GPU for each rank, and "nccl_checked" compares calls before they are made; the ranks of "inproc_on_gpu"
/// share one.
[[nodiscard]] inline bool is_gpu_world(const std::string& backend) {
  return backend.starts_with("nccl") || backend == "inproc_on_gpu";
}

/// A rank's device, and streams that its calls take in turn: their order is that of the program, whatever a stream
/// knows of the other one.
struct RankDevice {
  explicit RankDevice(std::unique_ptr<Device> made)
      : device(std::move(made)), streams{device->make_stream("first"), device->make_stream("second")} {}

  [[nodiscard]] const Stream& next_stream() { return streams[calls++ % streams.size()]; }

  std::unique_ptr<Device> device;
  std::array<Stream, 2> streams;
  std::size_t calls = 0;
};

/// Calls on streams of the host become calls on streams of the device.
class OnDeviceStreams final : public ForwardingBackend {
 public:
  /// `device` outlives it.
  OnDeviceStreams(std::unique_ptr<CommBackend> inner, RankDevice& device)
      : ForwardingBackend(std::move(inner)), device_(device) {}

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    require(stream.runs_inline(), "a stream whose tasks run later cannot stand for one of a device");
    return inner().submit(collectives, device_.next_stream());
  }
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points,
                                                     const Stream& stream) override {
    require(stream.runs_inline(), "a stream whose tasks run later cannot stand for one of a device");
    return inner().start(points, device_.next_stream());
  }
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override {
    std::unique_ptr<CommBackend> part = inner().split(color, key, name);
    return part ? std::make_unique<OnDeviceStreams>(std::move(part), device_) : nullptr;
  }

 private:
  RankDevice& device_;
};

/// Runs body(rank, backend) on every rank, over `options.transport`. Whatever becomes of it, nothing that no program
/// may do has happened on the fakes, and nothing is left there.
[[nodiscard]] inline RankReport run_gpu_world(const std::string& name, int size, const RankBody& body,
                                              ThreadRanksOptions options) {
  const bool over_nccl = name.starts_with("nccl");
  FakeGpu gpu(over_nccl ? size : 1);
  gpu.host_memory_is_managed = true;
  const detail::CudaTable cuda = gpu.cuda_table();
  const detail::NcclTable nccl = gpu.nccl_table();
  std::vector<std::unique_ptr<RankDevice>> devices(static_cast<std::size_t>(size));
  options.group_over = [&](int rank, std::unique_ptr<CommBackend> base,
                           CommOptions comm) -> std::unique_ptr<CommBackend> {
    comm.device = over_nccl ? rank : 0;
    std::unique_ptr<RankDevice>& device = devices[static_cast<std::size_t>(rank)];
    device = std::make_unique<RankDevice>(detail::make_cuda_device(cuda, comm.device, comm.timeout));
    std::unique_ptr<CommBackend> group;
    if (over_nccl) {
      comm.reduction = Reduction::kTransport;
      comm.check_calls = name == "nccl_checked";
      group = detail::make_nccl_backend(std::move(base), comm,
                                        [&] { return detail::NcclLibraries{.nccl = &nccl, .cuda = &cuda}; });
    } else {
      group = detail::make_staging_backend(std::move(base), comm, [&]() -> const detail::CudaTable& { return cuda; });
    }
    return std::make_unique<OnDeviceStreams>(std::move(group), *device);
  };
  RankReport report = try_ranks(size, body, options);
  devices.clear();
  // A communicator ends on a thread of its own, which a group that goes waits for a short time only.
  for (const Deadline deadline(Milliseconds{20'000}); gpu.living_comms() > 0 && !deadline.passed();)
    std::this_thread::sleep_for(Milliseconds{1});
  EXPECT_EQ(gpu.living_comms(), 0U);
  EXPECT_EQ(gpu.living_streams(), 0U);
  EXPECT_EQ(gpu.living_events(), 0U);
  EXPECT_THAT(gpu.violations(), ::testing::IsEmpty());
  return report;
}

}  // namespace zeroth::test
