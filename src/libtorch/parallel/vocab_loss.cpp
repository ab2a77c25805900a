#include "libtorch/parallel/group_call.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/tensor_parallel.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <limits>
#include <string>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr CallName kCallVocabLoss{.call = "vocab_cross_entropy", .number = 11};

/// Where the targets of a flat batch are, for the words of one rank.
struct OwnTargets {
  at::Tensor index{};   ///< [N], among own words; 0 where it is not own
  at::Tensor is_own{};  ///< [N] bool
  at::Tensor counts{};  ///< [N] bool: not ignored
};

OwnTargets own_targets(const at::Tensor& targets, const OwnPart& own, std::int64_t ignore_index) {
  OwnTargets found;
  found.counts = targets.ne(ignore_index);
  const at::Tensor local = targets - own.begin;
  found.is_own = local.ge(0).logical_and_(local.lt(own.length)).logical_and_(found.counts);
  found.index = local.masked_fill(found.is_own.logical_not(), 0);
  return found;
}

at::Tensor widened(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
}

class VocabLoss : public torch::autograd::Function<VocabLoss> {
 public:
  /// logits [N, own words], targets [N]; the loss of each target, 0 for an ignored one.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            const RankGroup& group, const OwnPart& own, std::int64_t ignore_index) {
    const at::Tensor wide = widened(logits);
    const OwnTargets own_words = own_targets(targets, own, ignore_index);
    const auto none = [&](double value) { return at::full({targets.size(0)}, value, wide.options()); };
    at::Tensor most = own.length > 0 ? wide.amax(-1) : none(-std::numeric_limits<double>::infinity());
    if (group.size() > 1) most = sum_over(most, group, kCallVocabLoss, ReduceOp::kMax);
    at::Tensor exponentials = none(0);
    at::Tensor chosen = none(0);
    if (own.length > 0) {
      exponentials = (wide - most.unsqueeze(-1)).exp_().sum(-1);
      const at::Tensor at_target = wide.gather(1, own_words.index.unsqueeze(1)).squeeze(1) - most;
      chosen = at_target.masked_fill(own_words.is_own.logical_not(), 0);
    }
    if (group.size() > 1) {
      const at::Tensor sums = sum_over(at::stack({exponentials, chosen}), group, kCallVocabLoss);
      exponentials = sums[0];
      chosen = sums[1];
    }
    const at::Tensor log_sum = exponentials.log();
    context->save_for_backward({logits, targets, most + log_sum});
    context->saved_data["begin"] = own.begin;
    context->saved_data["length"] = own.length;
    context->saved_data["ignore_index"] = ignore_index;
    return (log_sum - chosen).masked_fill(own_words.counts.logical_not(), 0);
  }

  /// softmax - onehot, times the gradient of each loss.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    ZR_CHECK(!at::GradMode::is_enabled(), ErrorCode::kUsage, "there is no gradient of this gradient",
             {.where = "libtorch.vocab_cross_entropy",
              .got = "backward with create_graph=true",
              .hint = "gather the logits with gather_from_group() and use torch's cross entropy"});
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const OwnPart own{.begin = context->saved_data["begin"].toInt(), .length = context->saved_data["length"].toInt()};
    const OwnTargets own_words = own_targets(saved[1], own, context->saved_data["ignore_index"].toInt());
    at::Tensor wide = (widened(logits) - saved[2].unsqueeze(-1)).exp_();
    if (own.length > 0) {
      wide.scatter_add_(1, own_words.index.unsqueeze(1), own_words.is_own.to(wide.scalar_type()).neg().unsqueeze(1));
    }
    const at::Tensor scale = gradients[0].to(wide.scalar_type()).masked_fill(own_words.counts.logical_not(), 0);
    // An ignored target gives 0 even where the softmax is not finite.
    wide.mul_(scale.unsqueeze(-1)).masked_fill_(own_words.counts.logical_not().unsqueeze(-1), 0);
    return {wide.to(logits.scalar_type()), {}, {}, {}, {}};
  }
};

void require_loss(const at::Tensor& logits, const at::Tensor& targets, const RankGroup& group) {
  require_exchangeable(logits, group, kCallVocabLoss, "local_logits");
  require_exchangeable(targets, group, kCallVocabLoss, "targets");
  if (!logits.is_floating_point() || logits.dim() < 1)
    refuse(group, kCallVocabLoss, "local_logits", "these are no logits", "floating, [..., own vocabulary]",
           c10::str(logits.scalar_type(), " ", logits.sizes()));
  if (targets.scalar_type() != at::kLong || targets.sizes() != logits.sizes().slice(0, logits.sizes().size() - 1))
    refuse(group, kCallVocabLoss, "targets", "targets do not fit the logits",
           c10::str("int64 of shape ", logits.sizes().slice(0, logits.sizes().size() - 1)),
           c10::str(targets.scalar_type(), " ", targets.sizes()));
}

}  // namespace

at::Tensor vocab_cross_entropy(const at::Tensor& local_logits, const at::Tensor& targets, const RankGroup& group,
                               const VocabLossOptions& options) {
  require_loss(local_logits, targets, group);
  const std::int64_t dim = local_logits.dim() - 1;
  const std::vector<std::int64_t> sizes =
      sizes_with_own(local_logits, dim, options.vocab_sizes, group, kCallVocabLoss, "vocab_sizes");
  const std::int64_t vocabulary = sum_of_sizes(sizes);
  const at::Tensor flat_targets = targets.reshape(-1);
  const at::Tensor counts = flat_targets.ne(options.ignore_index);
  const at::Tensor strange = flat_targets.lt(0).logical_or_(flat_targets.ge(vocabulary)).logical_and_(counts);
  if (strange.any().item<bool>())
    refuse(group, kCallVocabLoss, "targets", "a target is outside the vocabulary", c10::str("0 to ", vocabulary - 1),
           c10::str(flat_targets.masked_select(strange)[0].item<std::int64_t>()),
           "give targets that do not count the value of ignore_index");
  const at::Tensor flat = local_logits.reshape({flat_targets.size(0), local_logits.size(-1)});
  const at::Tensor losses =
      VocabLoss::apply(flat, flat_targets, group, own_part(sizes, group.rank()), options.ignore_index);
  switch (options.reduction) {
    case LossReduction::kNone:
      return losses.view(targets.sizes());
    case LossReduction::kSum:
      return losses.sum();
    case LossReduction::kMean:
      return losses.sum() / counts.sum();
  }
  throw Error(ErrorCode::kInternal, "there is no such reduction", {.where = "libtorch.vocab_cross_entropy"});
}

}  // namespace zeroth::libtorch
