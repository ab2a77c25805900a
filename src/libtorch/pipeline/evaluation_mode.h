// EvaluationMode: modules do not train while it lives.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// Calls eval() on modules and what is in them, and at its end train() with what each of them was before.
class EvaluationMode {
 public:
  explicit EvaluationMode(const std::vector<std::shared_ptr<torch::nn::Module>>& roots);
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode();

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> before_;  ///< each before what is in it
};

}  // namespace zeroth::libtorch
