// How messages between ranks are made smaller: which component, and its parameters (zero/message_reduction.h).
#pragma once

#include <string>

namespace zeroth {

struct CompressionOptions {
  /// One of reduction_names(), or "adaptive": one of some for each flat, chosen while the run goes on (L-GreCo).
  std::string compression = "one_bit";
  double ratio = 0.01;  ///< top_k: the share of a parameter's elements that travels
  int rank = 4;         ///< low_rank: columns of the factors
  int every = 1;        ///< adaptive: steps from one choice to the next
  bool operator==(const CompressionOptions&) const = default;
};

}  // namespace zeroth
