#include "libtorch/pipeline/stage_values.h"

#include <zeroth/base/error.h>

#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace zeroth::libtorch {
namespace {

constexpr std::uint32_t kMostTensors = 1U << 20U;
constexpr std::uint32_t kMostDims = 64;
constexpr std::uint8_t kUndefined = 1;
constexpr std::uint8_t kHasGradient = 2;
constexpr std::uint8_t kInSlices = 4;
constexpr std::uint8_t kOnDevice = 8;

template <class T>
void put(std::string& into, T value) {
  into.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class Reader {
 public:
  Reader(std::string_view bytes, const std::string& from) : bytes_(bytes), from_(from) {}

  template <class T>
  T take() {
    require(bytes_.size() >= sizeof(T), "more bytes");
    T value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string take_text(std::size_t length) {
    require(bytes_.size() >= length, "more bytes");
    std::string text(bytes_.substr(0, length));
    bytes_.remove_prefix(length);
    return text;
  }
  [[nodiscard]] bool at_end() const { return bytes_.empty(); }
  void require(bool holds, const char* expected) const {
    ZR_CHECK(holds, ErrorCode::kMismatch, "a description of values between stages is damaged",
             {.where = "libtorch.pipeline",
              .who = from_,
              .expected = expected,
              .hint = "all ranks must run the same version of Zeroth"});
  }

 private:
  std::string_view bytes_;
  const std::string& from_;
};

}  // namespace

std::string form_of(const SentValues& values) {
  std::string form;
  put(form, static_cast<std::uint32_t>(values.tensors.size()));
  for (std::size_t index = 0; index < values.tensors.size(); ++index) {
    const at::Tensor& tensor = values.tensors[index];
    const bool defined = tensor.defined();
    const bool in_slices = !values.in_slices.empty() && values.in_slices[index];
    const bool on_device = !values.on_device.empty() && values.on_device[index];
    put(form, static_cast<std::uint8_t>((defined ? 0 : kUndefined) | (values.has_gradient[index] ? kHasGradient : 0) |
                                        (in_slices ? kInSlices : 0) | (on_device ? kOnDevice : 0)));
    if (!defined) continue;
    put(form, static_cast<std::int8_t>(tensor.scalar_type()));
    put(form, static_cast<std::uint32_t>(tensor.dim()));
    for (const std::int64_t extent : tensor.sizes()) put(form, extent);
  }
  put(form, static_cast<std::uint32_t>(values.structure.size()));
  return form + values.structure;
}

SentValues read_form(std::string_view form, const std::string& from) {
  Reader reader(form, from);
  SentValues values;
  const auto count = reader.take<std::uint32_t>();
  reader.require(count <= kMostTensors, "fewer tensors");
  for (std::uint32_t index = 0; index < count; ++index) {
    const auto flags = reader.take<std::uint8_t>();
    values.has_gradient.push_back((flags & kHasGradient) != 0);
    values.in_slices.push_back((flags & kInSlices) != 0);
    values.on_device.push_back((flags & kOnDevice) != 0);
    if ((flags & kUndefined) != 0) {
      values.tensors.emplace_back();
      continue;
    }
    const auto type = reader.take<std::int8_t>();
    reader.require(type >= 0 && type < static_cast<std::int8_t>(at::ScalarType::NumOptions), "a dtype of torch");
    const auto scalar = static_cast<at::ScalarType>(type);
    const auto dims = reader.take<std::uint32_t>();
    reader.require(dims <= kMostDims, "fewer dimensions");
    std::vector<std::int64_t> sizes;
    std::int64_t left = std::numeric_limits<std::int64_t>::max() / 64;
    for (std::uint32_t dim = 0; dim < dims; ++dim) {
      const auto extent = reader.take<std::int64_t>();
      reader.require(extent >= 0 && extent <= left, "sizes that memory can have");
      if (extent > 0) left /= extent;
      sizes.push_back(extent);
    }
    values.tensors.push_back(at::empty(sizes, at::TensorOptions().dtype(scalar)));
  }
  values.structure = reader.take_text(reader.take<std::uint32_t>());
  reader.require(reader.at_end(), "no more bytes");
  return values;
}

std::vector<at::Tensor> shared_by(int root, std::vector<at::Tensor> tensors, const Communicator& stages) {
  const bool here = stages.rank() == root;
  SentValues values;
  if (here) {
    for (const at::Tensor& tensor : tensors)
      values.tensors.push_back(tensor.defined() ? tensor.detach().cpu().contiguous() : tensor);
    values.has_gradient.assign(tensors.size(), false);
  }
  std::string form = here ? form_of(values) : "";
  auto length = static_cast<std::int64_t>(form.size());
  stages.broadcast(std::span(&length, 1), root);
  form.resize(static_cast<std::size_t>(length));
  stages.broadcast(std::span(reinterpret_cast<std::uint8_t*>(form.data()), form.size()), root);
  if (!here) values = read_form(form, "stage " + std::to_string(root));
  for (const at::Tensor& tensor : values.tensors) {
    if (!tensor.defined() || tensor.nbytes() == 0) continue;
    stages.broadcast(std::span(static_cast<std::uint8_t*>(tensor.mutable_data_ptr()), tensor.nbytes()), root);
  }
  return std::move(values.tensors);
}

}  // namespace zeroth::libtorch
