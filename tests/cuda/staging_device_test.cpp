// Ranks that share a real GPU, over shared memory of the host: skipped where there is no GPU.
#include "device/cuda/cuda_table.h"

#include <zeroth/comm/factory.h>
#include <zeroth/device/cuda.h>

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

TEST(StagingDevice, RanksThatShareAGpuSumInRankOrder) {
  try {
    (void)detail::count_cuda_devices(detail::load_cuda(), "test");
  } catch (const Error& error) {
    GTEST_SKIP() << "no CUDA device: " << error.what();
  }
  constexpr int kRanks = 2;
  constexpr std::size_t kElements = 100'000;
  const std::shared_ptr<InprocHub> hub = make_inproc_hub(kRanks);
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        CommOptions options;
        options.timeout = Milliseconds{60'000};
        options.device = 0;
        const auto group = make_backend("inproc", {.rank = rank, .size = kRanks, .hub = hub, .options = options});
        const auto device = make_cuda_device(0, Milliseconds{60'000});
        const Stream stream = device->make_stream("test");
        const Arena arena = device->make_arena(ArenaKind::kDevice, kElements * sizeof(float), "buffer");
        const detail::CudaTable& cuda = detail::load_cuda();
        const auto copy = [&](void* to, const void* from) {
          stream.enqueue([&, to, from] {
            detail::check_cuda(cuda, cuda.copy(to, from, arena.capacity(), detail::kCudaCopyAnyWay, stream.native()),
                               "a copy", "test");
          });
        };
        std::vector<float> values(kElements);
        for (std::size_t i = 0; i < kElements; ++i) values[i] = static_cast<float>(i) / static_cast<float>(3 + rank);
        copy(arena.data(), values.data());
        const Collective call{.kind = CollectiveKind::kAllReduce,
                              .in_dtype = DType::kFloat32,
                              .out_dtype = DType::kFloat32,
                              .send = arena.data(),
                              .recv = arena.data(),
                              .counts = {static_cast<std::int64_t>(kElements)}};
        group->submit({&call, 1}, stream).wait();
        copy(values.data(), arena.data());
        stream.synchronize();
        for (std::size_t i = 0; i < kElements; ++i) {
          const float expected = static_cast<float>(i) / 3.0F + static_cast<float>(i) / 4.0F;
          ASSERT_EQ(values[i], expected) << i;
        }
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, std::vector<std::string>(kRanks));
}

}  // namespace
}  // namespace zeroth
