// The training run: text, model and engine put together. Its .cpp, weights.cpp and model.cpp are the files
// here that include torch.
#pragma once

#include "options.h"

namespace zeroth {
class World;
}

namespace gpt {

/// Trains, validates, samples and exports as `options` say; all ranks call it and see the same errors. True if the job
/// was asked to make room, and its state is saved.
/// @throws zeroth::Error; torch's own exceptions pass through.
[[nodiscard]] bool train(const Options& options, const zeroth::World& world);

}  // namespace gpt
