#include "libtorch/parallel/group_call.h"
#include "libtorch/parallel/parameter_slice.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/tensor_parallel.h>
#include <zeroth/parallel/slices.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/init.h>

#include <cmath>
#include <cstddef>
#include <utility>

namespace zeroth::libtorch {
namespace {

[[noreturn]] void refuse_layer(const RankGroup& group, const char* which, const std::string& message,
                               std::string expected, std::string got) {
  throw Error(ErrorCode::kUsage, message,
              {.where = "libtorch.tensor_parallel",
               .who = group.who(),
               .which = which,
               .expected = std::move(expected),
               .got = std::move(got)});
}

/// As torch::nn::Linear draws it.
struct WholeLinear {
  at::Tensor weight{};
  at::Tensor bias{};
};
WholeLinear draw(const LinearSizes& sizes, const RankGroup& group) {
  if (sizes.in_features < 1 || sizes.out_features < 1)
    refuse_layer(group, "LinearSizes", "a layer has no features", "in_features and out_features from 1",
                 c10::str(sizes.in_features, " and ", sizes.out_features));
  const at::NoGradGuard no_gradient;
  WholeLinear whole;
  whole.weight = at::empty({sizes.out_features, sizes.in_features}, sizes.dtype);
  torch::nn::init::kaiming_uniform_(whole.weight, std::sqrt(5.0));
  if (sizes.bias) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(sizes.in_features));
    whole.bias = at::empty({sizes.out_features}, sizes.dtype).uniform_(-bound, bound);
  }
  return whole;
}

/// As torch::nn::Embedding draws it.
at::Tensor drawn_table(const EmbeddingSizes& sizes, const RankGroup& group) {
  if (sizes.vocabulary < 1 || sizes.features < 1)
    refuse_layer(group, "EmbeddingSizes", "a table has no rows", "vocabulary and features from 1",
                 c10::str(sizes.vocabulary, " and ", sizes.features));
  return at::randn({sizes.vocabulary, sizes.features}, sizes.dtype);
}

void require_linear(const at::Tensor& weight, const at::Tensor& bias, const RankGroup& group) {
  if (!weight.defined() || weight.dim() != 2)
    refuse_layer(group, "weight", "this is no weight of a linear layer", "[out_features, in_features]",
                 weight.defined() ? c10::str(weight.sizes()) : "an undefined tensor");
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0)))
    refuse_layer(group, "bias", "this is not the bias of the weight", c10::str("[", weight.size(0), "]"),
                 c10::str(bias.sizes()));
}

void require_features(const at::Tensor& x, std::int64_t features, const RankGroup& group, const char* layer) {
  if (!x.defined() || x.dim() < 1 || x.size(-1) != features)
    refuse_layer(group, layer, "the input has other features than the layer", c10::str("[..., ", features, "]"),
                 x.defined() ? c10::str(x.sizes()) : "an undefined tensor");
}

}  // namespace

ColumnLinearImpl::ColumnLinearImpl(const LinearSizes& sizes, RankGroup group, LinearCut cut)
    : group_(std::move(group)), cut_(std::move(cut)) {
  const WholeLinear whole = draw(sizes, group_);
  take(whole.weight, whole.bias);
}

ColumnLinearImpl::ColumnLinearImpl(const at::Tensor& whole_weight, const at::Tensor& whole_bias, RankGroup group,
                                   LinearCut cut)
    : group_(std::move(group)), cut_(std::move(cut)) {
  take(whole_weight, whole_bias);
}

void ColumnLinearImpl::take(const at::Tensor& whole_weight, const at::Tensor& whole_bias) {
  require_linear(whole_weight, whole_bias, group_);
  const std::int64_t outputs = whole_weight.size(0);
  if (cut_.parts < 1 || outputs % cut_.parts != 0 || (cut_.parts > 1 && cut_.gather_output))
    refuse_layer(group_, "LinearCut::parts", "the outputs are no such blocks",
                 c10::str("a divisor of ", outputs, ", without gather_output"),
                 c10::str(cut_.parts, cut_.gather_output ? " with gather_output" : ""));
  features_ = slice_sizes(outputs / cut_.parts, group_.size());
  weight = register_parameter("weight", part_of(whole_weight, 0, features_, group_, cut_.parts));
  if (whole_bias.defined()) bias = register_parameter("bias", part_of(whole_bias, 0, features_, group_, cut_.parts));
}

at::Tensor ColumnLinearImpl::forward(const at::Tensor& x) const {
  require_features(x, weight.size(1), group_, "ColumnLinear");
  const at::Tensor out = [&] {
    if (!cut_.sequence_dim) return at::linear(copy_to_group(x, group_), weight, bias);
    if (cut_.gathers_again) return gathered_linear(x, weight, bias, *cut_.sequence_dim, group_, cut_.sequence_sizes);
    return at::linear(all_gather(x, *cut_.sequence_dim, group_, cut_.sequence_sizes), weight, bias);
  }();
  return cut_.gather_output ? gather_from_group(out, -1, group_, features_) : out;
}

