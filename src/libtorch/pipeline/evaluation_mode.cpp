#include "libtorch/pipeline/evaluation_mode.h"

namespace zeroth::libtorch {

EvaluationMode::EvaluationMode(const std::vector<std::shared_ptr<torch::nn::Module>>& roots) {
  for (const auto& root : roots) {
    for (const auto& module : root->modules(/*include_self=*/true)) before_.emplace_back(module, module->is_training());
  }
  for (const auto& root : roots) root->eval();
}

EvaluationMode::~EvaluationMode() {
  // train() goes into what is in a module, whose own turn is later.
  for (const auto& [module, trained] : before_) module->train(trained);
}

}  // namespace zeroth::libtorch
