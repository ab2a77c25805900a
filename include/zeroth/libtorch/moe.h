// A layer of experts with its gate: noise, choice, balance, capacity, and the experts of experts.h.
//
//   x [T, D] -> (noise) -> logits [T, E] -> route() -> balance loss -> keep_within() -> experts -> [T, D']
//
// T: tokens of this rank, D: width, E: experts of the layer, k: choices of a token.
//
// What is drawn depends on the seed, the number of the forward, the rank's place among the ranks with other tokens, and
// the position of a token; torch's generators have no part in it. So a resumed run draws what is next, the front ends
// have the same bits, and ranks with the same tokens draw the same. An evaluation draws nothing.
//
// A forward of training inside a backward repeats an earlier one of the step: activation checkpointing. It is known by
// its tokens, draws what that one drew, has its balance loss, and counts nothing. Any number of forwards may wait for
// such a backward, as in a pipeline; of several with the same tokens the last one is repeated.
//
// zeroth.nn.MoE of Python is the same gate. Errors are kUsage with the argument.
#pragma once

#include <zeroth/libtorch/balance.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/libtorch/router.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace zeroth::libtorch {

enum class GateNoise : std::uint8_t {
  kNone,
  /// The router's input times 0.99 to 1.01, a factor an element: kernels::jitter(). Takes 4 T D bytes until backward.
  /// Ref: Fedus et al., "Switch Transformers", JMLR 2022, section 2.2; the range is DeepSpeed's.
  kJitter,
  /// -log(-log(u)) is added to the logits that are compared, never to weights and scores: a token's experts are a draw
  /// without replacement from its softmax. Ref: Kool et al., "Stochastic Beams and Where to Find Them", 2019.
  kGumbel,
};

/// What makes the load even.
enum class BalanceBy : std::uint8_t { kLoss, kBias, kBoth };

/// k grows: first + floor((last - first) step / steps), and `last` from step `steps` on.
/// Ref: Chen et al., "Sparse MoE as the New Dropout: Scaling Dense and Self-Slimmable Transformers", ICLR 2023.
struct ChoiceSchedule {
  std::int64_t first = 1;
  std::int64_t last = 1;
  std::int64_t steps = 1;  ///< from 1
};

/// `step`: updates so far.
[[nodiscard]] std::int64_t choices_at(std::int64_t step, std::int64_t steps, std::int64_t first, std::int64_t last);

/// Which experts have a token; logits [T, E] and options with the present k. Choices may be -1, weights [T, k].
using RouterRule = std::function<Routing(const at::Tensor& logits, const RouterOptions& options)>;

struct GateOptions {
  /// Its bias stays undefined: a forward has one. `renormalize` is of k above 1: a single weight of 1 has no gradient.
  RouterOptions router{};
  RouterRule rule{};                         ///< in the place of route()
  std::optional<ChoiceSchedule> schedule{};  ///< in the place of router.choices
  double capacity_factor = 1.0;              ///< see expert_capacity()
  double eval_capacity_factor = 1.0;
  std::int64_t min_capacity = 4;
  bool drop_tokens = true;  ///< else experts take all
  bool use_rts = true;      ///< in training KeepBy::kDraw, else kPosition
  GateNoise noise = GateNoise::kNone;
  bool top2_2nd_expert_sampling =
      false;  ///< with k = 2: the second expert is drawn by kGumbel. Ref: GShard, section 2.2
  BalanceBy balance = BalanceBy::kLoss;
  double bias_rate = 1e-3;  ///< see update_balance_bias()
  std::uint64_t seed = 0;
};

struct GateInput {
  at::Tensor x{};       ///< [T, D]
  at::Tensor weight{};  ///< [E, D]
  at::Tensor bias{};    ///< [E] or undefined: of the choice
  at::Tensor used{};    ///< [T] or undefined: false for tokens that go to no expert, as padding
  bool training = true;
  std::int64_t number = 0;  ///< of this forward among those of training, over all runs
  std::int64_t step = 0;    ///< updates so far, for `schedule`
};

struct Gated {
  at::Tensor experts{};  ///< [T, k], before any was dropped
  at::Tensor kept{};     ///< [T, k]
  at::Tensor weights{};  ///< [T, k]
  at::Tensor scores{};   ///< [T, E]
  at::Tensor logits{};   ///< [T, E]
  at::Tensor balance{};  ///< ExpertLoad::balance_loss(), a scalar; zero for BalanceBy::kBias
  at::Tensor counts{};   ///< [E] of int64, on the CPU: choices of this rank's tokens, before any was dropped
  std::int64_t dropped = 0;
};

/// A gate, without its parameters.
class Gate {
 public:
  /// Throws kUsage for options that do not fit: noise in the choice and a second expert that is drawn go with softmax
  /// alone, without groups, a bias or a rule.
  Gate(std::int64_t num_experts, GateOptions options);

