// How even the load of experts is, in the log of an engine.
#pragma once

#include <cstdint>
#include <string>

namespace zeroth::libtorch {

class Runtime;

/// Goes with the log of the next update, on rank 0; other ranks log no steps. The least entropy of the load of a layer
/// of experts, from 0 to 1, that layer's name, and how many choices were dropped in all layers, of this rank's tokens.
/// The line of progress ends with it; the JSON log has a record "experts".
void note_experts(Runtime& runtime, double entropy, std::string layer, std::int64_t dropped);

}  // namespace zeroth::libtorch
