// A torch-free trainer on the installed package: one step of one parameter, with a gradient written by hand.
// What the headers and the libraries need beyond the package must come through find_package(Zeroth).
#include <zeroth/base/text.h>
#include <zeroth/comm/factory.h>
#include <zeroth/engine/engine.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace {

/// Remembers where the only flat is.
class Binder final : public zeroth::ParameterBinder {
 public:
  void bind(int /*flat*/, std::byte* data) override { data_ = data; }
  [[nodiscard]] float first() const {
    float value = 0.0F;
    if (data_ != nullptr) std::memcpy(&value, data_, sizeof value);
    return value;
  }

 private:
  std::byte* data_ = nullptr;
};

zeroth::ConstTensorView view_of(const std::vector<float>& values, std::span<const std::int64_t> shape) {
  return {reinterpret_cast<const std::byte*>(values.data()), shape, zeroth::DType::kFloat32};
}

/// The value of the parameter in forward, and after one step with the gradient 1.
void train(zeroth::Engine& engine, const Binder& binder, const std::vector<std::int64_t>& shape, float& before,
           float& after) {
  const std::vector<float> initial(12, 2.0F);
  engine.initialize([&](int /*param*/) { return view_of(initial, shape); }, [](std::span<const int> /*params*/) {});
  const zeroth::Invocation use = engine.begin_forward(0);
  engine.pre_forward(use);
  before = binder.first();
  engine.post_forward(use, true);
  engine.pre_backward(0);
  const std::vector<float> gradient(12, 1.0F);
  engine.grad_ready(0, view_of(gradient, shape));
  engine.post_backward(0);
  engine.end_backward();
  const zeroth::StepResult result = engine.step();
  if (!result.committed) throw zeroth::Error(zeroth::ErrorCode::kInternal, "the step was skipped: " + result.reason);
  std::vector<std::byte> flat(engine.layout().flat(0).bytes());
  engine.read_flat(0, flat.data());
  std::memcpy(&after, flat.data(), sizeof after);
}

}  // namespace

int main() {
  const std::vector<std::int64_t> shape{3, 4};
  for (const int zero_stage : {0, 3}) {
    zeroth::EngineSettings settings;
    settings.plan = zeroth::zero_plan(zero_stage, {"dp"});
    settings.optimizer = {.type = "SGD"};
    settings.groups = {zeroth::GroupHyper{.lr = 0.25}};
    const std::unique_ptr<zeroth::Device> device = zeroth::make_cpu_device();
    Binder binder;
    zeroth::Engine engine({{.name = "weight", .shape = shape}}, {{.name = "root", .params = {0}}}, settings, *device,
                          zeroth::make_backend("self", {}), binder, zeroth::Logger(0, 1, zeroth::LogLevel::kInfo));
    float before = 0.0F;
    float after = 0.0F;
    train(engine, binder, shape, before, after);
    std::printf("stage %d: %s in use, the weight went from %g to %g\n", zero_stage,
                zeroth::format_bytes(device->ledger().live().total()).c_str(), static_cast<double>(before),
                static_cast<double>(after));
    if (before != 2.0F || after != 1.75F) return 1;
  }
  std::puts("consumer works");
  return 0;
}
