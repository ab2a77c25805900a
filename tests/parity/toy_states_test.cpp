// Optimizers of the caller's own, with states of every shape and dtype: the same bits under every plan, and memory as
// planned.
#include "support/toy_training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

/// SGD with six states. Entries of rows and tensors count updates in a way that does not depend on how often a step
/// comes to an entry; they begin at another value than zero.
class SixStates final : public Optimizer {
 public:
  explicit SixStates(std::shared_ptr<std::atomic<int>> wrong) : wrong_(std::move(wrong)) {}
  std::string_view name() const override { return "SixStates"; }
  std::vector<StateDeclaration> states() const override {
    return {{.name = "momentum"},
            {.name = "rows", .shape = StateShape::kRow, .dtype = DType::kFloat32, .initial = 0.5},
            {.name = "tensors", .shape = StateShape::kTensor, .dtype = DType::kFloat64, .initial = 2.0},
            {.name = "wide", .dtype = DType::kFloat64, .initial = -1.0},
            {.name = "marks", .dtype = DType::kUInt8, .initial = 7.0},
            {.name = "sixth"}};
  }
  void step(const StepBlock& block, Kernels& kernels, const Stream&) const override {
    (void)kernels.host(name());
    block.dtype == DType::kFloat64 ? update<double>(block) : update<float>(block);
  }

 private:
  template <class T>
  void update(const StepBlock& block) const {
    auto* momentum = reinterpret_cast<T*>(block.states[0]);
    auto& row = *reinterpret_cast<float*>(block.states[1]);
    auto& tensor = *reinterpret_cast<double*>(block.states[2]);
    auto* wide = reinterpret_cast<double*>(block.states[3]);
    auto* marks = reinterpret_cast<std::uint8_t*>(block.states[4]);
    auto* sixth = reinterpret_cast<T*>(block.states[5]);
    const auto step = static_cast<double>(block.step);
    if (row != 0.5F && row != static_cast<float>(step) && row != static_cast<float>(step - 1)) ++*wrong_;
    if (tensor != 2.0 && tensor != step + 10 && tensor != step + 9) ++*wrong_;
    row = static_cast<float>(step);
    tensor = step + 10;
    for (std::int64_t i = 0; i < block.n; ++i) {
      if (wide[i] != step - 2 || marks[i] != static_cast<std::uint8_t>(6 + block.step)) ++*wrong_;
      wide[i] += 1.0;
      ++marks[i];
      const T grad = reinterpret_cast<const T*>(block.grad)[i] * static_cast<T>(block.factor);
      momentum[i] = momentum[i] * T{0.5} + grad;
      sixth[i] += momentum[i];
      block.set_value(i, block.value<T>(i) - static_cast<T>(block.hyper.lr) * sixth[i] / static_cast<T>(row));
    }
  }

  std::shared_ptr<std::atomic<int>> wrong_;
};

TEST(ToyStates, StatesOfAnyShapeHaveTheSameBitsUnderEveryPlan) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyOutcome expected;
    for (const int stage : {0, 1, 2, 3}) {
      const auto wrong = std::make_shared<std::atomic<int>>(0);
      ToyTraining training{.plan = zero_plan(stage, {"dp"}), .world = 3, .steps = 4};
      training.model.dtype = dtype;
      training.model.round_gradients = true;  // bfloat16 ones fit their buckets
      training.tamper = [&](int, ToyStructure&, EngineSettings& settings) {
        settings.own_optimizer = [wrong] { return std::make_unique<SixStates>(wrong); };
      };
      const ToyOutcome got = train_toy(training);
      EXPECT_EQ(*wrong, 0) << "entries that are not those of the block, stage " << stage;
      if (stage == 0) expected = got;
      EXPECT_TRUE(got.same_numbers(expected)) << "stage " << stage << ": " << difference(expected, got);
      for (const MemoryReport& memory : got.memory) EXPECT_EQ(memory.measured_peak, memory.planned) << to_text(memory);
    }
  }
}

}  // namespace
}  // namespace zeroth::test
