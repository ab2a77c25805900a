#include "libtorch/gradient_widths.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

namespace zeroth::libtorch {

void GradientWidths::add(int param) {
  const at::Tensor& tensor = slots_.tensor(param);
  narrow_.push_back({.param = param, .grad_dtype = tensor.grad_dtype()});
  tensor.set_grad_dtype(at::kFloat);
}

// [Note: Width of a gradient] Gradients of several uses of a 16-bit parameter are summed by torch, and that sum must be
// one in fp32: a grad_dtype of float makes torch widen each term before it adds. A parameter used once has no sum, and
// widening it early is only traffic: a temporary of twice the size, whose fresh pages cost more than the cast. So its
// gradient comes as it was computed, and is widened where it is summed, with the same bits. Uses are edges to the
// parameter's accumulator: known when backward begins, and never counted too low. Whoever else holds the accumulator, a
// graph of an earlier step for one, counts as a use more: dearer, not wrong. Pipelines hold graphs of several
// micro-batches, so they count the edges of the one whose backward begins (ChunkGraph::uses()). What a checkpoint
// computes again has edges of its own if gradients go that way (use_reentrant=True): all are counted anew when a
// backward within the backward comes to its first unit. A part of a unit that is computed again so is in no graph when
// backward begins: wide. Counted too low is only a parameter used once outside of such a part, and several times within
// before its first unit: torch adds those in 16 bits.
void GradientWidths::choose(const GradientUses* of_graph) {
  counted_in_ = torch::autograd::get_current_graph_task_id();
  for (const auto& [param, _] : narrow_) {
    const at::Tensor& tensor = slots_.tensor(param);
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    long uses = accumulator == nullptr ? 0 : accumulator.use_count() - 1;  // `accumulator` here is none
    if (of_graph != nullptr) {
      const auto found = of_graph->find(accumulator.get());
      uses = found == of_graph->end() ? 0 : found->second;
    }
    tensor.set_grad_dtype(uses == 1 ? std::nullopt : std::optional(at::kFloat));
  }
}

void GradientWidths::widen_all() {
  for (const auto& [param, _] : narrow_) slots_.tensor(param).set_grad_dtype(at::kFloat);
}

void GradientWidths::restore() {
  for (const auto& [param, grad_dtype] : narrow_) slots_.tensor(param).set_grad_dtype(grad_dtype);
}

}  // namespace zeroth::libtorch
