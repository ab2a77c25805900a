#include "program/costs.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace zeroth {
namespace {

void require_cost(bool is_fine, const char* what, const std::string& expected) {
  ZR_CHECK(is_fine, ErrorCode::kUsage, what, {.where = "program.simulate", .expected = expected});
}

bool are_times(const ChunkCosts& chunk) {
  const auto values = {chunk.forward, chunk.input, chunk.weight,    chunk.unshard,
                       chunk.reduce,  chunk.copy,  chunk.state_copy};
  return std::ranges::all_of(values, is_time) && std::isfinite(chunk.whole) && std::isfinite(chunk.recompute) &&
         chunk.activation_bytes >= 0 && chunk.output_bytes >= 0 && chunk.input_bytes >= 0;
}

bool are_times(const LinkCosts& link) {
  return is_time(link.latency) && is_time(link.bytes_per_second);
}

}  // namespace

void require_costs(const StepProgram& program, const Costs& costs) {
  const std::size_t chunks = program.rank_of_chunk.size();
  require_cost(costs.chunks.size() <= 1 || costs.chunks.size() == chunks, "there are not as many costs as chunks",
               "0, 1 or " + std::to_string(chunks));
  require_cost(costs.speeds.empty() || costs.speeds.size() == program.actions.size(),
               "there are not as many speeds as ranks", "0 or " + std::to_string(program.ranks()));
  for (const double speed : costs.speeds)
    require_cost(std::isfinite(speed) && speed > 0, "a speed is not usable", "more than 0");
  const auto times = {costs.step, costs.vocabulary_scores, costs.vocabulary_gradients, costs.collective};
  bool usable = std::ranges::all_of(times, is_time) && are_times(costs.link);
  for (const auto& [pair, link] : costs.links) usable = usable && are_times(link);
  for (const ChunkCosts& chunk : costs.chunks) usable = usable && are_times(chunk);
  require_cost(usable, "a cost is not usable", "finite numbers from 0");
}

const ChunkCosts& Costs::of(int chunk) const {
  static const ChunkCosts kDefault;
  if (chunks.empty()) return kDefault;
  return chunks.size() == 1 ? chunks.front() : chunks[static_cast<std::size_t>(chunk)];
}

double duration_of(const Costs& costs, int rank, const Action& action) {
  const double speed = costs.speeds.empty() ? 1 : costs.speeds[static_cast<std::size_t>(rank)];
  if (action.kind == ActionKind::kStep) return costs.step;
  if (action.kind == ActionKind::kVocabScores) return costs.vocabulary_scores / speed;
  if (action.kind == ActionKind::kVocabGradients) return costs.vocabulary_gradients / speed;
  if (action.chunk < 0) return 0;
  const ChunkCosts& chunk = costs.of(action.chunk);
  switch (action.kind) {
    case ActionKind::kForward:
      return chunk.forward / speed;
    case ActionKind::kBackward:
      return (chunk.whole < 0 ? chunk.input + chunk.weight : chunk.whole) / speed;
    case ActionKind::kBackwardInput:
      return chunk.input / speed;
    case ActionKind::kBackwardWeight:
      return chunk.weight / speed;
    case ActionKind::kRecompute:
      return (chunk.recompute < 0 ? chunk.forward : chunk.recompute) / speed;
    case ActionKind::kUnshard:
      return chunk.unshard;
    case ActionKind::kReduce:
      return chunk.reduce;
    case ActionKind::kFetch:
    case ActionKind::kFlush:
      return action.micro_batch < 0 ? chunk.state_copy : chunk.copy;
    default:
      return 0;
  }
}

void add_live_changes(const ActionIndex& index, const Costs& costs, const Action& action, double begin, double end,
                      std::vector<LivePoint>& live) {
  if (action.chunk < 0 || action.micro_batch < 0) return;
  const ChunkCosts& chunk = costs.of(action.chunk);
  const bool again = index.position(ActionKind::kRecompute, action.chunk, action.micro_batch) >= 0;
  const std::int64_t all = chunk.activation_bytes;
  const std::int64_t resting = again ? std::min(chunk.input_bytes, all) : all;
  const std::int64_t for_weight = chunk.weight_bytes < 0 ? all : std::min(chunk.weight_bytes, all);
  const auto change = [&](double time, int pairs, std::int64_t bytes) {
    live.push_back({.time = time, .pairs = pairs, .bytes = bytes});
  };
  switch (action.kind) {
    case ActionKind::kForward:  // meanwhile all activations are there
      change(begin, 1, all);
      if (again) change(end, 0, resting - all);
      break;
    case ActionKind::kRecompute:
      change(begin, 0, all - resting);
      break;
    case ActionKind::kFlush:
      change(end, -1, -resting);
      break;
    case ActionKind::kFetch:
      change(begin, 1, resting);
      break;
    case ActionKind::kBackward:
      change(end, -1, -all);
      break;
    case ActionKind::kBackwardInput:
      change(end, 0, for_weight - all);
      break;
    case ActionKind::kBackwardWeight:
      change(end, -1, -for_weight);
      break;
    default:
      break;
  }
}

void add_up_live(RankTimes& times) {
  std::ranges::stable_sort(times.live, {}, &LivePoint::time);
  LivePoint held;
  for (LivePoint& point : times.live) {
    held.pairs += point.pairs;
    held.bytes += point.bytes;
    point = {.time = point.time, .pairs = held.pairs, .bytes = held.bytes};
    times.most_pairs = std::max(times.most_pairs, held.pairs);
    times.most_bytes = std::max(times.most_bytes, held.bytes);
  }
}

}  // namespace zeroth