  /// The ranks of `groups`, axis by axis of the mesh, have other tokens of one batch: the balance is over all of them.
  void balance_over(std::vector<RankGroup> groups);
  /// This rank's number among them, row-major; balance_over() sets it.
  void set_place(std::int64_t place) { place_ = place; }
  [[nodiscard]] std::int64_t place() const { return place_; }
  /// k from now on, without a schedule. The same on all ranks of ep.
  void set_choices(std::int64_t choices);
  /// Of the forwards from now on; see GateOptions.
  void set_capacity(double factor, double eval_factor, std::int64_t least);
  /// k of a step.
  [[nodiscard]] std::int64_t choices(std::int64_t step = 0) const;

  /// Blocks: a call of ExpertLoad::add() over the groups. Forwards of training count for the step; an evaluation has a
  /// load of its own.
  [[nodiscard]] Gated forward(const GateInput& input);
  /// The next forward is of a new batch. With BalanceBy::kBias and kBoth it updates the bias by the load of the last.
  void begin_step(const at::Tensor& bias = {});

  /// True inside a backward: a forward of training has the number of the one that it repeats, whatever it is given.
  [[nodiscard]] static bool is_repeated();

  [[nodiscard]] const ExpertLoad& load() const { return load_; }
  [[nodiscard]] const GateOptions& options() const { return options_; }
  [[nodiscard]] std::int64_t num_experts() const { return num_experts_; }

 private:
  /// A forward of training of this step.
  struct Made {
    std::uint64_t tokens;  ///< digest of some of their elements
    std::int64_t number;
    std::int64_t step;
    ExpertLoad load;  ///< with this forward
  };
  [[nodiscard]] Routing choose(const at::Tensor& logits, const GateInput& input) const;
  [[nodiscard]] Made& made_with(const GateInput& input);
  std::int64_t num_experts_;
  GateOptions options_;
  std::vector<RankGroup> groups_{};
  std::int64_t place_ = 0;
  ExpertLoad load_;
  std::vector<Made> made_{};
};

/// Weights of a router that is not trained: [E, D] of float32, uniform from -1/sqrt(D) to 1/sqrt(D), drawn from the
/// seed. Layers that shall differ have other seeds. Ref: Chen et al., 2023, section 3.1.
[[nodiscard]] at::Tensor fixed_router_weight(std::int64_t num_experts, std::int64_t width, std::uint64_t seed);

/// A module, and its forward of rows [T, D] -> [T, D'].
struct RowModule {
  std::shared_ptr<torch::nn::Module> module{};
  std::function<at::Tensor(const at::Tensor&)> run{};
};
template <class Impl>
[[nodiscard]] RowModule row_module(const torch::nn::ModuleHolder<Impl>& holder) {
  return {holder.ptr(), [impl = holder.ptr().get()](const at::Tensor& x) { return impl->forward(x); }};
}

/// A module of experts, and its forward(x [T, D], experts [T, k], weights [T, k]) -> [T, D'].
struct ExpertsModule {
  std::shared_ptr<torch::nn::Module> module{};
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)> run{};
};
template <class Impl>
[[nodiscard]] ExpertsModule experts_module(const torch::nn::ModuleHolder<Impl>& holder) {
  return {holder.ptr(),
          [impl = holder.ptr().get()](const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights) {
            return impl->forward(x, experts, weights);
          }};
}

struct MoeOptions {
  std::int64_t width = 0;        ///< D
  std::int64_t num_experts = 1;  ///< E
  GateOptions gate{};
  bool fixed_router = false;  ///< the gate is fixed_router_weight() of the seed, and is not trained
};

struct MoeOutput {
  at::Tensor out{};      ///< of x's shape, but for D'
  at::Tensor balance{};  ///< see Gated
  at::Tensor counts{};   ///< see Gated
};

/// gate (Linear without bias), experts, and where they are given: residual, a module for all tokens with coefficient
/// (Linear of two outputs), of which softmax mixes both: out c_0 + residual(x) c_1; shared, whose result is added.
/// Buffers: `forwards`; `balance_bias` [E] of float64 with BalanceBy::kBias or kBoth; `steps` with a schedule. They are
/// in checkpoints, and the same on all ranks.
/// Ref: Rajbhandari et al., "DeepSpeed-MoE", ICML 2022 (residual); Dai et al., "DeepSeekMoE", 2024 (shared).
class MoeImpl : public torch::nn::Module {
 public:
  MoeImpl(const MoeOptions& options, ExpertsModule experts, RowModule residual = {}, RowModule shared = {});

  /// x: [..., D]; used: [...], see GateInput. Collective over the ranks of balance_over() and of the experts.
  [[nodiscard]] MoeOutput forward(const at::Tensor& x, const at::Tensor& used = {});
  /// Once an update, after the engine's step.
  void begin_step();
  [[nodiscard]] Gate& router() { return gate_; }

  torch::nn::Linear gate{nullptr};
  torch::nn::Linear coefficient{nullptr};
  at::Tensor forwards{};
  at::Tensor balance_bias{};
  at::Tensor steps{};

 private:
  Gate gate_;
  ExpertsModule experts_;
  RowModule residual_;
  RowModule shared_;
};
TORCH_MODULE(Moe);

}  // namespace zeroth::libtorch
