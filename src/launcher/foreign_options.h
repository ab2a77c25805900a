// What users of torchrun, DeepSpeed and accelerate write: options that mean the same here, and hints for those that do
// not.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// The name of an option as zeroth-run writes it: '-' for '_'.
[[nodiscard]] std::string with_hyphens(std::string_view name);

/// What to write here for an option of another launcher ("--rdzv_endpoint", "-H"); "" for none of theirs.
[[nodiscard]] std::string hint_for_foreign_option(std::string_view name);

/// Names under which -n is known elsewhere. With hosts they are the ranks of each host, and -n is the sum.
inline constexpr const char* kRanksPerNode = "--nproc-per-node";  ///< torchrun; also with underscores
inline constexpr const char* kNumGpus = "--num-gpus";             ///< DeepSpeed; also with underscores

/// The devices of NVIDIA that ranks of this host see: those of CUDA_VISIBLE_DEVICES, where `environment` has it, else
/// the files nvidia<N> of `folder`.
[[nodiscard]] int count_gpus(const std::vector<std::string>& environment, const std::string& folder = "/dev");

struct HostParts {
  int cores = 1;
  int gpus = 0;
};
struct RanksOfWord {
  int ranks = 0;
  std::string note{};  ///< "--nproc-per-node auto: 8 ranks, one for each GPU"
};
/// torchrun's words for --nproc-per-node: gpu, cpu, auto (the GPUs, else the cores). Throws Error(kUsage) for another
/// word, and for gpu without one.
[[nodiscard]] RanksOfWord ranks_of_word(const std::string& word, const HostParts& host);

}  // namespace zeroth::launcher
