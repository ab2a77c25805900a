// A CUDA device. Nothing is linked against CUDA: its runtime is looked for when a device is asked for.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/device/device.h>

#include <memory>

namespace zeroth {

/// GPU number `ordinal` of those that this process sees. Its streams are CUDA's (see Stream::native()) and do not wait
/// for the default stream; a wait of the host ends after `timeout` (kTimeout). make_arena() gives memory of the device
/// for ArenaKind::kDevice, aligned to 256 bytes and not zeroed, and that of the host for the other kinds. Throws
/// kEnvironment where CUDA's runtime is missing or too old or there is no GPU, kUsage for an ordinal that there is not.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(int ordinal, Milliseconds timeout = Milliseconds{300'000});

}  // namespace zeroth
