#include "libtorch/parallel/kept_call.h"

#include <zeroth/base/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace zeroth::libtorch {

struct KeptCalls::Region {
  struct Call {
    std::string text{};  ///< "all_to_all of Double [5, 16] in world/mesh0/ep"
    std::vector<at::Tensor> results{};
    std::vector<std::int64_t> versions{};  ///< of the results, when they were kept
    bool has_results = false;
  };
  std::vector<Call> calls{};
  std::size_t taken = 0;
  bool is_spent = false;  ///< it has been handed out
};

namespace {

struct OpenRegion {
  std::shared_ptr<KeptCalls::Region> region;
  bool hands_out;
};
/// Of the thread, the innermost last. A recompute runs where autograd runs it: a context could not be passed along.
thread_local std::vector<OpenRegion> open_regions;

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

std::string text_of_call(const CallName& name, const std::vector<at::Tensor>& sent, const RankGroup& group) {
  std::string text = name.text() + " of";
  for (const at::Tensor& tensor : sent) text += c10::str(" ", tensor.scalar_type(), " ", tensor.sizes());
  return text + " in " + group.name();
}

[[noreturn]] void refuse_call(const RankGroup& group, std::size_t index, const std::string& message,
                              std::string expected, std::string got, std::string hint) {
  throw Error(ErrorCode::kMismatch, message,
              {.where = "libtorch.kept_calls",
               .who = group.who(),
               .which = "call " + std::to_string(index + 1) + " of a region",
               .expected = std::move(expected),
               .got = std::move(got),
               .hint = std::move(hint)});
}

/// The results of the region's next call, which is `text`.
std::vector<at::Tensor> take_next(KeptCalls::Region& region, const std::string& text, const RankGroup& group) {
  const std::size_t index = region.taken;
  const bool is_there = index < region.calls.size();
  if (!is_there || region.calls[index].text != text)
    refuse_call(group, index, "a recompute makes other calls between ranks than the forward",
                is_there ? region.calls[index].text : "no call: the forward made " + std::to_string(index), text,
                "a checkpointed region computes the same each time: random numbers, counters and switches must be as "
                "they were");
  KeptCalls::Region::Call call = std::exchange(region.calls[index], {});
  ++region.taken;
  if (!call.has_results)
    refuse_call(group, index, "a sum was not taken where the forward ended", "wait() inside of the region", text,
                "call wait() of the sum inside of the checkpointed region");
  for (std::size_t result = 0; result < call.results.size(); ++result) {
    if (version_of(call.results[result]) != call.versions[result])
      refuse_call(group, index, "the result of a call was written to in place after it was kept",
                  "y = f(y) of the result of " + text, "f_(y)", "or recompute this region without kept calls");
  }
  return std::move(call.results);
}

}  // namespace

KeptCalls::KeptCalls() : region_(std::make_shared<Region>()) {}

KeptCalls::Scope::Scope(std::shared_ptr<Region> region, bool hands_out) : region_(std::move(region)) {
  open_regions.push_back({.region = region_, .hands_out = hands_out});
}

KeptCalls::Scope::~Scope() {
  if (!region_) return;
  const auto last = std::find_if(open_regions.rbegin(), open_regions.rend(),
                                 [&](const auto& open) { return open.region == region_; });
  if (last == open_regions.rend()) return;
  if (last->hands_out) {
    *region_ = {.is_spent = true};
  }
  open_regions.erase(std::next(last).base());
}

KeptCalls::Scope KeptCalls::record() const {
  *region_ = {};
  return {region_, /*hands_out=*/false};
}

KeptCalls::Scope KeptCalls::hand_out() const {
  // A region without results: its calls are made, and nothing is kept of them.
  if (region_->is_spent) return {std::make_shared<Region>(Region{.is_spent = true}), /*hands_out=*/true};
  return {region_, /*hands_out=*/true};
}

std::size_t KeptCalls::size() const {
  return region_->calls.size() - region_->taken;
}

std::int64_t KeptCalls::bytes() const {
  std::int64_t bytes = 0;
  for (const Region::Call& call : region_->calls) {
    for (const at::Tensor& result : call.results) bytes += static_cast<std::int64_t>(result.nbytes());
  }
  return bytes;
}

bool hands_out_calls() {
  return std::ranges::any_of(open_regions, [](const OpenRegion& open) { return open.hands_out; });
}

bool is_in_region() {
  return !open_regions.empty();
}

RegionCall::RegionCall(const CallName& name, const std::vector<at::Tensor>& sent, const RankGroup& group) {
  if (name.is_backward || open_regions.empty()) return;
  const std::string text = text_of_call(name, sent, group);
  for (const OpenRegion& open : open_regions) {
    KeptCalls::Region& region = *open.region;
    if (!open.hands_out) {
      places_.push_back({.region = open.region, .index = region.calls.size()});
      region.calls.emplace_back().text = text;
    } else if (!region.is_spent) {
      kept_ = take_next(region, text, group);
      hands_out_ = true;
    }
  }
}

std::vector<at::Tensor> RegionCall::keep(std::vector<at::Tensor> results) {
  for (const Place& place : places_) {
    // A recompute may have ended before this, and dropped its calls.
    if (place.index >= place.region->calls.size()) continue;
    KeptCalls::Region::Call& call = place.region->calls[place.index];
    for (const at::Tensor& result : results) {
      // Autograd writes its node to the tensor that the caller gets; this one has the same memory and no graph.
      call.results.push_back(result.detach());
      call.versions.push_back(version_of(result));
    }
    call.has_results = true;
  }
  return results;
}

}  // namespace zeroth::libtorch
