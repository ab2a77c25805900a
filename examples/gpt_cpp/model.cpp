#include "model.h"

#include "random.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/router.h>
#include <zeroth/libtorch/same_tensors.h>
#include <zeroth/parallel/slices.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>

namespace gpt {
namespace {

using zeroth::libtorch::RankGroup;

constexpr double kDeviation = 0.02;
constexpr double kRotaryBase = 10000.0;
constexpr double kNormEpsilon = 1e-6;

// Projections that write into the residual stream start smaller, so that its variance does not grow with the
// depth. Ref: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
double residual_deviation(std::int64_t layers) {
  return kDeviation / std::sqrt(2.0 * static_cast<double>(layers));
}

void fill(torch::Tensor& weight, std::uint64_t key, double deviation) {
  const auto count = static_cast<std::size_t>(weight.numel());
  if (weight.scalar_type() == torch::kFloat64) {
    fill_scaled_uniform(std::span(weight.data_ptr<double>(), count), key, deviation);
  } else {
    fill_scaled_uniform(std::span(weight.data_ptr<float>(), count), key, deviation);
  }
}

}  // namespace

std::int64_t hidden_width(std::int64_t d_model) {
  return std::max<std::int64_t>(32, (d_model * 8 / 3 + 16) / 32 * 32);
}

ProjectionImpl::ProjectionImpl(std::int64_t in, std::int64_t out, double initial_deviation, torch::Dtype dtype)
    : deviation(initial_deviation) {
  weight = register_parameter("weight", torch::empty({out, in}, dtype));
}

torch::Tensor ProjectionImpl::forward(const torch::Tensor& x) {
  if (column_) {
    return column_->forward(x);
  }
  return row_ ? row_->forward(x) : torch::linear(x, weight);
}

void ProjectionImpl::share_outputs(const RankGroup& group, int parts) {
  column_ = zeroth::libtorch::ColumnLinear(weight, torch::Tensor(), group, zeroth::libtorch::LinearCut{.parts = parts});
  take(column_->weight);
}

void ProjectionImpl::share_inputs(const RankGroup& group) {
  row_ = zeroth::libtorch::RowLinear(weight, torch::Tensor(), group);
  take(row_->weight);
}

// The shared layer is no submodule, and its parameter is this one's: names are those of the whole model.
void ProjectionImpl::take(const torch::Tensor& part) {
  weight = part;
  parameters_["weight"] = part;
}

Boxes ProjectionImpl::boxes() const {
  if (column_) {
    return column_->boxes();
  }
  return row_ ? row_->boxes() : Boxes{};
}

RmsNormImpl::RmsNormImpl(std::int64_t width, torch::Dtype dtype) {
  weight = register_parameter("weight", torch::ones({width}, dtype));
}

torch::Tensor RmsNormImpl::forward(const torch::Tensor& x) {
  return torch::rms_norm(x, weight.sizes(), weight, kNormEpsilon);
}

Rotary::Rotary(std::int64_t head_width, std::int64_t seq, torch::Dtype dtype) {
  const torch::Tensor position_T = torch::arange(seq, torch::kFloat64);
  const torch::Tensor exponent_h = torch::arange(0, head_width, 2, torch::kFloat64) / static_cast<double>(head_width);
  const torch::Tensor angle_T11h = torch::outer(position_T, torch::pow(kRotaryBase, -exponent_h)).view({seq, 1, 1, -1});
  cos_T11h_ = angle_T11h.cos().to(dtype);
  sin_T11h_ = angle_T11h.sin().to(dtype);
}

torch::Tensor Rotary::rotate(const torch::Tensor& x_BT2NH) const {
  const std::int64_t length = x_BT2NH.size(1);
  const torch::Tensor cos = cos_T11h_.narrow(0, 0, length).to(x_BT2NH.scalar_type());
  const torch::Tensor sin = sin_T11h_.narrow(0, 0, length).to(x_BT2NH.scalar_type());
  const auto halves = x_BT2NH.chunk(2, -1);
  return torch::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

torch::Tensor SharedSequence::own_slice(const torch::Tensor& x_BT) const {
  return x_BT.split_with_sizes(sizes, 1)[static_cast<std::size_t>(group.rank())].contiguous();
}

AttentionImpl::AttentionImpl(const ModelOptions& options, std::shared_ptr<const Rotary> rotary)
    : head_width_(options.d_model / options.heads),
      rotary_(std::move(rotary)),
      qkv_(register_module("qkv", Projection(options.d_model, 3 * options.d_model, kDeviation, options.dtype))),
      out_(register_module(
          "out", Projection(options.d_model, options.d_model, residual_deviation(options.layers), options.dtype))) {}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x_BTD) {
  const std::int64_t B = x_BTD.size(0);
  const std::int64_t T = x_BTD.size(1);
  const torch::Tensor qkv = qkv_->forward(x_BTD);
  const std::int64_t heads = qkv.size(2) / (3 * head_width_);
  torch::Tensor qkv_BT3NH = qkv.view({B, T, 3, heads, head_width_});
  if (sequence_) {  // T: of the whole sequence, N: a part of the heads
    qkv_BT3NH = zeroth::libtorch::all_to_all(qkv_BT3NH, 3, 1, sequence_->group, {}, sequence_->sizes);
  }
  const torch::Tensor qk_BT2NH = rotary_->rotate(qkv_BT3NH.narrow(2, 0, 2));
  const torch::Tensor q_BNTH = qk_BT2NH.select(2, 0).transpose(1, 2);
  const torch::Tensor k_BNTH = qk_BT2NH.select(2, 1).transpose(1, 2);
  const torch::Tensor v_BNTH = qkv_BT3NH.select(2, 2).transpose(1, 2);
  const torch::Tensor y_BNTH =
      torch::scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, {}, /*dropout_p=*/0.0, /*is_causal=*/true);
  torch::Tensor y_BTNH = y_BNTH.transpose(1, 2);
  if (sequence_) {
    const auto shares = zeroth::slice_sizes(heads, sequence_->group.size());
    y_BTNH = zeroth::libtorch::all_to_all(y_BTNH, 1, 2, sequence_->group, sequence_->sizes, shares);
  }
  return out_->forward(y_BTNH.reshape({B, T, heads * head_width_}));
}

