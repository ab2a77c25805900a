// A training of one rank without a model: parameters of equal size, one a unit, whose gradients are made here.
#pragma once

#include <zeroth/comm/factory.h>
#include <zeroth/engine/engine.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::benchmarks {

class FlatTraining final : public ParameterBinder {
 public:
  /// `settings`: all but the groups. Gradients are float32, in memory of the device.
  FlatTraining(std::int64_t elements, int count, DType dtype, std::unique_ptr<Device> device, EngineSettings settings)
      : device_(std::move(device)),
        pool_(1),
        kernels_(make_kernels(*device_, pool_)),
        size_(elements / count),
        shape_{size_} {
    std::vector<ParamSpec> params;
    std::vector<UnitSpec> units;
    for (int unit = 0; unit < count; ++unit) {
      params.push_back({.name = "weight" + std::to_string(unit), .shape = {size_}, .dtype = dtype});
      units.push_back({.name = "unit" + std::to_string(unit), .params = {unit}, .repeated = true});
    }
    settings.groups = {GroupHyper{.lr = 1e-5, .weight_decay = 0.1}};
    engine_ = std::make_unique<Engine>(std::move(params), std::move(units), std::move(settings), *device_,
                                       make_backend("self", {.rank = 0, .size = 1}), *this, Logger());
    const std::vector<std::byte> zeros(array_bytes(size_, dtype));
    engine_->initialize([&](int) { return ConstTensorView{zeros.data(), shape_, dtype}; }, [](std::span<const int>) {});
    std::vector<float> values(static_cast<std::size_t>(size_));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1e-3F * static_cast<float>(i % 31) - 0.015F;
    gradient_ = kernels_->make_arena(values.size() * sizeof(float), "bench.gradient");
    const Stream stream = device_->make_stream("bench");
    kernels_->copy(gradient_.data(), values.data(), values.size() * sizeof(float), stream);
    stream.synchronize();
  }

  void bind(int /*flat*/, std::byte* /*data*/) override {}
  /// Milliseconds of step() after a backward.
  double time_step() {
    for (int param = static_cast<int>(engine_->layout().params.size()); param-- > 0;)
      engine_->grad_ready(param, {gradient_.data(), shape_, DType::kFloat32});
    engine_->end_backward();
    const auto start = std::chrono::steady_clock::now();
    const StepResult result = engine_->step();
    const auto stop = std::chrono::steady_clock::now();
    ZR_CHECK(result.committed, ErrorCode::kInternal, "a step was skipped: " + result.reason);
    return std::chrono::duration<double, std::milli>(stop - start).count();
  }

 private:
  std::unique_ptr<Device> device_;
  ThreadPool pool_;
  std::unique_ptr<Kernels> kernels_;
  std::int64_t size_;
  std::vector<std::int64_t> shape_;
  std::unique_ptr<Engine> engine_;
  zeroth::Arena gradient_{};  // bench_support.h has another Arena
};

}  // namespace zeroth::benchmarks
