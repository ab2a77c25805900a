// Ranks over a fake NCCL: threads of one process, each with a device of the fake.
#pragma once

#include "comm/nccl/nccl_backend.h"
#include "device/cuda/cuda_device.h"
#include "support/fake_gpu.h"

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>
#include <zeroth/device/device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {

/// One rank, on its own thread.
struct NcclRank {
  int rank = 0;
  FakeGpu& gpu;
  Device& device;
  Stream stream;  ///< of the device
  std::unique_ptr<CommBackend> group;

  /// Memory of the rank's device with these values.
  template <class T>
  [[nodiscard]] T* put(const std::vector<T>& values) const {
    auto* const data = reinterpret_cast<T*>(gpu.allocate(rank, values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), data);
    return data;
  }
  template <class T>
  [[nodiscard]] T* room(std::size_t elements) const {
    return reinterpret_cast<T*>(gpu.allocate(rank, elements * sizeof(T)));
  }
};

/// An all_reduce in place.
inline Collective sum_of(float* data, std::int64_t count, MessageTag tag = {}) {
  return {.kind = CollectiveKind::kAllReduce,
          .in_dtype = DType::kFloat32,
          .out_dtype = DType::kFloat32,
          .send = reinterpret_cast<const std::byte*>(data),
          .recv = reinterpret_cast<std::byte*>(data),
          .counts = {count},
          .tag = tag};
}

inline Work submit(NcclRank& rank, const Collective& call) {
  return rank.group->submit({&call, 1}, rank.stream);
}

/// How the ranks of a test come together.
struct NcclWorld {
  explicit NcclWorld(int world_size)
      : gpu(world_size),
        size(world_size),
        cudas(static_cast<std::size_t>(world_size), gpu.cuda_table()),
        tables(cudas.size(), gpu.nccl_table()) {
    options.timeout = Milliseconds{20'000};
    options.reduction = Reduction::kTransport;
  }

  FakeGpu gpu;
  int size;
  CommOptions options{};
  std::vector<detail::CudaTable> cudas;   ///< of each rank
  std::vector<detail::NcclTable> tables;  ///< of each rank
  std::function<void(int rank)> before_loading{};
  std::function<std::unique_ptr<CommBackend>(int rank, std::unique_ptr<CommBackend>)> wrap_base{};
  std::function<void(int rank, CommOptions&)> set_options{};

  using Body = std::function<void(NcclRank&)>;

  /// Runs body on every rank; what each threw, as text ("" for nothing).
  std::vector<std::string> try_ranks(const Body& body) {
    std::vector<std::string> errors(static_cast<std::size_t>(size));
    const std::shared_ptr<InprocHub> hub = make_inproc_hub(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          run(rank, hub, body);
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

 private:
  void run(int rank, const std::shared_ptr<InprocHub>& hub, const Body& body) {
    CommOptions mine = options;
    mine.device = rank;
    if (set_options) set_options(rank, mine);
    CommOptions of_base = mine;
    of_base.reduction = Reduction::kRankOrder;  // it has no other
    auto base = make_backend("inproc", {.rank = rank, .size = size, .hub = hub, .options = of_base});
    if (wrap_base) base = wrap_base(rank, std::move(base));
    const auto index = static_cast<std::size_t>(rank);
    auto group = detail::make_nccl_backend(std::move(base), mine, [&] {
      if (before_loading) before_loading(rank);
      return detail::NcclLibraries{.nccl = &tables[index], .cuda = &cudas[index]};
    });
    const auto device = detail::make_cuda_device(cudas[index], rank, mine.timeout);
    NcclRank own{
        .rank = rank, .gpu = gpu, .device = *device, .stream = device->make_stream("test"), .group = std::move(group)};
    body(own);
  }
};

}  // namespace zeroth::test
