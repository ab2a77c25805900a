// One line an optimizer: name and factory. Add yours here and in its own file (docs/how-to-add-an-optimizer.md).
#pragma once

#include <zeroth/optim/optimizer.h>

#include <memory>

namespace zeroth {

[[nodiscard]] std::unique_ptr<Optimizer> make_adamw(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options);

struct OptimizerEntry {
  const char* name;
  std::unique_ptr<Optimizer> (*make)(const OptimizerOptions& options);
};

inline constexpr OptimizerEntry kOptimizers[] = {
    {"AdamW", make_adamw},
    {"Adam", make_adam},
    {"SGD", make_sgd},
};

}  // namespace zeroth
