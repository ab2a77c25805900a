// The training run: text, model and engine put together. Its .cpp, weights.cpp and model.cpp are the files
// here that include torch.
#pragma once

#include "options.h"

namespace zeroth {
class World;
}

namespace gpt {

/// Trains, validates, samples and exports as `options` say; all ranks call it and see the same errors.
/// @throws zeroth::Error; torch's own exceptions pass through.
void train(const Options& options, const zeroth::World& world);

}  // namespace gpt
