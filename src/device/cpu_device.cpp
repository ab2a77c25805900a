#include "device/stream_runtime.h"

#include <zeroth/device/device.h>

#include <utility>

namespace zeroth {
namespace {

class CpuDevice final : public Device {
 public:
  CpuDevice(ExecutionMode mode, std::uint64_t seed)
      : mode_(mode),
        runtime_(mode == ExecutionMode::kInline ? detail::make_inline_runtime() : detail::make_chaos_runtime(seed)) {}

  ~CpuDevice() override { runtime_->close(); }

  std::string_view kind() const override { return "cpu"; }
  Arena make_arena(ArenaKind kind, std::size_t bytes, std::string_view name) override {
    return Arena::create(kind, bytes, name);
  }
  Stream make_stream(std::string name) override { return {runtime_, runtime_->add_stream(), std::move(name)}; }
  bool asynchronous() const override { return mode_ != ExecutionMode::kInline; }
  ExecutionMode execution_mode() const override { return mode_; }

 private:
  ExecutionMode mode_;
  std::shared_ptr<detail::StreamRuntime> runtime_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(ExecutionMode mode, std::uint64_t seed) {
  ZR_CHECK(
      mode != ExecutionMode::kDevice, ErrorCode::kUsage, "the CPU has no streams of its own",
      {.where = "device.cpu", .expected = "inline or chaos", .hint = "make_cuda_device() makes a device that has"});
  return std::make_unique<CpuDevice>(mode, seed);
}

Stream make_nested_stream(std::string name) {
  std::shared_ptr<detail::StreamRuntime> runtime = detail::make_inline_runtime(detail::InlineKind::kNested);
  const int index = runtime->add_stream();
  return {std::move(runtime), index, std::move(name)};
}

}  // namespace zeroth
