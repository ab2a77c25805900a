#include "libtorch/experts/exchange_plan.h"
#include "libtorch/experts/expert_call.h"
#include "libtorch/experts/expert_copies.h"
#include "libtorch/experts/expert_ranks_state.h"
#include "libtorch/experts/row_moves.h"
#include "libtorch/experts/rows.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/kept_calls.h>
#include <zeroth/parallel/slices.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index.h>
#include <ATen/ops/where.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
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

std::int64_t sum_of(const std::vector<std::int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

std::int64_t nanoseconds_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// What ranks must have alike, as one number: options, and the pieces of this forward.
std::int64_t word_of(const ExpertOptions& options, int pieces) {
  return (static_cast<std::int64_t>(pieces) << 40) | (options.copies << 16) |
         (static_cast<std::int64_t>(options.pieces) << 8) | (static_cast<std::int64_t>(options.meet) << 1) |
         (options.two_hops ? 1 : 0);
}

int pieces_in(std::int64_t word) {
  return static_cast<int>(word >> 40);
}

std::string text_of(std::int64_t word) {
  return c10::str("meet=", name_of(static_cast<MeetAt>((word >> 1) & 3)), " copies=", (word >> 16) & 0xffffff,
                  " pieces=", (word >> 8) & 127, (word & 1) != 0 ? " two_hops" : "");
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

TokenExchange::TokenExchange(const at::Tensor& experts, std::int64_t num_experts, std::optional<ExpertRanks> ranks)
    : ranks_(std::move(ranks)) {
  const bool is_index = experts.defined() && (experts.scalar_type() == at::kLong || experts.scalar_type() == at::kInt);
  if (!is_index || experts.dim() != 2)
    refuse_experts(who(), "experts", "these are no choices of experts", "int64 or int32 [tokens, choices]",
                   text_of(experts));
  const int group_size = this->ranks();
  if (num_experts < group_size)
    refuse_experts(who(), "num_experts", "some ranks would have no expert",
                   c10::str(group_size, " or more, one a rank"), c10::str(num_experts));
  const at::NoGradGuard no_gradient;
  all_tokens_ = experts.size(0);
  choices_ = experts.size(1);
  const at::Tensor chosen = own_share(experts.detach().to(at::kCPU, at::kLong).contiguous());
  tokens_ = chosen.size(0);
  chosen_ = count_choices(chosen, num_experts, who());
  const ExpertCounts counts = meet();
  const bool is_alone = group_size == 1;
  lay_out(plan_exchange(counts, rank(), is_alone ? MeetAt::kExperts : ranks_->options().meet,
                        is_alone ? 0 : ranks_->options().copies, is_alone ? 1 : ranks_->pieces()),
          chosen, experts.device());
}

void TokenExchange::lay_out(const ExchangePlan& plan, const at::Tensor& chosen, at::Device device) {
  here_ = plan.here;
  copies_ = plan.copies;
  first_run_is_of_copies_ = ranks() > 1 && ranks_->options().meet != MeetAt::kExperts;
  for (const PiecePlan& from : plan.pieces) {
    runs_.push_back({.first = from.first, .count = from.count, .rows = from.rows});
    rows_.insert(rows_.end(), from.rows.begin(), from.rows.end());
    Piece& piece = pieces_.emplace_back();
    piece.given = from.given;
    piece.taken = from.taken;
    if (ranks() > 1 && ranks_->options().two_hops) piece.of_pairs = from.of_pairs;
    piece.sent = sum_of(from.given);
    piece.received = sum_of(from.taken);
    if (from.count < 2 || std::ranges::count_if(from.taken, [](std::int64_t rows) { return rows > 0; }) < 2) continue;
    const std::vector<std::int64_t> source_of_row = rows_by_expert(from);
    const at::Tensor by_expert = at::empty({piece.received}, at::kInt);
    const at::Tensor by_rank = at::empty({piece.received}, at::kInt);
    auto* const source = by_expert.data_ptr<std::int32_t>();
    auto* const place = by_rank.data_ptr<std::int32_t>();
    for (std::int64_t row = 0; row < piece.received; ++row) {
      source[row] = static_cast<std::int32_t>(source_of_row[static_cast<std::size_t>(row)]);
      place[source[row]] = static_cast<std::int32_t>(row);
    }
    piece.by_expert = by_expert.to(device);
    piece.by_rank = by_rank.to(device);
  }
  // Experts are sorted by their place in the order of sending.
  const auto num_experts = static_cast<std::int64_t>(chosen_.size());
  at::Tensor places = chosen;
  if (!std::ranges::is_sorted(plan.order)) {
    auto [place_of, place] = new_indices(num_experts + 1);
    for (std::size_t at = 0; at < plan.order.size(); ++at) place[plan.order[at]] = static_cast<std::int64_t>(at);
    place[num_experts] = -1;
    places = at::index(place_of, {at::where(chosen.lt(0), num_experts, chosen)});
  }
  const ChoiceSlots slots = slots_of_choices(places, num_experts, who());
  source_of_ = slots.source_of.to(device);
  slot_of_ = slots.slot_of.to(device);
}

at::Tensor TokenExchange::expert_of_row() const {
  auto [of_row, expert_of] = new_indices(sum_of(rows_));
  for (std::size_t here = 0; here < rows_.size(); ++here)
    expert_of = std::fill_n(expert_of, rows_[here], static_cast<std::int64_t>(here));
  return of_row.to(source_of_.device());
}

ExpertCounts TokenExchange::meet() {
  if (ranks() == 1) return {chosen_};
  ExpertRanks::State& state = ranks_->state();
  const RankGroup& group = ranks_->group();
  const auto peers = static_cast<std::size_t>(ranks());
  const std::vector<std::int64_t> sizes = slice_sizes(static_cast<std::int64_t>(chosen_.size()), ranks());
  const std::vector<std::int64_t> first = begins_of(sizes);
  const int pieces = state.options.pieces > 0
                         ? static_cast<int>(std::min<std::int64_t>(state.options.pieces, sizes.back()))
                         : state.trials.next(sizes.back());
  const std::int64_t words[] = {word_of(state.options, pieces), state.trials.take_own()};
  const bool all_know_all = state.options.meet != MeetAt::kExperts || state.options.two_hops;
  const std::int64_t told_each = all_know_all ? static_cast<std::int64_t>(chosen_.size()) : sizes[rank()];
  at::Tensor heard;
  if (all_know_all) {
    auto [told, out] = new_indices(told_each + 2);
    std::copy_n(words, 2, std::ranges::copy(chosen_, out).out);
    heard = all_gather(told, 0, group);
  } else {
    std::vector<std::int64_t> told_sizes = sizes;
    for (std::int64_t& size : told_sizes) size += 2;
    auto [told, out] = new_indices(sum_of(told_sizes));
    for (std::size_t peer = 0; peer < peers; ++peer)
      out = std::copy_n(words, 2, std::copy_n(chosen_.data() + first[peer], sizes[peer], out));
    heard = all_to_all(told, 0, 0, group, told_sizes, std::vector<std::int64_t>(peers, told_each + 2));
  }
  ExpertCounts counts(peers, std::vector<std::int64_t>(chosen_.size(), 0));
  counts[rank()] = chosen_;
  std::int64_t slowest = 0;
  const std::int64_t* from = heard.data_ptr<std::int64_t>();
  // A recompute may hear what the forward was told: its own word is that of the forward.
  const std::int64_t own_word = from[static_cast<std::int64_t>(rank()) * (told_each + 2) + told_each];
  for (std::size_t peer = 0; peer < peers; ++peer) {
    std::copy_n(from, told_each, counts[peer].data() + (all_know_all ? 0 : first[rank()]));
    from += told_each;
    if (const std::int64_t word = *from++; word != own_word)
      throw Error(ErrorCode::kMismatch, "ranks let tokens and experts meet in other ways",
                  {.where = "libtorch.experts",
                   .who = who(),
                   .which = "options of the experts' ranks",
                   .expected = text_of(own_word),
                   .got = c10::str(text_of(word), " on rank ", peer),
                   .hint = "change them on all ranks between the same two forwards"});
    slowest = std::max(slowest, *from++);
  }
  if (!hands_out_calls()) state.trials.heard(slowest);
  state.pieces = pieces_in(own_word);
  return counts;
}

RowTraffic TokenExchange::traffic_of(std::size_t piece) const {
  const Piece& own = pieces_[piece];
  return {.given = own.given, .taken = own.taken, .of_pairs = own.of_pairs};
}

std::vector<MovingRows> TokenExchange::depart(const at::Tensor& x) const {
  if (!x.defined() || x.dim() != 2 || x.size(0) != all_tokens_)
    refuse_experts(who(), "x", "these are not the tokens of the choices", c10::str("[", all_tokens_, ", features]"),
                   text_of(x));
  const at::Tensor sent = take_rows(own_share(x), source_of_, slot_of_);
  if (ranks() == 1) return {{.rows = sent}};
  std::vector<std::int64_t> sizes;
  for (const Piece& piece : pieces_) sizes.push_back(piece.sent);
  const std::vector<at::Tensor> of_pieces = sizes.size() == 1 ? std::vector{sent} : sent.split_with_sizes(sizes);
  std::vector<MovingRows> moving;
  for (std::size_t piece = 0; piece < sizes.size(); ++piece)
    moving.push_back(stays(piece) ? MovingRows{.rows = of_pieces[piece]}
                                  : start_rows(of_pieces[piece], traffic_of(piece), *ranks_));
  return moving;
}

at::Tensor TokenExchange::arrive(MovingRows moving, std::size_t piece) const {
  if (!moving.flight) return moving.rows;
  const at::Tensor rows = take_rows_of(moving);
  const Piece& own = pieces_[piece];
  return own.by_expert.defined() ? reorder_rows(rows, own.by_expert, own.by_rank) : rows;
}

MovingRows TokenExchange::give_back(const at::Tensor& y, std::size_t piece) const {
  const Piece& own = pieces_[piece];
  if (!y.defined() || y.dim() != 2 || y.size(0) != own.received)
    refuse_experts(who(), "y", "these are not the results of the rows of send()",
                   c10::str("[", own.received, ", features]"), text_of(y));
  if (stays(piece)) return {.rows = y};
  const at::Tensor rows = own.by_rank.defined() ? reorder_rows(y, own.by_rank, own.by_expert) : y;
  return start_rows(rows, traffic_of(piece).reversed(), *ranks_);
}

at::Tensor TokenExchange::collect(const std::vector<MovingRows>& moving, const at::Tensor& weights) const {
  std::vector<at::Tensor> of_pieces;
  for (const MovingRows& one : moving) of_pieces.push_back(one.flight ? take_rows_of(one) : one.rows);
  const at::Tensor results = of_pieces.size() == 1 ? of_pieces.front() : at::cat(of_pieces);
  const at::Tensor sum = sum_rows(results, own_share(weights), slot_of_, source_of_);
  if (!ranks_ || !ranks_->alike()) return sum;
  const RankGroup& alike = *ranks_->alike();
  return gather_from_group(sum, 0, alike, slice_sizes(all_tokens_, alike.size()));
}

at::Tensor TokenExchange::own_share(const at::Tensor& x) const {
  return ranks_ && ranks_->alike() ? split_to_group(x, 0, *ranks_->alike()) : x;
}

void TokenExchange::require_weights(const at::Tensor& weights) const {
  if (!weights.defined() || weights.dim() != 2 || weights.size(0) != all_tokens_ || weights.size(1) != choices_)
    refuse_experts(who(), "weights", "these are not the weights of the choices",
                   c10::str("[", all_tokens_, ", ", choices_, "]"), text_of(weights));
}

at::Tensor TokenExchange::send(const at::Tensor& x) const {
  std::vector<MovingRows> moving = depart(x);
  std::vector<at::Tensor> rows;
  for (std::size_t piece = 0; piece < moving.size(); ++piece)
    if (runs_[piece].count > 0) rows.push_back(arrive(std::move(moving[piece]), piece));
  return rows.size() == 1 ? rows.front() : at::cat(rows);
}

at::Tensor TokenExchange::bring(const at::Tensor& y, const at::Tensor& weights) const {
  require_weights(weights);
  const std::int64_t received = sum_of(rows_);
  if (!y.defined() || y.dim() != 2 || y.size(0) != received)
    refuse_experts(who(), "y", "these are not the results of the rows of send()",
                   c10::str("[", received, ", features]"), text_of(y));
  std::vector<std::int64_t> sizes;
  for (const Piece& piece : pieces_) sizes.push_back(piece.received);
  const std::vector<at::Tensor> of_pieces = sizes.size() == 1 ? std::vector{y} : y.split_with_sizes(sizes);
  std::vector<MovingRows> moving;
  for (std::size_t piece = 0; piece < sizes.size(); ++piece)
    if (runs_[piece].count > 0) moving.push_back(give_back(of_pieces[piece], piece));
  return collect(moving, weights);
}

at::Tensor TokenExchange::through(const at::Tensor& x, const at::Tensor& weights, const Compute& compute) const {
  require_weights(weights);
  const std::int64_t began = nanoseconds_now();
  std::vector<MovingRows> coming = depart(x);
  std::vector<MovingRows> going;
  for (std::size_t piece = 0; piece < coming.size(); ++piece) {
    const at::Tensor rows = arrive(std::exchange(coming[piece], {}), piece);
    if (runs_[piece].count > 0) going.push_back(give_back(compute(rows, runs_[piece]), piece));
  }
  const at::Tensor sum = collect(going, weights);
  if (ranks() > 1 && !hands_out_calls()) ranks_->state().trials.measured(nanoseconds_now() - began);
  return sum;
}

bool TokenExchange::stays(std::size_t piece) const {
  return ranks() == 1 || (piece == 0 && first_run_is_of_copies_);
}

std::vector<at::Tensor> TokenExchange::blocks_of_runs(const at::Tensor& parameter) const {
  const std::int64_t copies = static_cast<std::int64_t>(copies_[rank()].size());
  const std::int64_t own = static_cast<std::int64_t>(here_.size()) - copies;
  if (!parameter.defined() || parameter.dim() < 1 || parameter.size(0) != own)
    refuse_experts(who(), "parameter", "this is not one block for each own expert", c10::str("[", own, ", ...]"),
                   text_of(parameter));
  if (runs_.size() == 1) return {parameter};
  std::vector<std::int64_t> sizes;
  for (std::size_t run = stays(0) ? 1 : 0; run < runs_.size(); ++run) sizes.push_back(runs_[run].count);
  OwnAndCopies blocks{.own = parameter};
  if (std::ranges::any_of(copies_, [](const auto& of_rank) { return !of_rank.empty(); }))
    blocks = with_copies(parameter, copies_, static_cast<std::int64_t>(chosen_.size()), *ranks_);
  std::vector<at::Tensor> of_runs = sizes.size() == 1 ? std::vector{blocks.own} : blocks.own.split_with_sizes(sizes);
  if (stays(0)) of_runs.insert(of_runs.begin(), copies > 0 ? blocks.copies : parameter.detach().narrow(0, 0, 0));
  return of_runs;
}

}  // namespace zeroth::libtorch
