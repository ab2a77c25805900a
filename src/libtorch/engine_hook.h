// EngineHook: a hook of the engine's own on a node of autograd.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

namespace zeroth::libtorch {

/// Changes no gradient, and may be called in each part of a backward: a node that has no other hooks may run in two
/// parts.
class EngineHook : public torch::autograd::FunctionPreHook {};

}  // namespace zeroth::libtorch
