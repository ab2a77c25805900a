#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/libtorch/same_tensors.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace zeroth::libtorch {
namespace {

std::string form_of_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes()) : "none";
}

std::int64_t digest_of_tensor(const at::Tensor& tensor) {
  const std::uint64_t form = digest64(form_of_tensor(tensor));
  if (!tensor.defined()) return static_cast<std::int64_t>(form);
  const at::Tensor flat = tensor.detach().cpu().contiguous();
  const std::string_view bytes(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  return static_cast<std::int64_t>(digest64(bytes, form));
}

}  // namespace

void require_same(const std::vector<std::pair<std::string, at::Tensor>>& tensors, const RankGroup& group,
                  const SameTensors& words) {
  const auto ranks = static_cast<std::size_t>(group.size());
  if (ranks == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> own;
  for (const auto& [name, tensor] : tensors) own.push_back(digest_of_tensor(tensor));
  // How many, and one digest for all; those of each only where ranks differ.
  const auto in_all = static_cast<std::int64_t>(
      digest64({reinterpret_cast<const char*>(own.data()), own.size() * sizeof(std::int64_t)}));
  const std::array said{static_cast<std::int64_t>(own.size()), in_all};
  std::vector<std::int64_t> summary(2 * ranks);
  group.communicator().all_gather(std::span<const std::int64_t>(said), std::span(summary));
  bool alike = true;
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    ZR_CHECK(summary[2 * rank] == summary[0], ErrorCode::kMismatch, words.what,
             {.where = words.where,
              .who = group.who(),
              .which = "rank " + std::to_string(rank) + " of " + group.name(),
              .expected = std::to_string(summary[0]) + " tensors, as on rank 0",
              .got = std::to_string(summary[2 * rank]),
              .hint = words.hint});
    alike = alike && summary[2 * rank + 1] == summary[1];
  }
  if (alike) return;
  std::vector<std::int64_t> all(ranks * own.size());
  group.communicator().all_gather(std::span<const std::int64_t>(own), std::span(all));
  for (std::size_t index = 0; index < own.size(); ++index) {
    std::vector<int> others;
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      if (all[rank * own.size() + index] != all[index]) others.push_back(static_cast<int>(rank));
    }
    const auto& [name, tensor] = tensors[index];
    ZR_CHECK(others.empty(), ErrorCode::kMismatch, words.what,
             {.where = words.where,
              .who = group.who(),
              .which = name + " on " + ranks_text(others) + " of " + group.name(),
              .expected = "what rank 0 has",
              .got = "on this rank " + form_of_tensor(tensor),
              .hint = words.hint});
  }
}

}  // namespace zeroth::libtorch
