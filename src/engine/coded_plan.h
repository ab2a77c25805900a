// What a plan whose numbers travel in codes (WireCodes) needs of the model and of the optimizer.
#pragma once

#include <zeroth/engine/settings.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/shard/param_spec.h>

#include <memory>
#include <string>
#include <vector>

namespace zeroth {

/// Vectors travel as they are: in flats without matrices.
[[nodiscard]] std::vector<ParamSpec> with_separate_vectors(std::vector<ParamSpec> params,
                                                           const EngineSettings& settings);
/// The optimizer of the settings, and the errors that a reduction in codes keeps as one more state of it.
[[nodiscard]] std::unique_ptr<Optimizer> optimizer_of(const EngineSettings& settings);
/// For a line at the start of a run: what travels in codes; "" if nothing does.
[[nodiscard]] std::string lossy_part(const WireCodes& codes);
/// Throws kConfig for what codes do not go with: an optimizer whose ranks exchange messages, sums or errors that would
/// rest beside a device.
void require_codes_fit(const EngineSettings& settings, const Optimizer& optimizer, bool beside_device);

}  // namespace zeroth
