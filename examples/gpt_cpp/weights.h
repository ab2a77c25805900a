// Initial weights from a safetensors file.
#pragma once

#include "model.h"

#include <filesystem>

namespace gpt {

/// Fills the parameters with the file's tensors, rounded to the parameters' dtype. Names are those of an
/// export.
/// @throws zeroth::Error with nothing changed: kIo for a file that cannot be read, kUsage for names, shapes
/// or dtypes that are not those of the model.
void load_weights(Gpt& model, const std::filesystem::path& path);

}  // namespace gpt
