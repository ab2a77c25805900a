#include "optim/optimizer_table.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/optim/optimizer.h>

namespace zeroth {

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const OptimizerEntry& entry : kOptimizers) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options) {
  for (const OptimizerEntry& entry : kOptimizers) {
    if (options.type == entry.name) return entry.make(options);
  }
  const std::vector<std::string> names = optimizer_names();
  const std::string near = nearest_name(options.type, names);
  throw Error(ErrorCode::kConfig, "no such optimizer is built",
              {.where = "optim",
               .which = "optimizer.type",
               .expected = "one of " + join(names, ", "),
               .got = options.type,
               .hint = near.empty() ? "" : "did you mean " + near + "?"});
}

}  // namespace zeroth
