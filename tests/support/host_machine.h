// Kernels of the host with a device and a stream of their own, for tests without an engine.
#pragma once

#include <zeroth/compute/kernels.h>

#include <memory>

namespace zeroth::test {

struct HostMachine {
  explicit HostMachine(kernels::Isa isa = kernels::best_isa()) : kernels(make_host_kernels(*device, pool, isa)) {}

  std::unique_ptr<Device> device = make_cpu_device();
  ThreadPool pool{1};
  std::unique_ptr<Kernels> kernels;
  Stream stream = device->make_stream("test");
};

}  // namespace zeroth::test
