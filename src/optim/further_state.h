// An optimizer with one more state, which its step does not touch: what a reduction of gradients keeps.
#pragma once

#include <zeroth/optim/optimizer.h>

#include <memory>

namespace zeroth {

/// `state` comes last. Throws kUsage for the name of a state that `inner` has.
[[nodiscard]] std::unique_ptr<Optimizer> with_further_state(std::unique_ptr<Optimizer> inner, StateDeclaration state);

}  // namespace zeroth
