// A CUDA device. Nothing is linked with CUDA: its runtime is loaded when a device is made.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/device/device.h>

#include <memory>

namespace zeroth {

/// GPU number `ordinal` of the GPUs that this process sees. Its streams are CUDA streams (see Stream::native()) and do
/// not wait for the default stream. A wait of the host ends after `timeout` (kTimeout). make_arena() returns device
/// memory for ArenaKind::kDevice, aligned to 256 bytes and not zeroed, and host memory for the other kinds. Throws
/// kEnvironment if CUDA's runtime is missing or too old, or there is no GPU; kUsage for an ordinal that does not exist.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(int ordinal, Milliseconds timeout = Milliseconds{300'000});

}  // namespace zeroth
