#include "libtorch/pipeline/kept_forward.h"

#include <zeroth/base/error.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <mutex>
#include <numeric>
#include <string>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr const char* kKeptWhere = "libtorch.pipeline";

std::vector<std::uint32_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint32_t> versions;
  for (const at::Tensor& tensor : tensors) {
    const bool counts = tensor.defined() && !tensor.is_inference();
    versions.push_back(counts ? static_cast<std::uint32_t>(tensor._version()) : 0);
  }
  return versions;
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.nbytes() : 0;
}

}  // namespace

RandomState RandomState::now(c10::Device device) {
  RandomState random;
  std::vector<c10::Device> devices{c10::Device(at::kCPU)};
  if (device.type() != at::kCPU) devices.push_back(device);
  for (const c10::Device& one : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(one);
    const std::lock_guard lock(generator.mutex());
    random.states_.push_back({generator, generator.get_state()});
  }
  return random;
}

void RandomState::set() const {
  for (const auto& [generator, state] : states_) {
    at::Generator own = generator;
    const std::lock_guard lock(own.mutex());
    own.set_state(state);
  }
}

std::size_t RandomState::bytes() const {
  return std::accumulate(states_.begin(), states_.end(), std::size_t{0},
                         [](std::size_t sum, const Of& one) { return sum + bytes_of(one.state); });
}

KeptForward::KeptForward(SentValues inputs, const Buffers& buffers, c10::Device device)
    : inputs_(std::move(inputs)),
      versions_(versions_of(inputs_.tensors)),
      device_(device),
      random_(RandomState::now(device)) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own = buffers();
  buffer_versions_ = versions_of(own);
  for (std::size_t index = 0; index < own.size(); ++index) {
    if (!own[index].defined()) continue;
    written_.push_back({.index = index, .before = own[index].clone()});
  }
  buffers_ = std::move(own);
}

void KeptForward::ran(const Buffers& buffers) {
  require_unwritten();
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> own = buffers();
  ZR_ASSERT(own.size() == buffers_.size(), "a chunk has always as many buffers");
  const std::vector<std::uint32_t> versions = versions_of(own);
  std::vector<Written> written;
  for (Written& one : written_) {
    const at::Tensor& now = own[one.index];
    const bool other = !now.is_same(buffers_[one.index]) || now.sizes() != one.before.sizes();
    one.counted = other || versions[one.index] != buffer_versions_[one.index];
    // Kernels of batch norm write without a new version.
    if (one.counted || !at::equal(one.before, now)) written.push_back(std::move(one));
  }
  written_ = std::move(written);
  buffers_.clear();
  buffer_versions_.clear();
}

void KeptForward::require_unwritten() const {
  const std::vector<std::uint32_t> versions = versions_of(inputs_.tensors);
  for (std::size_t index = 0; index < versions.size(); ++index) {
    ZR_CHECK(versions[index] == versions_[index], ErrorCode::kModel,
             "a chunk cannot be computed again: its input was written in place",
             {.where = kKeptWhere,
              .which = "tensor " + std::to_string(index) + ", " + inputs_.tensors[index].toString() + " " +
                       c10::str(inputs_.tensors[index].sizes()),
              .expected = "forwards that leave what they are given as it is",
              .hint = "zeroth.pipeline.recompute=false keeps what backward needs"});
  }
}

SentValues KeptForward::inputs() const {
  require_unwritten();
  SentValues inputs = inputs_;
  for (at::Tensor& tensor : inputs.tensors) {
    if (tensor.defined()) tensor = tensor.detach();
  }
  return inputs;
}

void KeptForward::flush(SavedTensors& saved) {
  require_unwritten();
  for (at::Tensor& tensor : inputs_.tensors) {
    flushed_.push_back(tensor.defined() ? saved.pack(tensor, /*move=*/true) : nullptr);
    tensor = at::Tensor();
  }
}

void KeptForward::fetch() {
  for (std::size_t index = flushed_.size(); index-- > 0;)
    if (flushed_[index]) inputs_.tensors[index] = flushed_[index]->unpack();
  flushed_.clear();
  versions_ = versions_of(inputs_.tensors);
}

std::size_t KeptForward::bytes() const {
  std::size_t bytes = random_.bytes();
  for (const at::Tensor& tensor : inputs_.tensors) bytes += bytes_of(tensor);
  for (const Written& one : written_) bytes += bytes_of(one.before);
  return bytes;
}

/// Where torch did not count the forward's own write as a new version, it must not count this one: the graphs of other
/// micro-batches have saved such a buffer.
void KeptForward::put(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& into) const {
  const at::NoGradGuard no_grad;
  for (std::size_t index = 0; index < written_.size(); ++index) {
    const at::Tensor& target = into[written_[index].index];
    at::Tensor to = written_[index].counted ? target : target.variable_data();
    to.copy_(values[index]);
  }
}

void KeptForward::again(const Buffers& buffers, const std::function<void()>& forward) const {
  const RandomState random = RandomState::now(device_);
  const std::vector<at::Tensor> own = buffers();
  std::vector<at::Tensor> now;
  std::vector<at::Tensor> before;
  for (const Written& one : written_) {
    now.push_back(own[one.index].detach().clone());
    before.push_back(one.before);
  }
  put(before, own);
  random_.set();
  forward();  // one that throws ends the step, and its values with it
  random.set();
  put(now, buffers());
}

}  // namespace zeroth::libtorch
