#include <zeroth/base/tensor_view.h>

#include <gtest/gtest.h>

#include <array>

namespace zeroth {
namespace {

TEST(TensorView, CountsElementsAndBytes) {
  const std::array<std::int64_t, 3> shape{3, 5, 7};
  EXPECT_EQ((ConstTensorView{.shape = shape, .dtype = DType::kBFloat16}.numel()), 105);
  EXPECT_EQ((ConstTensorView{.shape = shape, .dtype = DType::kBFloat16}.bytes()), 210U);
  EXPECT_EQ((TensorView{.shape = shape, .dtype = DType::kFloat64}.bytes()), 840U);
}

TEST(TensorView, ScalarsHaveOneElementAndEmptyOnesNone) {
  EXPECT_EQ(ConstTensorView{}.numel(), 1);
  const std::array<std::int64_t, 2> shape{1 << 20, 0};
  EXPECT_EQ((ConstTensorView{.shape = shape}.numel()), 0);
}

TEST(TensorView, MutableViewIsAConstView) {
  std::array<std::byte, 8> data{};
  const std::array<std::int64_t, 1> shape{2};
  const TensorView view{.data = data.data(), .shape = shape};
  const ConstTensorView read = view;
  EXPECT_EQ(read.data, data.data());
  EXPECT_EQ(read.shape.data(), shape.data());
  EXPECT_EQ(read.dtype, DType::kFloat32);
}

}  // namespace
}  // namespace zeroth
