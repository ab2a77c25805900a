#include "device/cuda/cuda_device.h"

#include "device/cuda/cuda_runtime.h"

#include <zeroth/base/text.h>

#include <string>
#include <utility>

namespace zeroth {
namespace {

class CudaDevice final : public Device {
 public:
  CudaDevice(const detail::CudaTable& cuda, int ordinal, Milliseconds timeout)
      : cuda_(cuda), ordinal_(ordinal), runtime_(detail::make_cuda_runtime(cuda, ordinal, timeout)) {}
  ~CudaDevice() override { runtime_->close(); }

  std::string_view kind() const override { return "cuda"; }
  int ordinal() const override { return ordinal_; }
  Arena make_arena(ArenaKind kind, std::size_t bytes, std::string_view name) override {
    if (kind != ArenaKind::kDevice) return Arena::create(kind, bytes, name);
    if (bytes == 0) return Arena::over(kind, {}, name, nullptr);
    const detail::CudaDeviceScope scope(cuda_, ordinal_, "device.cuda");
    void* memory = nullptr;
    detail::check_cuda(cuda_, cuda_.allocate(&memory, bytes), format_bytes(bytes) + " for " + std::string(name),
                       "device.cuda");
    std::shared_ptr<void> keep(memory, [&cuda = cuda_](void* given) { (void)cuda.release(given); });
    return Arena::over(kind, {static_cast<std::byte*>(memory), bytes}, name, std::move(keep));
  }
  CopyMemory make_copy_memory(std::size_t bytes, std::string_view name) override {
    if (bytes == 0) return {};
    const detail::CudaDeviceScope scope(cuda_, ordinal_, "device.cuda");
    detail::PinResult pinned = detail::pin_memory(cuda_, bytes);
    if (pinned.status != detail::kCudaSuccess) {
      (void)cuda_.take_last_error();
      return {.arena = Arena::create(ArenaKind::kPrivate, bytes, name), .refusal = cuda_.error_string(pinned.status)};
    }
    std::byte* const memory = pinned.memory.get();
    return {.arena = Arena::over(ArenaKind::kPrivate, {memory, bytes}, name,
                                 std::shared_ptr<std::byte>(std::move(pinned.memory)))};
  }
  Stream make_stream(std::string name) override { return {runtime_, runtime_->add_stream(), std::move(name)}; }
  bool asynchronous() const override { return true; }
  ExecutionMode execution_mode() const override { return ExecutionMode::kDevice; }

 private:
  const detail::CudaTable& cuda_;
  int ordinal_;
  std::shared_ptr<detail::StreamRuntime> runtime_;
};

}  // namespace

std::unique_ptr<Device> detail::make_cuda_device(const CudaTable& cuda, int ordinal, Milliseconds timeout) {
  const int count = count_cuda_devices(cuda, "device.cuda");
  ZR_CHECK(ordinal >= 0 && ordinal < count, ErrorCode::kUsage, "there is no such CUDA device",
           {.where = "device.cuda", .expected = "0 to " + std::to_string(count - 1), .got = std::to_string(ordinal)});
  return std::make_unique<CudaDevice>(cuda, ordinal, timeout);
}

std::unique_ptr<Device> make_cuda_device(int ordinal, Milliseconds timeout) {
  return detail::make_cuda_device(detail::load_cuda(), ordinal, timeout);
}

}  // namespace zeroth
