// One line an optimizer: name and factory. Add yours here and in its own file (docs/how-to-add-an-optimizer.md).
#pragma once

#include <zeroth/optim/optimizer.h>

#include <memory>
#include <span>

namespace zeroth {

[[nodiscard]] std::unique_ptr<Optimizer> make_adamw(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_lion(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_lamb(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_onebit_adam(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_onebit_lamb(const OptimizerOptions& options);
[[nodiscard]] std::unique_ptr<Optimizer> make_zero_one_adam(const OptimizerOptions& options);

struct OptimizerEntry {
  const char* name;
  std::unique_ptr<Optimizer> (*make)(const OptimizerOptions& options);
};

inline constexpr OptimizerEntry kOptimizers[] = {
    {"AdamW", make_adamw},
    {"Adam", make_adam},
    {"SGD", make_sgd},
    {"Lion", make_lion},
    {"Lamb", make_lamb},
    {"OneBitAdam", make_onebit_adam},
    {"OneBitLamb", make_onebit_lamb},
    {"ZeroOneAdam", make_zero_one_adam},
};

/// make_optimizer() from any table, whose names go into the errors.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                                        std::span<const OptimizerEntry> table);

}  // namespace zeroth
