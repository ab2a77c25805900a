// The matched calls of an engine: what they are about, in the tags that ranks compare, and how those read in errors.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/sync_point.h>

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

[[nodiscard]] MessageTag tag_of(SyncPoint what);

/// "the gradients of unit blocks.3", "step()"; "" for tags of other calls. Where ranks gather or sum different units, a
/// hint what to do. `model` must outlive it.
[[nodiscard]] TagNames tag_names(const ModelLayout& model);

/// "step()", "an export": what the ranks come together for.
[[nodiscard]] const char* name_of(SyncPoint what) noexcept;

}  // namespace zeroth