std::vector<std::pair<std::string, ParameterBox>> ColumnLinearImpl::boxes() const {
  const auto box = [&](const at::Tensor& part) { return box_of(part, 0, features_, group_, cut_.axis, cut_.parts); };
  std::vector<std::pair<std::string, ParameterBox>> boxes{{"weight", box(weight)}};
  if (bias.defined()) boxes.emplace_back("bias", box(bias));
  return boxes;
}

RowLinearImpl::RowLinearImpl(const LinearSizes& sizes, RankGroup group, LinearCut cut)
    : group_(std::move(group)), cut_(std::move(cut)) {
  const WholeLinear whole = draw(sizes, group_);
  take(whole.weight, whole.bias);
}

RowLinearImpl::RowLinearImpl(const at::Tensor& whole_weight, const at::Tensor& whole_bias, RankGroup group,
                             LinearCut cut)
    : group_(std::move(group)), cut_(std::move(cut)) {
  take(whole_weight, whole_bias);
}

void RowLinearImpl::take(const at::Tensor& whole_weight, const at::Tensor& whole_bias) {
  require_linear(whole_weight, whole_bias, group_);
  features_ = slice_sizes(whole_weight.size(1), group_.size());
  weight = register_parameter("weight", part_of(whole_weight, 1, features_, group_));
  if (whole_bias.defined()) bias = register_parameter("bias", whole_bias.detach().clone());
}

at::Tensor RowLinearImpl::forward(const at::Tensor& x) const {
  require_features(x, cut_.input_is_whole ? sum_of_sizes(features_) : weight.size(1), group_, "RowLinear");
  const at::Tensor own = cut_.input_is_whole ? split_to_group(x, -1, group_, features_) : x;
  const at::Tensor part = at::linear(own, weight);
  const at::Tensor sum = cut_.sequence_dim ? reduce_scatter(part, *cut_.sequence_dim, group_, cut_.sequence_sizes)
                                           : reduce_from_group(part, group_);
  return bias.defined() ? sum + bias : sum;
}

std::vector<std::pair<std::string, ParameterBox>> RowLinearImpl::boxes() const {
  std::vector<std::pair<std::string, ParameterBox>> boxes{{"weight", box_of(weight, 1, features_, group_, cut_.axis)}};
  if (bias.defined() && cut_.sequence_dim && group_.size() > 1) {
    ParameterBox summed;  // each rank adds it to its slice of the sequence
    summed.axes.summed = {cut_.axis};
    boxes.emplace_back("bias", std::move(summed));
  }
  return boxes;
}

VocabEmbeddingImpl::VocabEmbeddingImpl(const EmbeddingSizes& sizes, RankGroup group, LinearCut cut)
    : VocabEmbeddingImpl(drawn_table(sizes, group), std::move(group), std::move(cut)) {}

VocabEmbeddingImpl::VocabEmbeddingImpl(const at::Tensor& whole_weight, RankGroup group, LinearCut cut)
    : group_(std::move(group)), cut_(std::move(cut)) {
  if (!whole_weight.defined() || whole_weight.dim() != 2)
    refuse_layer(group_, "weight", "this is no table of an embedding", "[vocabulary, features]",
                 whole_weight.defined() ? c10::str(whole_weight.sizes()) : "an undefined tensor");
  rows_ = slice_sizes(whole_weight.size(0), group_.size());
  weight = register_parameter("weight", part_of(whole_weight, 0, rows_, group_));
}

at::Tensor VocabEmbeddingImpl::forward(const at::Tensor& indices) const {
  const std::int64_t vocabulary = sum_of_sizes(rows_);
  const bool are_indices =
      indices.defined() && (indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt);
  if (!are_indices)
    refuse_layer(group_, "VocabEmbedding", "these are no indices", "int64 or int32",
                 indices.defined() ? c10::toString(indices.scalar_type()) : "an undefined tensor");
  if (indices.numel() > 0) {
    const std::int64_t least = indices.min().item<std::int64_t>();
    const std::int64_t most = indices.max().item<std::int64_t>();
    if (least < 0 || most >= vocabulary)
      refuse_layer(group_, "VocabEmbedding", "an index is outside the vocabulary", c10::str("0 to ", vocabulary - 1),
                   c10::str(least < 0 ? least : most));
  }
  if (group_.size() == 1) return at::embedding(weight, indices);
  const OwnPart own = own_part(rows_, group_.rank());
  at::Tensor part;
  if (own.length > 0) {
    const at::Tensor local = indices - own.begin;
    const at::Tensor strange = local.lt(0).logical_or_(local.ge(own.length));
    part = at::embedding(weight, local.masked_fill(strange, 0)).masked_fill(strange.unsqueeze(-1), 0);
  } else {  // fewer words than ranks
    std::vector<std::int64_t> shape = indices.sizes().vec();
    shape.push_back(weight.size(1));
    part = weight.sum(0).expand(shape);
  }
  return cut_.sequence_dim ? reduce_scatter(part, *cut_.sequence_dim, group_, cut_.sequence_sizes)
                           : reduce_from_group(part, group_);
}

std::vector<std::pair<std::string, ParameterBox>> VocabEmbeddingImpl::boxes() const {
  return {{"weight", box_of(weight, 0, rows_, group_, cut_.axis)}};
}

}  // namespace zeroth::libtorch