void AttentionImpl::share(const RankGroup& group) {
  qkv_->share_outputs(group, /*parts=*/3);
  out_->share_inputs(group);
}

MlpImpl::MlpImpl(const ModelOptions& options)
    : gate_up_(register_module(
          "gate_up", Projection(options.d_model, 2 * hidden_width(options.d_model), kDeviation, options.dtype))),
      down_(register_module("down", Projection(hidden_width(options.d_model), options.d_model,
                                               residual_deviation(options.layers), options.dtype))) {}

torch::Tensor MlpImpl::forward(const torch::Tensor& x_BTD) {
  const auto gate_and_up_BTF = gate_up_->forward(x_BTD).chunk(2, -1);
  return down_->forward(torch::silu(gate_and_up_BTF[0]) * gate_and_up_BTF[1]);
}

void MlpImpl::share(const RankGroup& group) {
  gate_up_->share_outputs(group, /*parts=*/2);
  down_->share_inputs(group);
}

MoeImpl::MoeImpl(const ModelOptions& options)
    : choices_(options.choices),
      down_deviation_(residual_deviation(options.layers)),
      router_(register_module("router", Projection(options.d_model, options.experts, kDeviation, options.dtype))),
      experts_(register_module(
          "experts",
          zeroth::libtorch::GatedExperts(
              torch::empty({options.experts, 2 * hidden_width(options.d_model), options.d_model}, options.dtype),
              torch::empty({options.experts, options.d_model, hidden_width(options.d_model)}, options.dtype)))) {}

torch::Tensor MoeImpl::forward(const torch::Tensor& x_BTD) {
  const torch::Tensor x = x_BTD.flatten(0, 1);
  const zeroth::libtorch::Routing routing = zeroth::libtorch::route(router_->forward(x), {.choices = choices_});
  return experts_->forward(x, routing.experts, routing.weights).view_as(x_BTD);
}

void MoeImpl::fill_experts(std::uint64_t seed, const std::string& name) {
  fill(experts_->gate_up, key_of(seed, zeroth::digest64(name + ".experts.gate_up")), kDeviation);
  fill(experts_->down, key_of(seed, zeroth::digest64(name + ".experts.down")), down_deviation_);
}

BlockImpl::BlockImpl(const ModelOptions& options, std::shared_ptr<const Rotary> rotary)
    : attention_norm_(register_module("attention_norm", RmsNorm(options.d_model, options.dtype))),
      attention_(register_module("attention", Attention(options, std::move(rotary)))),
      mlp_norm_(register_module("mlp_norm", RmsNorm(options.d_model, options.dtype))) {
  if (options.experts > 0) {
    moe_ = register_module("moe", Moe(options));
  } else {
    mlp_ = register_module("mlp", Mlp(options));
  }
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x_BTD) {
  const torch::Tensor h_BTD = x_BTD + attention_->forward(attention_norm_->forward(x_BTD));
  const torch::Tensor normed_BTD = mlp_norm_->forward(h_BTD);
  return h_BTD + (moe_ ? moe_->forward(normed_BTD) : mlp_->forward(normed_BTD));
}

