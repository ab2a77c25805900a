#include "libtorch/experts/expert_call.h"
#include "libtorch/experts/rows.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/parallel/slices.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <numeric>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// A new tensor of int64 and its values.
std::pair<at::Tensor, std::int64_t*> new_indices(std::int64_t count) {
  at::Tensor tensor = at::empty({count}, at::kLong);
  return {tensor, tensor.data_ptr<std::int64_t>()};
}

/// Where each of the counted rows begins.
std::vector<std::int64_t> begins_of(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> begins(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), std::int64_t{0});
  return begins;
}

std::string text_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes()) : "an undefined tensor";
}

}  // namespace

void refuse_experts(const std::string& who, const char* which, const std::string& message, std::string expected,
                    std::string got) {
  throw Error(ErrorCode::kUsage, message,
              {.where = "libtorch.experts",
               .who = who,
               .which = which,
               .expected = std::move(expected),
               .got = std::move(got)});
}

std::vector<std::int64_t> count_choices(const at::Tensor& chosen, std::int64_t num_experts, const std::string& who) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts), 0);
  const std::int64_t* const expert_of_choice = chosen.data_ptr<std::int64_t>();
  for (std::int64_t choice = 0; choice < chosen.numel(); ++choice) {
    const std::int64_t expert = expert_of_choice[choice];
    if (expert < -1 || expert >= num_experts)
      refuse_experts(who, "experts", "there is no such expert", c10::str("-1 to ", num_experts - 1),
                     c10::str(expert, " for token ", choice / chosen.size(1)));
    if (expert >= 0) ++counts[static_cast<std::size_t>(expert)];
  }
  return counts;
}

TokenExchange::TokenExchange(const at::Tensor& experts, std::int64_t num_experts, std::optional<RankGroup> group)
    : group_(std::move(group)) {
  const bool is_index = experts.defined() && (experts.scalar_type() == at::kLong || experts.scalar_type() == at::kInt);
  if (!is_index || experts.dim() != 2)
    refuse_experts(who(), "experts", "these are no choices of experts", "int64 or int32 [tokens, choices]",
                   text_of(experts));
  if (num_experts < ranks())
    refuse_experts(who(), "num_experts", "some ranks would have no expert", c10::str(ranks(), " or more, one a rank"),
                   c10::str(num_experts));
  const at::NoGradGuard no_gradient;
  tokens_ = experts.size(0);
  choices_ = experts.size(1);
  const at::Tensor chosen = experts.detach().to(at::kCPU, at::kLong).contiguous();
  ChoiceSlots slots = slots_of_choices(chosen, num_experts, who());
  chosen_ = std::move(slots.counts);

  if (ranks() == 1) {
    rows_ = chosen_;
    auto [expert_of_row, expert_of] = new_indices(slots.source_of.size(0));
    for (std::int64_t expert = 0; expert < num_experts; ++expert)
      expert_of = std::fill_n(expert_of, chosen_[static_cast<std::size_t>(expert)], expert);
    expert_of_row_ = std::move(expert_of_row);
  } else {
    meet();
  }
  const at::Device device = experts.device();
  source_of_ = slots.source_of.to(device);
  slot_of_ = slots.slot_of.to(device);
  if (by_expert_.defined()) by_expert_ = by_expert_.to(device);
  if (by_rank_.defined()) by_rank_ = by_rank_.to(device);
  expert_of_row_ = expert_of_row_.to(device);
}

void TokenExchange::meet() {
  const auto num_experts = static_cast<std::int64_t>(chosen_.size());
  const std::vector<std::int64_t> experts_of = slice_sizes(num_experts, ranks());
  const auto peers = static_cast<std::size_t>(ranks());
  const auto own = static_cast<std::size_t>(experts_of[static_cast<std::size_t>(group_->rank())]);
  auto [told, counts] = new_indices(num_experts);
  std::copy(chosen_.begin(), chosen_.end(), counts);
  const at::Tensor heard =
      all_to_all(told, 0, 0, *group_, experts_of, std::vector<std::int64_t>(peers, static_cast<std::int64_t>(own)));
  const std::int64_t* const from = heard.data_ptr<std::int64_t>();  // [peers][own experts]
  sent_.assign(peers, 0);
  taken_.assign(peers, 0);
  rows_.assign(own, 0);
  for (std::size_t rank = 0, expert = 0; rank < peers; ++rank) {
    for (std::int64_t left = experts_of[rank]; left > 0; --left) sent_[rank] += chosen_[expert++];
    for (std::size_t mine = 0; mine < own; ++mine) {
      const std::int64_t count = from[rank * own + mine];
      taken_[rank] += count;
      rows_[mine] += count;
    }
  }
  const std::int64_t received = std::accumulate(rows_.begin(), rows_.end(), std::int64_t{0});
  at::Tensor by_expert = at::empty({received}, at::kInt);
  at::Tensor by_rank = at::empty({received}, at::kInt);
  auto* const source = by_expert.data_ptr<std::int32_t>();
  auto* const place = by_rank.data_ptr<std::int32_t>();
  auto [expert_of_row, expert_of] = new_indices(received);
  std::vector<std::int64_t> next = begins_of(rows_);
  std::int64_t row = 0;  // in the order in which the rows come
  for (std::size_t rank = 0; rank < peers; ++rank) {
    for (std::size_t mine = 0; mine < own; ++mine) {
      for (std::int64_t left = from[rank * own + mine]; left > 0; --left, ++row) {
        const std::int64_t to = next[mine]++;
        source[to] = static_cast<std::int32_t>(row);
        place[row] = static_cast<std::int32_t>(to);
        expert_of[to] = static_cast<std::int64_t>(mine);
      }
    }
  }
  by_expert_ = std::move(by_expert);
  by_rank_ = std::move(by_rank);
  expert_of_row_ = std::move(expert_of_row);
}

at::Tensor TokenExchange::send(const at::Tensor& x) const {
  if (!x.defined() || x.dim() != 2 || x.size(0) != tokens_)
    refuse_experts(who(), "x", "these are not the tokens of the choices", c10::str("[", tokens_, ", features]"),
                   text_of(x));
  const at::Tensor sent = take_rows(x, source_of_, slot_of_);
  if (ranks() == 1) return sent;
  return reorder_rows(all_to_all(sent, 0, 0, *group_, sent_, taken_), by_expert_, by_rank_);
}

at::Tensor TokenExchange::bring(const at::Tensor& y, const at::Tensor& weights) const {
  if (!y.defined() || y.dim() != 2 || y.size(0) != expert_of_row_.size(0))
    refuse_experts(who(), "y", "these are not the results of the rows of send()",
                   c10::str("[", expert_of_row_.size(0), ", features]"), text_of(y));
  if (!weights.defined() || weights.dim() != 2 || weights.size(0) != tokens_ || weights.size(1) != choices_)
    refuse_experts(who(), "weights", "these are not the weights of the choices",
                   c10::str("[", tokens_, ", ", choices_, "]"), text_of(weights));
  at::Tensor results = y;
  if (ranks() > 1) results = all_to_all(reorder_rows(y, by_rank_, by_expert_), 0, 0, *group_, taken_, sent_);
  return sum_rows(results, weights, slot_of_, source_of_);
}

}  // namespace zeroth::libtorch
