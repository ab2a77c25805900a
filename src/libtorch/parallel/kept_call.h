// One call between ranks, and the regions of KeptCalls that its thread is in.
#pragma once

#include "libtorch/parallel/group_call.h"

#include <zeroth/libtorch/kept_calls.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// False outside of all regions.
[[nodiscard]] bool is_in_region();

/// A call's place in the regions around it, from the start of the call on. `sent`: what this rank gives.
class RegionCall {
 public:
  /// Of no region.
  RegionCall() = default;
  /// Takes the next result of regions that hand out. Throws kMismatch if it is of another call. Calls of a backward are
  /// of no region.
  RegionCall(const CallName& name, const std::vector<at::Tensor>& sent, const RankGroup& group);

  /// The results are those of kept(), and no call is made.
  [[nodiscard]] bool hands_out() const { return hands_out_; }
  /// For regions that record: these are the results. Returns them.
  std::vector<at::Tensor> keep(std::vector<at::Tensor> results);
  at::Tensor keep(at::Tensor result) { return keep(std::vector<at::Tensor>{std::move(result)})[0]; }
  [[nodiscard]] const std::vector<at::Tensor>& kept() const { return kept_; }

 private:
  struct Place {
    std::shared_ptr<KeptCalls::Region> region;
    std::size_t index;
  };
  std::vector<Place> places_{};
  std::vector<at::Tensor> kept_{};
  bool hands_out_ = false;
};

/// make(), but where a region hands out its result.
template <class Make>
at::Tensor made_once(const CallName& name, const at::Tensor& sent, const RankGroup& group, const Make& make) {
  if (name.is_backward || !is_in_region()) return make();
  RegionCall call(name, {sent}, group);
  return call.keep(call.hands_out() ? call.kept()[0] : make());
}

}  // namespace zeroth::libtorch
