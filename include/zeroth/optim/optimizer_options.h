// What an optimizer is made with: settings of all parameter groups, which do not change during a training.
#pragma once

#include <zeroth/optim/compression_options.h>

#include <cstdint>
#include <string>

namespace zeroth {

/// Of Lamb and OneBitLamb.
struct LambOptions {
  double max_coeff = 10.0;  ///< of the trust ratio
  double min_coeff = 0.01;
  bool bias_correction = true;
  double coeff_beta = 0.9;  ///< OneBitLamb: of the mean of trust ratios before they are frozen
  double factor_max = 4.0;  ///< OneBitLamb: of the factor on a frozen trust ratio
  double factor_min = 0.5;
  double factor_threshold = 0.1;  ///< OneBitLamb: by how much of itself a factor may change in a step
  bool operator==(const LambOptions&) const = default;
};

/// Of ZeroOneAdam.
struct ZeroOneOptions {
  std::int64_t var_freeze_step = 100'000;   ///< updates before variances are frozen
  std::int64_t var_update_scaler = 16;      ///< updates of variances until the interval between them doubles
  std::int64_t local_step_scaler = 32'678;  ///< updates until the interval between synchronisations doubles
  std::int64_t local_step_clipper = 16;     ///< the longest interval between synchronisations
  bool operator==(const ZeroOneOptions&) const = default;
};

/// `type`: see optimizer_names(). `momentum`: SGD keeps a momentum buffer.
struct OptimizerOptions {
  std::string type = "AdamW";
  bool momentum = false;
  /// OneBitAdam, OneBitLamb: updates before variances are frozen and messages replace sums.
  std::int64_t freeze_step = 100'000;
  /// The same: variances are frozen earlier once they have settled (engine/freeze_watch.h); 0: never earlier.
  double freeze_threshold = 0.0;
  CompressionOptions compression{};  ///< the same: of what ranks exchange after them
  LambOptions lamb{};
  ZeroOneOptions zero_one{};
};

}  // namespace zeroth
