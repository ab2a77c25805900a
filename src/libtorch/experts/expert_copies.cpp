#include "libtorch/experts/expert_copies.h"

#include "libtorch/parallel/group_call.h"

#include <zeroth/comm/pending_points.h>
#include <zeroth/parallel/slices.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr CallName kCallCopies{.call = "copies of experts", .number = 20};

/// Who gets which of whose blocks.
struct CopyPlan {
  RankGroup group;
  std::int64_t own = 0;                             ///< experts
  std::vector<std::vector<std::int64_t>> wanted{};  ///< of each rank, blocks of this rank: places in the parameter
  std::vector<std::int64_t> copies_from{};          ///< copies of this rank, from each rank; they lie in rank order
};

struct KeptPlan final : torch::CustomClassHolder {
  explicit KeptPlan(CopyPlan kept) : plan(std::move(kept)) {}
  CopyPlan plan;
};

/// In memory of the host.
at::Tensor blocks_like(const at::Tensor& x, std::int64_t blocks) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[0] = blocks;
  return at::empty(shape, x.options().device(at::kCPU));
}

CallName named(bool is_backward, bool has_grad) {
  CallName name = kCallCopies;
  name.is_backward = is_backward;
  name.has_grad = has_grad;
  return name;
}

class CopyFunction : public torch::autograd::Function<CopyFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& parameter, const CopyPlan& plan,
                               bool has_grad) {
    context->saved_data["plan"] = at::IValue::make_capsule(c10::make_intrusive<KeptPlan>(plan));
    const CallName name = named(false, has_grad);
    const at::Tensor host = parameter.cpu().contiguous();
    const at::Tensor came = blocks_like(parameter, sum_of_sizes(plan.copies_from));
    const auto points = start_blocks(host, plan.wanted, came, plan.copies_from, plan.group, name);
    if (points) with_name_of(plan.group, name, host, [&] { points->wait(); });
    return {parameter, came.to(parameter.device())};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled())
      throw Error(ErrorCode::kUsage, "there is no gradient of the gradient of copies of experts",
                  {.where = "libtorch.experts",
                   .which = "create_graph",
                   .expected = "create_graph=False, or zeroth.experts.meet = \"experts\"",
                   .got = "create_graph=True"});
    const auto kept = context->saved_data["plan"].toCapsule();
    const CopyPlan& plan = static_cast<const KeptPlan&>(*kept).plan;
    const CallName name = named(true, false);
    const at::Tensor given = gradients[1].cpu().contiguous();
    at::Tensor own = gradients[0];
    const bool adds = std::ranges::any_of(plan.wanted, [](const auto& blocks) { return !blocks.empty(); });
    if (adds) own = own.clone(at::MemoryFormat::Contiguous);  // autograd's may be another node's, too
    const auto peers = static_cast<std::size_t>(plan.group.size());
    // Sends first: then no rank waits for another one that waits.
    std::unique_ptr<PendingPoints> sends;
    with_name_of(plan.group, name, given, [&] {
      sends = start_rows_of_ranks(given, plan.copies_from, {}, std::vector<std::int64_t>(peers, 0), plan.group, name);
    });
    for (std::size_t rank = 0; rank < peers; ++rank) {
      const auto count = static_cast<std::int64_t>(plan.wanted[rank].size());
      if (count == 0) continue;
      const at::Tensor came = blocks_like(given, count);
      std::vector<std::int64_t> from(peers, 0);
      from[rank] = count;
      with_name_of(plan.group, name, came, [&] {
        const auto points =
            start_rows_of_ranks(came, std::vector<std::int64_t>(peers, 0), came, from, plan.group, name);
        if (points) points->wait();
      });
      for (std::int64_t at = 0; at < count; ++at)
        own.select(0, plan.wanted[rank][static_cast<std::size_t>(at)]).add_(came.select(0, at).to(own.device()));
    }
    if (sends) with_name_of(plan.group, name, given, [&] { sends->wait(); });
    return {own, at::Tensor(), at::Tensor()};
  }

 private:
  /// A message for each wanted block, from where it lies, and one receive for each copy.
  static std::unique_ptr<PendingPoints> start_blocks(const at::Tensor& blocks,
                                                     const std::vector<std::vector<std::int64_t>>& wanted,
                                                     const at::Tensor& came, const std::vector<std::int64_t>& from,
                                                     const RankGroup& group, const CallName& name) {
    std::vector<RowsOfRank> give, take;
    std::int64_t place = 0;
    for (std::size_t rank = 0; rank < wanted.size(); ++rank) {
      for (const std::int64_t block : wanted[rank]) give.push_back({static_cast<int>(rank), block, 1});
      for (std::int64_t left = from[rank]; left > 0; --left) take.push_back({static_cast<int>(rank), place++, 1});
    }
    std::unique_ptr<PendingPoints> points;
    with_name_of(group, name, blocks, [&] { points = start_rows_between(blocks, give, came, take, group, name); });
    return points;
  }
};

}  // namespace

OwnAndCopies with_copies(const at::Tensor& parameter, const std::vector<std::vector<std::int64_t>>& copies,
                         std::int64_t num_experts, const ExpertRanks& ranks) {
  const RankGroup& group = ranks.group();
  require_exchangeable(parameter, group, kCallCopies, "parameter");
  const std::vector<std::int64_t> sizes = slice_sizes(num_experts, group.size());
  const OwnPart own = own_part(sizes, group.rank());
  CopyPlan plan{.group = group, .own = own.length};
  plan.wanted.resize(copies.size());
  plan.copies_from.assign(copies.size(), 0);
  for (std::size_t rank = 0; rank < copies.size(); ++rank) {
    for (const std::int64_t expert : copies[rank])
      if (expert >= own.begin && expert < own.begin + own.length) plan.wanted[rank].push_back(expert - own.begin);
  }
  const auto owners = owners_of_experts(static_cast<std::size_t>(num_experts), copies.size());
  for (const std::int64_t expert : copies[static_cast<std::size_t>(group.rank())])
    ++plan.copies_from[owners[static_cast<std::size_t>(expert)]];
  const bool has_grad = at::GradMode::is_enabled() && parameter.requires_grad();
  const variable_list blocks = CopyFunction::apply(parameter, std::as_const(plan), has_grad);
  return {.own = blocks[0], .copies = blocks[1]};
}

}  // namespace zeroth::libtorch
