// EngineHook: a hook of the engine's own on a node of autograd.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

namespace zeroth::libtorch {

/// What a hook says when compiled autograd asks how to compile it. Throws kModel.
[[noreturn]] void refuse_compiled_autograd();

/// May be called in each part of a backward, where it changes no gradient: a node that has no other hooks may run in
/// two parts.
class EngineHook : public torch::autograd::FunctionPreHook {
 public:
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }
};

}  // namespace zeroth::libtorch
