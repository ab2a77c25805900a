#include "same.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/libtorch/collectives.h>

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string_view>

namespace gpt {
namespace {

std::int64_t digest_of(const torch::Tensor& tensor) {
  const torch::Tensor flat = tensor.detach().contiguous();
  const std::string form = c10::str(flat.scalar_type(), " ", flat.sizes());
  const std::string_view bytes(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
  return static_cast<std::int64_t>(zeroth::digest64(bytes, zeroth::digest64(form)));
}

}  // namespace

void require_same(const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
                  const zeroth::libtorch::RankGroup& group, const std::string& what, const std::string& hint) {
  const auto count = static_cast<std::int64_t>(tensors.size());
  torch::Tensor own = torch::empty({1, count}, torch::kInt64);
  for (std::int64_t i = 0; i < count; ++i) {
    own[0][i] = digest_of(tensors[static_cast<std::size_t>(i)].second);
  }
  const torch::Tensor every = zeroth::libtorch::all_gather(own, 0, group);
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<int> others;
    for (int rank = 1; rank < group.size(); ++rank) {
      if (every[rank][i].item<std::int64_t>() != every[0][i].item<std::int64_t>()) {
        others.push_back(rank);
      }
    }
    const auto& [name, tensor] = tensors[static_cast<std::size_t>(i)];
    ZR_CHECK(others.empty(), zeroth::ErrorCode::kMismatch, what,
             zeroth::ErrorContext{.where = "zeroth-gpt --mesh",
                                  .who = group.who(),
                                  .which = name + " on " + zeroth::ranks_text(others) + " of " + group.name(),
                                  .expected = "what rank 0 has",
                                  .got = c10::str("on this rank ", tensor.scalar_type(), " ", tensor.sizes()),
                                  .hint = hint});
  }
}

}  // namespace gpt
