// The real NCCL and CUDA, as a group of one rank: skipped where there is no GPU.
#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"

#include <zeroth/comm/factory.h>
#include <zeroth/device/cuda.h>

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace zeroth {
namespace {

std::string missing() {
  try {
    (void)detail::count_cuda_devices(detail::load_cuda(), "test");
  } catch (const Error& error) {
    return std::string("no CUDA device: ") + error.what();
  }
  try {
    (void)detail::load_nccl();
  } catch (const Error& error) {
    return std::string("no NCCL: ") + error.what();
  }
  return {};
}

class NcclDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = missing(); !why.empty()) GTEST_SKIP() << why;
    device_ = make_cuda_device(0, Milliseconds{60'000});
    stream_ = device_->make_stream("test");
    CommOptions options;
    options.timeout = Milliseconds{60'000};
    options.reduction = Reduction::kTransport;
    options.device = 0;
    group_ = make_backend("nccl", {.rank = 0, .size = 1, .options = options});
  }

  void copy(void* to, const void* from, std::size_t bytes) {
    stream_.enqueue([=, this] {
      const detail::CudaTable& cuda = detail::load_cuda();
      detail::check_cuda(cuda, cuda.copy(to, from, bytes, detail::kCudaCopyAnyWay, stream_.native()), "a copy", "test");
    });
    stream_.synchronize();
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<CommBackend> group_;
};

TEST_F(NcclDevice, OneRankMakesEveryCall) {
  Arena arena = device_->make_arena(ArenaKind::kDevice, std::size_t{1} << 20U, "buffers");
  (void)group_->attach(arena, "buffers");
  std::byte* const a = arena.reserve(4'096).data();
  std::byte* const b = arena.reserve(4'096).data();
  std::vector<float> values(1'024);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  for (const CollectiveKind kind :
       {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce,
        CollectiveKind::kBroadcast, CollectiveKind::kGather, CollectiveKind::kScatter, CollectiveKind::kAllToAll}) {
    std::vector<float> got(1'024, -1);
    copy(a, values.data(), 4'096);
    copy(b, got.data(), 4'096);
    Collective call{.kind = kind,
                    .in_dtype = DType::kFloat32,
                    .out_dtype = DType::kFloat32,
                    .send = a,
                    .recv = b,
                    .counts = {1'024}};
    if (kind == CollectiveKind::kAllToAll) call.recv_counts = {1'024};
    group_->submit({&call, 1}, stream_).wait();
    copy(got.data(), b, 4'096);
    EXPECT_EQ(got, values) << name_of(kind);
  }
  const Collective barrier{.kind = CollectiveKind::kBarrier};
  group_->submit({&barrier, 1}, stream_).wait();
}

TEST_F(NcclDevice, PartsAndAbortsEndInTime) {
  const auto part = group_->split(0, 0, "part");
  Arena arena = device_->make_arena(ArenaKind::kDevice, 4'096, "buffers");
  const Collective call{.kind = CollectiveKind::kAllReduce,
                        .in_dtype = DType::kFloat32,
                        .out_dtype = DType::kFloat32,
                        .send = arena.data(),
                        .recv = arena.data(),
                        .counts = {1'024}};
  part->submit({&call, 1}, stream_).wait();
  group_->abort(Error(ErrorCode::kInternal, "planted"));
  EXPECT_THROW(part->submit({&call, 1}, stream_).wait(), Error);
}

}  // namespace
}  // namespace zeroth
