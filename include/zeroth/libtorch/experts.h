// Experts: layers of which each token uses a few, on the ranks of a mesh's axis.
//
//   router    x [T, D] -> choices: experts [T, k], weights [T, k]
//   send      rows of tokens go to the ranks of their experts, and lie there expert by expert: [R, D]
//   compute   the experts that are here, each on its rows: [R, D'], grouped_linear()
//   bring     results go back to the ranks of their tokens, which add them up: weights x results, in the order of the
//             choices: [T, D']
//
// T: tokens of this rank, from 0, another number on each rank. E: experts of the layer. Rank r of the group owns slice
// r of slice_sizes(E, ranks), and may hold copies of others (ExpertOptions). R: rows that came to this rank, from 0.
//
// An expert's gradient is that of the rows of all ranks of the group. So the group's axis is one of batches, along
// which an expert's parameters are distinct: ParamAxes::distinct = kExpertAxis. Ranks have the same number of choices a
// token, of experts, and the same dtype. All ranks of the group make the same calls in the same order; they block, and
// throw what collectives.h says; other errors are kUsage with the argument.
//
// Bytes received by this rank, for P ranks of which this one owns e experts:
//   numbers   8 (e + 2) (P - 1); where experts have copies, and with two hops, 8 (E + 2) (P - 1)
//   rows      D elements for each row that comes from another rank, and D' for each own row that went to one; in
//             backward the same. Between nodes the same with two hops; inside nodes also the rows of the first hop
//   copies    the elements of an expert's parameters for each copy that this rank holds; in backward those of the
//             gradients of each copy of its own experts
//
// Where ranks have the same tokens (ExpertRanks::alike()), rows are those of the own slice of the tokens, and this rank
// receives also D' elements for each token of the other slices, in backward D elements.
//
// Ref: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
// Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022 (no capacity, no padding).
#pragma once

#include <zeroth/libtorch/expert_ranks.h>
#include <zeroth/libtorch/parameter_box.h>
#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

struct ExchangePlan;
struct MovingRows;
struct RowTraffic;

/// A run of the experts that are on a rank, in the order of TokenExchange::experts_here().
struct ExpertRun {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::vector<std::int64_t> rows{};  ///< of each
};

/// The way of one batch of tokens to their experts and back. Keeps indices, no rows. Copies share nothing that changes.
class TokenExchange {
 public:
  /// experts: [T, k] of int64 or int32, 0 .. num_experts - 1, or -1: no expert, the choice adds nothing. The ranks tell
  /// each other how many rows they have for each expert. Throws kMismatch if they have other options.
  /// Without ranks, or with one, this rank has all experts, and no call is made.
  TokenExchange(const at::Tensor& experts, std::int64_t num_experts, std::optional<ExpertRanks> ranks = {});

  /// x: [T, D]. Returns [R, D]: expert by expert, and for each the tokens of rank 0, of rank 1, ..., in their order.
  [[nodiscard]] at::Tensor send(const at::Tensor& x) const;
  /// y: [R, D'] in the order of send(); weights: [T, k] floating. Returns [T, D'], of y's dtype. On the CPU a sum of
  /// 16-bit rows is in float32, with one rounding.
  [[nodiscard]] at::Tensor bring(const at::Tensor& y, const at::Tensor& weights) const;

  /// What a run of experts makes of its rows: [rows, D] -> [rows, D']. Called for each of runs() that has experts, in
  /// their order.
  using Compute = std::function<at::Tensor(const at::Tensor& rows, const ExpertRun& run)>;
  /// bring(compute(send(x)), weights), where the rows of the next run are under way while one is computed, and so are
  /// results; in backward the same. An error of `compute` separates this rank from the others: they get it.
  [[nodiscard]] at::Tensor through(const at::Tensor& x, const at::Tensor& weights, const Compute& compute) const;

  /// parameter: [own experts, ...], one block an expert. Returns the blocks of each of runs(): [its experts, ...].
  /// Those of own experts share the parameter's memory; copies live as long as what is returned, and what autograd
  /// keeps. Collective over the group if any rank holds a copy; the gradient of a copy goes to its owner, which adds
  /// those of rank 0, 1, ... to its own.
  [[nodiscard]] std::vector<at::Tensor> blocks_of_runs(const at::Tensor& parameter) const;

  /// Numbers of the experts that are here: copies, then own ones.
  [[nodiscard]] const std::vector<std::int64_t>& experts_here() const { return here_; }
  /// The own experts, in as many runs as pieces and as equal as can be. Before them the copies, unless rows travel
  /// only: that run needs no rows of other ranks, and may have no expert.
  [[nodiscard]] const std::vector<ExpertRun>& runs() const { return runs_; }
  /// Rows of each of experts_here(), in order; their sum is R.
  [[nodiscard]] const std::vector<std::int64_t>& rows() const { return rows_; }
  /// [R] of int64: the place of a row's expert in experts_here().
  [[nodiscard]] at::Tensor expert_of_row() const;
  /// Of this rank's tokens, for each of the E experts.
  [[nodiscard]] const std::vector<std::int64_t>& chosen() const { return chosen_; }

