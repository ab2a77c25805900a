// The tags of an engine's collectives, which ranks compare, and the text of a tag in errors.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/operation_id.h>

#include <string>

namespace zeroth {

enum class CallPurpose : std::uint8_t {
  kOther,
  kGatherParameters,
  kPublishParameters,
  kReadParameters,
  kReduceGradients,
  kShareGradients,
  kCombineGradients
};

[[nodiscard]] MessageTag tag_of(OperationId what);

/// The text of each tag: "the gradients of unit blocks.3", "step()", or "" for tags of other calls. If ranks gather or
/// sum different units, also a hint. The result borrows `model`, which must outlive it. Without `operations` theirs are
/// tags of other calls. `gathers`: the plan gathers parameters, so units are more than what is summed at once.
[[nodiscard]] TagNames tag_names(const ModelLayout& model, bool gathers, OperationNames operations = {});

}  // namespace zeroth
