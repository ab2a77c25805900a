#include "base/unique_fd.h"

#include <zeroth/base/ended_ranks.h>
#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <sstream>

namespace zeroth {

std::string line_of(const EndedRank& rank) {
  std::string host = rank.host;  // a word of the line
  std::ranges::replace(host, ' ', '_');
  return fmt::format("{} {} {} {}\n", rank.rank, rank.pid, rank.exit_code, host);
}

std::string head_of_ended_ranks(std::string_view job, int size) {
  return fmt::format("job {} {}\n", job, size);
}

std::vector<EndedRank> ended_ranks_in(std::string_view text, std::string_view job, int size) {
  std::vector<EndedRank> ranks;
  std::istringstream head{std::string(text.substr(0, text.find('\n')))};
  std::string word;
  std::string of;
  int ranks_of = 0;
  if (!(head >> word >> of >> ranks_of) || word != "job" || ranks_of != size || !job.starts_with(of)) return ranks;
  for (std::size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
    std::istringstream line{std::string(text.substr(0, end))};
    text.remove_prefix(end + 1);
    EndedRank rank;
    if (!(line >> rank.rank >> rank.pid >> rank.exit_code)) continue;
    line >> rank.host;
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

namespace {

std::string board_text() {
  const std::string path = variable_or_empty(kEndedRanksVariable);
  if (path.empty()) return {};
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file) return {};
  std::string text;
  std::array<char, 4096> block{};
  constexpr std::size_t kLongest = std::size_t{1} << 20U;
  for (ssize_t bytes = 1; bytes > 0 && text.size() < kLongest;) {
    bytes = ::pread(file.get(), block.data(), block.size(), static_cast<off_t>(text.size()));
    if (bytes > 0) text.append(block.data(), static_cast<std::size_t>(bytes));
  }
  return text;
}

}  // namespace

std::optional<std::string> rank_that_never_came(std::string_view job, int own, int size) {
  const std::vector<EndedRank> ended = ended_ranks_in(board_text(), job, size);
  const auto found = std::ranges::find_if(ended, [own](const EndedRank& one) { return one.rank != own; });
  if (found == ended.end()) return std::nullopt;
  return fmt::format("rank {} (pid {}{}) exited with code {} before the ranks met", found->rank, found->pid,
                     found->host.empty() ? "" : " on " + found->host, found->exit_code);
}

}  // namespace zeroth