void BlockImpl::share(const RankGroup& group) {
  attention_->share(group);
  if (mlp_) {
    mlp_->share(group);
  }
}

GptImpl::GptImpl(const ModelOptions& options) : options_(options), last_norm_(RmsNorm(options.d_model, options.dtype)) {
  torch::NoGradGuard no_grad;
  embedding_VD_ = register_parameter("embedding", torch::empty({options.vocab, options.d_model}, options.dtype));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  register_module("last_norm", last_norm_);
  const auto rotary = std::make_shared<const Rotary>(options.d_model / options.heads, options.seq, options.dtype);
  fill(embedding_VD_, key_of(options.seed, zeroth::digest64("embedding")), kDeviation);
  const auto fill_projection = [&](const std::string& name, torch::nn::Module& module) {
    if (auto* projection = module.as<Projection>()) {
      fill(projection->weight, key_of(options.seed, zeroth::digest64(name)), projection->deviation);
    }
  };
  for (std::int64_t i = 0; i < options.layers; ++i) {
    Block block(options, rotary);
    const std::string name = "blocks." + std::to_string(i);
    block->apply(fill_projection, name);
    if (block->moe()) {
      block->moe()->fill_experts(options.seed, name + ".moe");
    }
    units_.emplace_back(std::move(block));
    blocks_->push_back(units_.back());
  }
  for (const torch::Tensor& parameter : parameters()) {
    num_parameters_ += parameter.numel();
  }
}

void GptImpl::share(const RankGroup& group) {
  const std::int64_t heads = options_.heads;
  if (heads % group.size() != 0) {
    std::string fits;
    for (std::int64_t ranks = 1; ranks <= heads; ++ranks) {
      if (heads % ranks == 0) {
        fits += (fits.empty() ? "" : ", ") + std::to_string(ranks);
      }
    }
    throw zeroth::Error(zeroth::ErrorCode::kModel,
                        "the heads of an attention do not divide by the ranks that share them",
                        {.where = "zeroth-gpt --mesh",
                         .which = "blocks.0.attention",
                         .expected = "tp of " + fits,
                         .got = "tp=" + std::to_string(group.size()) + " for " + std::to_string(heads) + " heads"});
  }
  require_same_weights(group, "matrices");
  for (auto& unit : units_) {
    unit->inner()->share(group);
  }
  shared_.emplace(Vocabulary{.group = group,
                             .embedding = zeroth::libtorch::VocabEmbedding(embedding_VD_, group),
                             .sizes = zeroth::slice_sizes(options_.vocab, group.size())});
  embedding_VD_ = shared_->embedding->weight;
  parameters_["embedding"] = embedding_VD_;
}

void GptImpl::share_sequence(const RankGroup& group) {
  const std::int64_t heads = options_.heads / (shared_ ? shared_->group.size() : 1);
  const std::int64_t least = std::min(heads, options_.seq);
  ZR_CHECK(group.size() <= least, zeroth::ErrorCode::kUsage,
           "there are more ranks than heads or tokens, so some would have nothing to compute",
           {.where = "zeroth-gpt --mesh",
            .which = "sp",
            .expected = "at most " + std::to_string(least) + " ranks for " + std::to_string(heads) + " heads and " +
                        std::to_string(options_.seq) + " tokens",
            .got = std::to_string(group.size()) + " ranks"});
  require_same_weights(group, "sequences");
  sequence_ = std::make_shared<SharedSequence>(SharedSequence{.group = group});
  for (auto& unit : units_) {
    unit->inner()->share_sequence(sequence_);
  }
}

void GptImpl::share_experts(const zeroth::libtorch::ExpertRanks& ranks) {
  const RankGroup& group = ranks.group();
  require_same_weights(group, "experts");
  for (auto& unit : units_) {
    ZR_CHECK(unit->inner()->moe(), zeroth::ErrorCode::kUsage, "the model has no experts that ranks could share",
             {.where = "zeroth-gpt --mesh",
              .which = "ep=" + std::to_string(group.size()),
              .expected = "--experts " + std::to_string(group.size()) + " or more"});
    unit->inner()->moe()->share_experts(ranks.of_another_layer());
  }
  shares_experts_ = true;
}