 private:
  /// Rows of one piece: how many to and from each rank, and the order in which they come.
  struct Piece {
    std::vector<std::int64_t> given{};  ///< rows for each rank
    std::vector<std::int64_t> taken{};
    std::vector<std::vector<std::int64_t>> of_pairs{};
    std::int64_t sent = 0;
    std::int64_t received = 0;
    at::Tensor
        by_expert{};  ///< [received] of int32: of the rows as they come, in the order of experts; undefined: that is it
    at::Tensor by_rank{};  ///< the reverse
  };
  [[nodiscard]] ExpertCounts meet();  ///< ranks tell each other how many rows they have
  void lay_out(const ExchangePlan& plan, const at::Tensor& chosen, at::Device device);
  // The way of rows, piece by piece; see through().
  [[nodiscard]] RowTraffic traffic_of(std::size_t piece) const;
  [[nodiscard]] std::vector<MovingRows> depart(const at::Tensor& x) const;
  [[nodiscard]] at::Tensor arrive(MovingRows moving, std::size_t piece) const;
  [[nodiscard]] MovingRows give_back(const at::Tensor& y, std::size_t piece) const;
  [[nodiscard]] at::Tensor collect(const std::vector<MovingRows>& moving, const at::Tensor& weights) const;
  void require_weights(const at::Tensor& weights) const;
  [[nodiscard]] bool stays(std::size_t piece) const;  ///< its rows are this rank's
  [[nodiscard]] std::size_t rank() const { return ranks_ ? static_cast<std::size_t>(ranks_->group().rank()) : 0; }
  [[nodiscard]] std::string who() const { return ranks_ ? ranks_->group().who() : ""; }
  [[nodiscard]] int ranks() const { return ranks_ ? ranks_->group().size() : 1; }
  std::optional<ExpertRanks> ranks_;
  [[nodiscard]] at::Tensor own_share(const at::Tensor& x) const;  ///< of the ranks that have the same tokens
  std::int64_t all_tokens_ = 0;                                   ///< of the caller
  std::int64_t tokens_ = 0;                                       ///< that this rank sends
  std::int64_t choices_ = 0;
  std::vector<std::int64_t> chosen_{};
  std::vector<std::int64_t> rows_{};
  std::vector<std::int64_t> here_{};
  std::vector<ExpertRun> runs_{};
  bool first_run_is_of_copies_ = false;
  std::vector<std::vector<std::int64_t>> copies_{};  ///< of each rank
  std::vector<Piece> pieces_{};
  at::Tensor source_of_{};  ///< [S] of int32: choices in the order of the sending of their rows
  at::Tensor slot_of_{};    ///< [T, k] of int32: the reverse, -1 where there is no expert
};

/// x [R, in], the first rows[0] of it times the matrix of expert 0, and so on: [R, out]. weight: [experts, out, in];
/// bias: [experts, out] or undefined. Experts without rows get a gradient of zeros. A gradient of its gradient is
/// that of torch's products.
[[nodiscard]] at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                        const std::vector<std::int64_t>& rows);

struct StackedParts;

/// The parts of a stack [experts, ...], as unbind() has them, for one forward: views, of which the gradient of the
/// stack is filled as the parts' gradients come. Ask for a part where it is used: backward then lets its gradient go
/// before it comes to the parts that were asked for earlier. A part without a gradient has zeros.
class ExpertParts {
 public:
  explicit ExpertParts(const at::Tensor& stacked);
  /// Throws kUsage where there is no such expert.
  [[nodiscard]] at::Tensor part(std::int64_t expert);

 private:
  std::shared_ptr<StackedParts> stack_{};
};

/// The matrices of experts for one forward in which each expert has one product. Gradients are written where they stay
/// in the gradients of the stacks: no copies, and expert after expert in memory that the caches hold.
class ExpertMatrices {
 public:
  /// weight: [experts, out, in]; bias: [experts, out] or undefined.
  ExpertMatrices(const at::Tensor& weight, const at::Tensor& bias);
  /// x [rows, in] times the matrix of one expert, plus its bias: [rows, out]. Throws kUsage for a second product of an
  /// expert. A gradient of its gradient is that of torch's products.
  [[nodiscard]] at::Tensor linear(const at::Tensor& x, std::int64_t expert);

 private:
  std::shared_ptr<StackedParts> weights_{};
  std::shared_ptr<StackedParts> biases_{};
  std::vector<bool> used_{};
};

/// Experts of the form down(silu(gate(x)) * up(x)). Ref: Shazeer, "GLU Variants Improve Transformer", 2020, eq. 6;
/// Jiang et al., "Mixtral of Experts", 2024, section 2.1.
class GatedExpertsImpl : public torch::nn::Module, public SplitModule {
 public:
  /// A whole layer: gate_up [E, 2 F, D], gate above up, and down [E, D, F]. Takes the tensors, without a gradient.
  GatedExpertsImpl(const at::Tensor& gate_up, const at::Tensor& down);
  /// The ranks, along these axes of the mesh, share the experts of a layer that they have alike: each keeps
  /// its own, in new tensors. Once, before the engine is made.
  void share(const ExpertRanks& ranks);
  /// How tokens and experts meet from the next forward on. After share(); all ranks alike.
  void set_options(const ExpertOptions& options);

  /// x: [T, D]; experts, weights: [T, k], see TokenExchange. Returns [T, D].
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights) const;
  [[nodiscard]] std::vector<std::pair<std::string, ParameterBox>> boxes() const override;

  at::Tensor gate_up{};  ///< [own experts, 2 F, D]
  at::Tensor down{};     ///< [own experts, D, F]

 private:
  std::optional<ExpertRanks> ranks_{};
  std::int64_t num_experts_;
};
TORCH_MODULE(GatedExperts);

}  // namespace zeroth::libtorch
