#include "optim/optimizer_table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/optim/optimizer.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

namespace {

std::vector<std::string> names_of(std::span<const OptimizerEntry> table) {
  std::vector<std::string> names;
  for (const OptimizerEntry& entry : table) names.emplace_back(entry.name);
  return names;
}

void require_different_names(const Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const StateDeclaration& state : optimizer.states()) names.push_back(state.name);
  std::vector<std::string> sorted = names;
  std::ranges::sort(sorted);
  ZR_CHECK(std::ranges::adjacent_find(sorted) == sorted.end(), ErrorCode::kUsage,
           "an optimizer declares two states of one name",
           {.where = "optim",
            .which = std::string(optimizer.name()),
            .expected = "a name for each state, by which reports and checkpoints know it",
            .got = join(names, ", ")});
}

}  // namespace

std::vector<std::string> optimizer_names() {
  return names_of(kOptimizers);
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options) {
  return make_optimizer(options, kOptimizers);
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::span<const OptimizerEntry> table) {
  for (const OptimizerEntry& entry : table) {
    if (options.type != entry.name) continue;
    std::unique_ptr<Optimizer> optimizer = entry.make(options);
    require_different_names(*optimizer);
    return optimizer;
  }
  const std::vector<std::string> names = names_of(table);
  const std::string near = nearest_name(options.type, names);
  throw Error(ErrorCode::kConfig, "no such optimizer is built",
              {.where = "optim",
               .which = "optimizer.type",
               .expected = "one of " + join(names, ", "),
               .got = options.type,
               .hint = near.empty() ? "" : "did you mean " + near + "?"});
}

}  // namespace zeroth
