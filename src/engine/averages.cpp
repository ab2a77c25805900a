// Averages of weights on shards: Engine::add_average(), update_average() and swap_average().
#include "engine/own_operations.h"
#include "engine/piece_io.h"
#include "engine/shard_group.h"
#include "engine/state_pieces.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <algorithm>
#include <map>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kAverageWhere = "engine.average";
constexpr std::int64_t kAverageStep = std::int64_t{1} << 16U;  // elements in hand at once

/// No fused operations: the same bits under every split and instruction set.
template <class T>
void move_towards(std::vector<std::byte>& average, const std::vector<std::byte>& master, double decay) {
  const auto weight = static_cast<T>(1.0 - decay);
  auto* a = reinterpret_cast<T*>(average.data());
  const auto* m = reinterpret_cast<const T*>(master.data());
  for (std::size_t i = 0; i < average.size() / sizeof(T); ++i) a[i] += weight * (m[i] - a[i]);
}

}  // namespace

void Engine::for_average(const std::string& name,
                         const std::function<void(const StatePiece&, const StatePiece&)>& body) {
  std::map<int, StatePiece> weights;
  for (StatePiece& piece : pieces_of_kind("master", 1.0)) weights.emplace(piece.param, std::move(piece));
  bool any = false;
  for (const auto& group : groups_) {
    any = any || std::ranges::any_of(group->memory().states(), [&name](const ModelMemory::Placed& placed) {
            return placed.row.kind == StateKind::kAverage && placed.row.name == name;
          });
  }
  ZR_CHECK(any || !trains(), ErrorCode::kUsage, "there is no such average", {.where = kAverageWhere, .which = name});
  for (const StatePiece& average : pieces_of_kind(name, 1.0)) body(weights.at(average.param), average);
}

void Engine::add_average(const std::string& name) {
  require_own_weights("a new average");
  ZR_CHECK(!name.empty() && name != "weight" && name.find_first_of("@/") == std::string::npos && !has_kind(name),
           ErrorCode::kUsage, "an average needs a name of its own",
           {.where = kAverageWhere,
            .which = name,
            .expected = "no \"/\" or \"@\", not weight, and none of " + zeroth::join(state_kinds(), ", ")});
  together([&] {
    meet(own_->average_weights, "a new average " + name);
    for (const auto& group : groups_) group->memory().add_state(*kernels_, StateKind::kAverage, name);
    for_average(name, [this](const StatePiece& weight, const StatePiece& average) {
      const std::vector<std::byte> values =
          PieceReader(weight, *kernels_, resources_->gather_stream).all_of({average.has.begin, average.has.end});
      store(average, values, *kernels_, resources_->gather_stream);
    });
    kernels_->settle(resources_->gather_stream);
  });
}

void Engine::update_average(const std::string& name, double decay) {
  require_own_weights("an update of an average");
  ZR_CHECK(decay >= 0.0 && decay <= 1.0, ErrorCode::kUsage, "an average cannot decay so",
           {.where = kAverageWhere, .which = name, .expected = "0 to 1", .got = std::to_string(decay)});
  for_average(name, [this, decay](const StatePiece& weight, const StatePiece& average) {
    PieceReader masters(weight, *kernels_, resources_->gather_stream);
    PieceReader averages(average, *kernels_, resources_->gather_stream);
    for (std::int64_t at = average.has.begin; at < average.has.end; at += kAverageStep) {
      const Range range{at, std::min(at + kAverageStep, average.has.end)};
      std::vector<std::byte> values = averages.all_of(range);
      const std::vector<std::byte> master = masters.all_of(range);
      if (decay == 0.0) values = master;  // to the bit
      average.dtype == DType::kFloat64 ? move_towards<double>(values, master, decay)
                                       : move_towards<float>(values, master, decay);
      store_weights(average, range.begin, values, WeightValues::kMaster, *kernels_, resources_->gather_stream);
    }
  });
}

void Engine::swap_average(const std::string& name) {
  require_quiet("an exchange of weights and average");
  ZR_CHECK(applied_average_.empty() || applied_average_ == name, ErrorCode::kUsage, "another average is applied",
           {.where = kAverageWhere, .which = name, .got = applied_average_});
  together([&] {
    meet(own_->average_weights, "average " + name);
    for (const auto& group : groups_) group->complete_uses();
    for_average(name, [this](const StatePiece& weight, const StatePiece& average) {
      PieceReader masters(weight, *kernels_, resources_->gather_stream);
      PieceReader averages(average, *kernels_, resources_->gather_stream);
      for (std::int64_t at = average.has.begin; at < average.has.end; at += kAverageStep) {
        const Range range{at, std::min(at + kAverageStep, average.has.end)};
        const std::vector<std::byte> theirs = averages.all_of(range);
        const std::vector<std::byte> own = masters.all_of(range);
        store_weights(average, range.begin, own, WeightValues::kMaster, *kernels_, resources_->gather_stream);
        store_weights(weight, range.begin, theirs, WeightValues::kMaster, *kernels_, resources_->gather_stream);
      }
    });
    applied_average_ = applied_average_.empty() ? name : "";
    republish("weights and their average");
  });
}

}  // namespace zeroth
