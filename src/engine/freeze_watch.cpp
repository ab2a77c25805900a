#include "engine/freeze_watch.h"

#include "engine/piece_io.h"
#include "engine/state_pieces.h"

#include <kernels/norm/norm.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

template <class T>
void add_elements(std::span<const std::byte> bytes, kernels::NormAccumulator& sum) {
  constexpr std::size_t kAtOnce = 4096;
  std::vector<double> widened;
  for (std::size_t at = 0; at < bytes.size(); at += kAtOnce * sizeof(T)) {
    std::vector<T> values(std::min(kAtOnce, (bytes.size() - at) / sizeof(T)));
    std::memcpy(values.data(), bytes.data() + at, values.size() * sizeof(T));
    widened.assign(values.begin(), values.end());
    sum.add_blocks(widened);
  }
}

/// Exact, so no split of the elements changes a bit: each element is written by one rank, and counted there.
double sum_of_state(const std::string& state, const ShardGroups& groups, const Communicator& job, Kernels& kernels,
                    const Stream& stream) {
  kernels::NormAccumulator sum;
  for (const auto& group : groups) {
    for (const StatePiece& piece :
         state_pieces(group->layout(), group->memory(), group->writes_states(), job.rank(), /*with_held=*/false)) {
      if (piece.state != state || piece.writes.size() <= 0) continue;
      PieceReader(piece, kernels, stream).each([&](std::span<const std::byte> bytes) {
        piece.dtype == DType::kFloat64 ? add_elements<double>(bytes, sum) : add_elements<float>(bytes, sum);
      });
    }
  }
  job.all_reduce(std::span<std::int64_t>(sum.words()));
  return sum.sum_of_squares();
}

}  // namespace

FreezeWatch::FreezeWatch(Optimizer& optimizer, std::span<const GroupHyper> groups, std::int64_t warmup)
    : optimizer_(optimizer), warmup_(warmup) {
  const std::optional<Freezing> freezing = optimizer.freezing();
  ZR_ASSERT(freezing, "an optimizer that freezes its variances");
  given_ = *freezing;
  ZR_CHECK(given_.threshold >= 0.0 && given_.threshold < 1.0, ErrorCode::kConfig,
           "a threshold of settled variances is out of range",
           {.where = "engine",
            .which = "/optimizer/params/freeze_threshold",
            .expected = "0, or a number below 1",
            .got = std::to_string(given_.threshold)});
  for (const GroupHyper& group : groups) beta2_ = std::max(beta2_, group.beta2);
  interval_ = std::max<std::int64_t>(1, std::llround(1.0 / (1.0 - beta2_)));
}

std::string FreezeWatch::after_update(std::int64_t committed, const ShardGroups& groups, const Communicator& job,
                                      Kernels& kernels, const Stream& stream) {
  if (!looks() || committed >= optimizer_.freezing()->step || committed % interval_ != 0) return "";
  const double left_out = std::pow(beta2_, static_cast<double>(committed));
  const double sum = sum_of_state(given_.state, groups, job, kernels, stream) / (1.0 - left_out);
  const std::optional<double> before = std::exchange(last_sum_, sum);
  if (!before || committed - interval_ < warmup_ || !std::isfinite(sum) || sum <= 0.0) return "";
  if (std::min(sum, *before) < given_.threshold * std::max(sum, *before)) return "";
  has_settled_ = true;
  optimizer_.freeze_at(committed);
  std::ostringstream text;
  text << "variances have settled after step " << committed << ": their sum is " << sum / *before << " of that "
       << interval_ << " steps before (freeze_threshold " << given_.threshold << "); they stay what they are";
  return text.str();
}

FreezeState FreezeWatch::state() const {
  return {.step = optimizer_.freezing()->step, .has_settled = has_settled_, .last_sum = last_sum_};
}

void FreezeWatch::take(const FreezeState& there) {
  has_settled_ = looks() && there.has_settled;
  last_sum_ = looks() ? there.last_sum : std::nullopt;
  optimizer_.freeze_at(has_settled_ ? there.step : given_.step);
}

void FreezeWatch::require_fits(const FreezeState& there, std::int64_t step, const std::string& path) const {
  if (looks() && there.has_settled) return;
  if (there.step == given_.step || step <= std::min(there.step, given_.step)) return;
  const std::int64_t right = std::min(there.step, step);
  throw Error(ErrorCode::kCheckpoint, "the variances of a checkpoint were not frozen where this training freezes them",
              {.where = "engine.load",
               .which = path + ", of step " + std::to_string(step),
               .expected = "freeze_step " + std::to_string(right) + ": the updates that its variances have had",
               .got = "freeze_step " + std::to_string(given_.step) + " here, " + std::to_string(there.step) + " there",
               .hint = "set /optimizer/params/freeze_step to " + std::to_string(right)});
}

}  // namespace zeroth