void GptImpl::require_same_weights(const RankGroup& group, const std::string& shared) const {
  std::vector<std::pair<std::string, torch::Tensor>> weights;
  for (const auto& item : named_parameters()) {
    if (!shares_experts_ || item.key().find(".experts.") == std::string::npos) {
      weights.emplace_back(item.key(), item.value());
    }
  }
  zeroth::libtorch::require_same(weights, group,
                                 {.where = "zeroth-gpt --mesh",
                                  .what = "ranks that share " + shared + " have other weights",
                                  .hint = "give every rank the same --seed and --init"});
}

Boxes GptImpl::boxes() const {
  return shared_ ? Boxes{{"embedding", shared_->embedding->boxes().front().second}} : Boxes{};
}

torch::Tensor GptImpl::forward(const torch::Tensor& x_BT, const torch::Tensor& y_BT) {
  set_slices(x_BT);
  torch::Tensor h_BTD = embed(x_BT);
  for (auto& unit : units_) {
    h_BTD = unit->forward(h_BTD);
  }
  return head(h_BTD, y_BT);
}

std::vector<zeroth::libtorch::Layer> GptImpl::layers() {
  using zeroth::libtorch::MicroBatch;
  using zeroth::libtorch::Tensors;
  const auto y_of = [](const MicroBatch& batch) { return batch.targets.empty() ? torch::Tensor() : batch.targets[0]; };
  std::vector<zeroth::libtorch::Layer> layers;
  layers.push_back({.name = "embedding",
                    .forward = [this](const Tensors& x, const MicroBatch&) -> Tensors {
                      set_slices(x[0]);
                      return {embed(x[0])};
                    },
                    .parameters = {embedding_VD_},
                    .cost = 0});  // to look up rows takes no time
  for (auto& unit : units_) {
    layers.push_back({.name = "blocks." + std::to_string(layers.size() - 1),
                      .forward = [this, unit](const Tensors& h, const MicroBatch& batch) mutable -> Tensors {
                        set_slices(batch.inputs[0]);
                        return {unit->forward(h[0])};
                      },
                      .modules = {unit.ptr()}});
  }
  layers.push_back({.name = "head",
                    .forward = [this, y_of](const Tensors& h, const MicroBatch& batch) -> Tensors {
                      set_slices(batch.inputs[0]);
                      return {head(h[0], y_of(batch))};
                    },
                    .modules = {last_norm_.ptr()},
                    .parameters = {embedding_VD_}});
  return layers;
}

void GptImpl::set_slices(const torch::Tensor& x_BT) const {
  if (sequence_) {
    sequence_->sizes = zeroth::slice_sizes(x_BT.size(1), sequence_->group.size());
  }
}

torch::Tensor GptImpl::embed(const torch::Tensor& x_BT) {
  const torch::Tensor own_x_BT = sequence_ ? sequence_->own_slice(x_BT) : x_BT;  // T: of this rank
  return shared_ ? shared_->embedding->forward(own_x_BT) : torch::embedding(embedding_VD_, own_x_BT);
}

torch::Tensor GptImpl::head(const torch::Tensor& h_BTD, const torch::Tensor& y_BT) {
  torch::Tensor normed_BTD = last_norm_->forward(h_BTD);
  if (shared_) {
    normed_BTD = zeroth::libtorch::copy_to_group(normed_BTD, shared_->group);
  }
  torch::Tensor logits_BTV = torch::linear(normed_BTD, embedding_VD_);
  if (logits_BTV.element_size() == 2) {
    logits_BTV = logits_BTV.to(torch::kFloat32);  // 16 bits are too few for a sum over the vocabulary
  }
  if (y_BT.defined()) {
    return loss_of(logits_BTV, y_BT);
  }
  if (shared_) {
    logits_BTV = zeroth::libtorch::gather_from_group(logits_BTV, -1, shared_->group, shared_->sizes);
  }
  return sequence_ ? zeroth::libtorch::gather_from_group(logits_BTV, 1, sequence_->group, sequence_->sizes)
                   : logits_BTV;
}

torch::Tensor GptImpl::loss_of(const torch::Tensor& logits_BTV, const torch::Tensor& y_BT) {
  const torch::Tensor y = (sequence_ ? sequence_->own_slice(y_BT) : y_BT).flatten();
  const torch::Tensor logits = logits_BTV.flatten(0, 1);
  const torch::Tensor loss =
      shared_ ? zeroth::libtorch::vocab_cross_entropy(logits, y, shared_->group, {.vocab_sizes = shared_->sizes})
              : torch::cross_entropy_loss(logits, y);
  if (!sequence_) {
    return loss;
  }
  const double part = static_cast<double>(logits_BTV.size(1)) / static_cast<double>(y_BT.size(1));
  return zeroth::libtorch::reduce_from_group(loss * part, sequence_->group);
}

}  // namespace gpt
