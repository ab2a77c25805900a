#include "hosts/rank_list.h"

#include <fmt/format.h>

#include <cstddef>

namespace zeroth {

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t begin = 0; begin < ranks.size();) {
    std::size_t end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", ranks[begin]);
    if (end - begin > 1) text += fmt::format("-{}", ranks[end - 1]);
    begin = end;
  }
  return text;
}

}  // namespace zeroth
