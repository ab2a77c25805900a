#include "launcher/cores.h"

#include "hosts/rank_list.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

namespace zeroth::launcher {

std::vector<std::vector<int>> share_processors(std::vector<Processor> processors, int num_ranks) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  if (processors.size() < ranks) {
    return {};
  }
  const auto place = [](const Processor& one) { return std::tuple(one.node, one.package, one.core); };
  std::ranges::sort(processors, {},
                    [&](const Processor& one) { return std::tuple_cat(place(one), std::tuple(one.number)); });
  // Where each core begins; its threads follow.
  std::vector<std::size_t> begins;
  for (std::size_t i = 0; i < processors.size(); ++i) {
    if (i == 0 || place(processors[i]) != place(processors[i - 1])) begins.push_back(i);
  }
  if (begins.size() < ranks) {
    begins.resize(processors.size());
    for (std::size_t i = 0; i < begins.size(); ++i) begins[i] = i;
  }
  const std::size_t units = begins.size();
  begins.push_back(processors.size());
  std::vector<std::vector<int>> shares(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = begins[rank * units / ranks]; i < begins[(rank + 1) * units / ranks]; ++i) {
      shares[rank].push_back(processors[i].number);
    }
  }
  const std::size_t even = std::ranges::min(shares, {}, &std::vector<int>::size).size();
  for (std::vector<int>& share : shares) {
    share.resize(even);
    std::ranges::sort(share);
  }
  return shares;
}

std::vector<std::vector<int>> plan_binding(BindCores wanted, int num_ranks) {
  if (wanted == BindCores::kOff || (wanted == BindCores::kAuto && num_ranks == 1)) {
    return {};
  }
  const std::vector<Processor> processors = processors_here();
  std::vector<std::vector<int>> shares = share_processors(processors, num_ranks);
  if (shares.empty() && wanted == BindCores::kOn) {
    throw Error(ErrorCode::kUsage, "there is no core for every rank",
                {.which = "--bind-cores on",
                 .expected = fmt::format("at least {} in the affinity mask", num_ranks),
                 .got = std::to_string(processors.size()),
                 .hint = "start fewer ranks, or --bind-cores off"});
  }
  return shares;
}

std::string describe_processors(const std::vector<int>& processors) {
  return describe_ranks(processors);
}

}  // namespace zeroth::launcher
