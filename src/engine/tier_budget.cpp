#include "engine/startup_check.h"
#include "engine/texts.h"

#include <zeroth/base/text.h>
#include <zeroth/zero/tier_plan.h>

#include <algorithm>
#include <array>
#include <string>

namespace zeroth {
namespace {

struct BudgetedTier {
  const char* name;
  const char* key;
  std::uint64_t bytes;
  std::uint64_t budget;  ///< 0: none

  [[nodiscard]] std::uint64_t over() const { return budget > 0 && bytes > budget ? bytes - budget : 0; }
};

std::array<BudgetedTier, 3> tiers_of(const TierBytes& planned, const TierBudget& budget) {
  return {{{"device", "/zeroth/budget/device_bytes", planned.device, budget.device_bytes},
           {"host", "/zeroth/budget/host_bytes", planned.host, budget.host_bytes},
           {"files", "/zeroth/budget/file_bytes", planned.files, budget.file_bytes}}};
}

std::string help(const BudgetedTier& tier, const ShardingPlan& plan) {
  const std::string_view name = tier.name;
  if (name == "files") return "offload_optimizer.ratio below 1 leaves some states in memory; or split over more ranks";
  if (name == "host" && plan.residency.optimizer == Residency::kHost)
    return "offload_optimizer.device nvme moves these states to files";
  if (name == "host")
    return "a larger offload_optimizer.ratio, or a smaller buffer_count, cache_blocks or block_elements";
  if (plan.residency.optimizer == Residency::kDevice)
    return "offload_optimizer.device cpu or nvme moves the optimizer's states away";
  if (plan.parameter != Placement::kFlat) return "a higher zero_optimization.stage splits gradients and parameters";
  return "split over more ranks, or train a smaller model";
}

std::string budget_line(const std::array<BudgetedTier, 3>& tiers) {
  std::string text;
  for (const BudgetedTier& tier : tiers) {
    text += (text.empty() ? "" : ", ") + std::string(tier.name) + " " + format_bytes(tier.bytes);
    if (tier.budget == 0) continue;
    text +=
        " of " + format_bytes(tier.budget) + " (" +
        (tier.over() > 0 ? format_bytes(tier.over()) + " too much" : format_bytes(tier.budget - tier.bytes) + " free") +
        ")";
  }
  return text;
}

}  // namespace

void require_budgets(const ShardGroups& groups, const EngineSettings& settings,
                     std::span<const StateDeclaration> states, const Communicator& communicator) {
  if (settings.budget == TierBudget{}) return;  // the same on all ranks
  const TierTable table = planned_tiers(groups, settings, states);
  const std::array<BudgetedTier, 3> tiers = tiers_of(table.total(), settings.budget);
  const BudgetedTier& worst = *std::ranges::max_element(tiers, {}, &BudgetedTier::over);
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> over(world);
  const auto own = static_cast<std::int64_t>(worst.over());
  communicator.all_gather(std::span(&own, 1), std::span(over));
  const auto most = std::ranges::max_element(over);
  if (*most == 0) return;
  const int rank = static_cast<int>(most - over.begin());
  const auto told = [&](const std::string& text) { return broadcast_text(text, rank, communicator); };
  const std::string key = told(worst.key);
  const std::string limit = told(format_bytes(worst.budget) + " of " + worst.name);
  const std::string wants = told(budget_line(tiers) + "\n" + to_text(table) + "\n");
  const std::string hint = told(help(worst, settings.plan));
  throw Error(ErrorCode::kOutOfMemory, "the plan goes over the budget of a tier",
              {.where = "engine.plan",
               .who = "rank " + std::to_string(rank) + "/" + std::to_string(world),
               .which = key,
               .expected = "at most " + limit,
               .got = wants,
               .hint = hint});
}

}  // namespace zeroth
