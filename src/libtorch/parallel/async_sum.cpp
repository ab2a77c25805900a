#include "libtorch/parallel/group_call.h"
#include "libtorch/parallel/kept_call.h"
#include "libtorch/parallel/sum_slots.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/async_sum.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/parallel/slices.h>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

struct PendingSum::State {
  RankGroup group;
  at::Tensor x{};                   ///< until the sum is taken
  std::shared_ptr<SumSlot> slot{};  ///< where the own part lies; null: the sum is made in wait()
  RegionCall call{};                ///< of the slot's sum
  at::Tensor sum{};
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr CallName kCallAsyncSum{.call = "reduce_from_group_async", .number = 12};
constexpr CallName kCallChunks{.call = "chunked_linear_reduce", .number = 13};

SumSlots& slots_of(const RankGroup& group) {
  if (!group.sum_slots()) group.sum_slots() = std::make_shared<SumSlots>();
  return *group.sum_slots();
}

/// The sum of what was given, whose gradient is that of what was given.
class TakenSum : public torch::autograd::Function<TakenSum> {
 public:
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& x, const std::shared_ptr<SumSlot>& slot,
                            const RankGroup& group, RegionCall& call) {
    return call.keep(call.hands_out() ? call.kept()[0] : slots_of(group).take(*slot, x, kCallAsyncSum, group));
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) {
    return {gradients[0], {}, {}, {}};
  }
};

/// The rows of a product, piece by piece; the sum of each piece is under way while the next is computed.
class ChunkedProduct : public torch::autograd::Function<ChunkedProduct> {
 public:
  /// x [rows, own features], weight [out, own features]
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, int chunks,
                            const RankGroup& group) {
    context->save_for_backward({x, weight});
    RegionCall call(kCallChunks, {x}, group);
    if (call.hands_out()) return call.keep(call.kept()[0]);
    SumSlots& slots = slots_of(group);
    struct Piece {
      at::Tensor part{};
      std::shared_ptr<SumSlot> slot{};
    };
    std::vector<Piece> pieces;
    at::Tensor out;
    std::int64_t done = 0;
    const auto take_first = [&](std::size_t index) {
      const Piece piece = std::exchange(pieces[index], {});
      if (!out.defined()) out = at::empty({x.size(0), weight.size(0)}, piece.part.options());  // autocast's dtype
      out.narrow(0, done, piece.part.size(0)).copy_(slots.take(*piece.slot, piece.part, kCallChunks, group));
      done += piece.part.size(0);
    };
    std::int64_t begin = 0;
    for (const std::int64_t rows : slice_sizes(x.size(0), chunks)) {
      Piece& piece = pieces.emplace_back();
      piece.part = at::linear(x.narrow(0, begin, rows), weight);
      piece.slot = slots.give(piece.part, kCallChunks, group);
      begin += rows;
      if (pieces.size() > 1) take_first(pieces.size() - 2);
    }
    if (!pieces.empty()) take_first(pieces.size() - 1);
    return call.keep(out);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    variable_list result(4);
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    // Under autocast the three may have other dtypes.
    const at::Tensor gradient = gradients[0].to(weight.scalar_type());
    if (context->needs_input_grad(0)) result[0] = gradient.matmul(weight).to(x.scalar_type());
    if (context->needs_input_grad(1)) result[1] = gradient.t().matmul(x.to(weight.scalar_type()));
    return result;
  }
};

}  // namespace

at::Tensor PendingSum::wait() const {
  State& state = *state_;
  if (state.sum.defined()) return state.sum;
  if (state.slot || state.call.hands_out()) {
    state.sum = TakenSum::apply(state.x, std::as_const(state.slot), std::as_const(state.group), state.call);
  } else {
    state.sum = reduce_from_group(state.x, state.group);
  }
  state.x.reset();
  state.slot.reset();
  state.call = {};
  return state.sum;
}

PendingSum reduce_from_group_async(const at::Tensor& x, const RankGroup& group) {
  require_exchangeable(x, group, kCallAsyncSum);
  if (x.scalar_type() == at::kByte)
    refuse(group, kCallAsyncSum, "x", "there are no sums of this dtype", "any dtype but uint8", "uint8");
  auto state = std::make_shared<PendingSum::State>(PendingSum::State{.group = group, .x = x});
  if (SumSlots::serves(group, x)) {
    state->call = RegionCall(kCallAsyncSum, {x}, group);
    if (!state->call.hands_out()) state->slot = slots_of(group).give(x, kCallAsyncSum, group);
  }
  return PendingSum(std::move(state));
}

at::Tensor chunked_linear_reduce(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int chunks,
                                 const RankGroup& group) {
  require_exchangeable(x, group, kCallChunks, "x");
  require_exchangeable(weight, group, kCallChunks, "weight");
  if (chunks < 1) refuse(group, kCallChunks, "chunks", "there are no pieces", "1 or more", std::to_string(chunks));
  const bool same_dtype =
      x.scalar_type() == weight.scalar_type() || at::autocast::is_autocast_enabled(x.device().type());
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1) || !same_dtype || !x.is_floating_point())
    refuse(group, kCallChunks, "x", "the product of x and weight does not exist",
           "floating x [..., own features] and weight [out, own features]",
           c10::str(x.scalar_type(), " ", x.sizes(), " and ", weight.scalar_type(), " ", weight.sizes()));
  at::Tensor sum;
  if (SumSlots::serves(group, x)) {
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    const auto most = static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(chunks, rows.size(0))));
    std::vector<std::int64_t> shape = x.sizes().vec();
    shape.back() = weight.size(0);
    sum = ChunkedProduct::apply(rows, weight, most, group).view(shape);
  } else {
    sum = reduce_from_group(at::linear(x, weight), group);
  }
  return bias.defined() ? sum + bias : sum;
}

}  // namespace zeroth::libtorch
