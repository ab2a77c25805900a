// The engine with its states in memory of a GPU, and beside it: the bits of the CPU. Ranks are threads that share the
// GPU, so their calls go through pinned memory; one rank goes over NCCL. (On a fake of the GPU: toy_device_test.)
#include "cuda/device_test_support.h"
#include "parity/toy_beside.h"

#include <zeroth/comm/factory.h>
#include <zeroth/comm/nccl.h>
#include <zeroth/comm/staging.h>
#include <zeroth/device/cuda.h>
#include <zeroth/zero/message_reduction.h>

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using kernels::test::require_ok;

class GpuMemory final : public ToyMemory {
 public:
  GpuMemory() = default;
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() override { cudaFree(copy_); }

  void read(void* to, const std::byte* from, std::size_t bytes) override {
    require_ok(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "a read of a parameter");
  }
  const std::byte* place(const std::byte* from, std::size_t bytes) override {
    if (capacity_ < bytes) {
      require_ok(cudaFree(copy_), "cudaFree");
      require_ok(cudaMalloc(&copy_, bytes), "cudaMalloc");
      capacity_ = bytes;
    }
    require_ok(cudaMemcpy(copy_, from, bytes, cudaMemcpyHostToDevice), "a gradient");
    require_ok(cudaStreamSynchronize(nullptr), "a gradient");  // the copy above may return before its end
    return static_cast<const std::byte*>(copy_);
  }

 private:
  void* copy_ = nullptr;
  std::size_t capacity_ = 0;
};

class EngineOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = kernels::test::why_no_device(); !why.empty()) {
      GTEST_SKIP() << "no CUDA device: " << why;
    }
    ::setenv("ZEROTH_CUDA_MODULE", ZEROTH_CUDA_MODULE, /*overwrite=*/0);
  }

  static ToyOutcome train(ToyTraining training, bool over_nccl = false) {
    training.make_device = [](int) { return make_cuda_device(0, Milliseconds{60'000}); };
    training.make_memory = [] { return std::make_unique<GpuMemory>(); };
    training.decorate = [over_nccl](std::unique_ptr<CommBackend> base, int) -> std::unique_ptr<CommBackend> {
      CommOptions options;
      options.timeout = Milliseconds{60'000};
      options.device = 0;
      if (!over_nccl) return make_staging_backend(std::move(base), options);
      options.reduction = Reduction::kTransport;
      return make_nccl_backend(std::move(base), options);
    };
    return train_toy(training);
  }
};

ToyTraining scaled(ToyTraining training) {
  training.model.round_gradients = size_of(training.model.dtype) == 2;
  if (training.model.dtype != DType::kFloat16) return training;
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.loss_scaling = {.enabled = true, .static_scale = 16.0};
  };
  return training;
}

TEST_F(EngineOnDevice, HasTheBitsOfTheCpuAtEveryStage) {
  for (const DType dtype : kDtypes) {
    for (const int world : {1, 2, 3}) {
      ToyTraining plain = small(0, world);
      plain.model.dtype = dtype;
      plain = scaled(std::move(plain));
      const ToyOutcome expected = train_toy(plain);
      for (const int stage : {0, 1, 2, 3}) {
        ToyTraining training = plain;
        training.plan = zero_plan(stage, {"dp"});
        const ToyOutcome outcome = train(training);
        EXPECT_EQ(difference(expected, outcome), "")
            << "stage " << stage << ", " << world << " ranks, " << name_of(dtype);
        for (const MemoryReport& memory : outcome.memory) EXPECT_EQ(memory.planned, memory.measured_peak);
      }
    }
  }
}

TEST_F(EngineOnDevice, HasTheBitsOfTheCpuOverNccl) {
  const ToyOutcome expected = train_toy(small(0, 1));
  for (const int stage : {0, 1, 2, 3}) {
    EXPECT_EQ(difference(expected, train(small(stage, 1), /*over_nccl=*/true)), "") << "stage " << stage;
  }
}

TEST_F(EngineOnDevice, WhatRestsBesideItIsUpdatedWithTheSameBits) {
  for (const FactorRow& row : covering_array(kBesideLevels, 2, is_possible)) {
    std::string text = "factors";
    for (const int level : row) text += " " + std::to_string(level);
    const ToyTraining plain = training_of(row);
    const ToyTraining offloaded = beside(plain, row[3]);
    const ToyOutcome outcome = train(row[8] == 1 ? with_gradients_beside(offloaded) : offloaded);
    EXPECT_EQ(difference(train_toy(plain), outcome), "") << text;
    for (const MemoryReport& memory : outcome.memory) {
      EXPECT_EQ(memory.planned, memory.measured_peak) << text << "\n" << to_text(memory);
      EXPECT_EQ(memory.planned_files, memory.measured_files) << text;
    }
  }
}

TEST_F(EngineOnDevice, ANonFiniteGradientIsFoundByItsKernelAndNamed) {
  ToyTraining training = small(3, 2);
  training.poison = [](int rank, std::int64_t step, int, int param) { return rank == 1 && step == 1 && param >= 3; };
  const ToyOutcome expected = train_toy(training);
  const ToyOutcome outcome = train(training);
  ASSERT_TRUE(outcome.results[1].first_offender.has_value());
  EXPECT_EQ(outcome.results[1].reason, expected.results[1].reason);
  EXPECT_EQ(difference(expected, outcome), "");
}

TEST_F(EngineOnDevice, EveryFormOfMessagesHasTheBitsOfTheCpu) {
  std::vector<std::string> forms = reduction_names();
  forms.emplace_back("adaptive");
  for (const std::string& form : forms) {
    ToyTraining plain = small(0, 3);
    plain.optimizer = "OneBitAdam";
    plain.steps = 5;
    plain.tamper = [&form](int, ToyStructure&, EngineSettings& settings) {
      settings.optimizer.freeze_step = 2;
      settings.optimizer.compression = {.compression = form, .ratio = 0.1, .rank = 2};
    };
    const ToyOutcome expected = train_toy(plain);
    for (const int stage : {0, 2, 3}) {
      ToyTraining training = plain;
      training.plan = zero_plan(stage, {"dp"});
      EXPECT_EQ(difference(expected, train(training)), "") << form << ", stage " << stage;
    }
  }
}

}  // namespace
}  // namespace zeroth::test
