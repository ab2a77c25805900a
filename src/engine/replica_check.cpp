#include "engine/replica_check.h"

#include "engine/odd_rank.h"
#include "engine/piece_io.h"
#include "engine/state_pieces.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

enum : std::size_t { kBegin, kEnd, kDigest, kWords };

std::int64_t digest_of_piece(const StatePiece& piece, Kernels& kernels, const Stream& stream) {
  std::uint64_t digest = 0;
  PieceReader(piece, kernels, stream)
      .each_of(Range{piece.has.begin, piece.has.end}, [&digest](std::span<const std::byte> bytes) {
        digest = digest * 31 + digest64({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      });
  return static_cast<std::int64_t>(digest >> 1U);
}

/// Where a rank of the group differs: "PARAMETER, STATE\nelements ... of rank ...", else "".
std::string difference_in(const ShardGroup& group, bool after_messages, int job_rank, Kernels& kernels,
                          const Stream& stream) {
  const Communicator ranks = group.replica_ranks();
  if (ranks.size() == 1) return "";
  const std::vector<StatePiece> pieces = replica_pieces(group.layout(), group.memory(), after_messages);
  std::vector<std::int64_t> own;
  for (const StatePiece& piece : pieces) {
    own.push_back(piece.has.begin);
    own.push_back(piece.has.end);
    own.push_back(piece.has.size() == 0 ? 0 : digest_of_piece(piece, kernels, stream));
  }
  own.push_back(job_rank);
  const auto world = static_cast<std::size_t>(ranks.size());
  std::vector<std::int64_t> all(own.size() * world);
  ranks.all_gather(std::span<const std::int64_t>(own), std::span(all));
  const auto of_rank = [&](std::size_t rank) { return std::span(all).subspan(rank * own.size(), own.size()); };
  for (std::size_t number = 0; number < pieces.size(); ++number) {
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::size_t>> alike;  // ranks with the same elements
    for (std::size_t rank = 0; rank < world; ++rank) {
      const auto words = of_rank(rank).subspan(number * kWords, kWords);
      if (words[kEnd] > words[kBegin]) alike[{words[kBegin], words[kEnd]}].push_back(rank);
    }
    for (const auto& [range, members] : alike) {
      std::vector<std::int64_t> digests;
      for (const std::size_t rank : members) digests.push_back(of_rank(rank)[number * kWords + kDigest]);
      const OddRank found = find_odd_rank(digests);
      if (found.odd < 0) continue;
      const auto job = [&](int member) {
        return std::to_string(of_rank(members[static_cast<std::size_t>(member)]).back());
      };
      const ParamSpec& param = group.layout().params[static_cast<std::size_t>(pieces[number].param)];
      return param.name + ", " + pieces[number].state + "\n" + job(found.odd) + "\n" + job(found.usual) + "\n" +
             std::to_string(range.first) + " to " + std::to_string(range.second - 1);
    }
  }
  return "";
}

}  // namespace

void require_same_replicas(const ShardGroups& groups, bool after_messages, const Communicator& job, Kernels& kernels,
                           const Stream& stream) {
  std::string own;
  for (const auto& group : groups) {
    std::string found = difference_in(*group, after_messages, job.rank(), kernels, stream);
    if (own.empty()) own = std::move(found);
  }
  // Ranks of another group may have found nothing: all stop with the same error.
  std::vector<std::int64_t> finders(static_cast<std::size_t>(job.size()));
  const std::int64_t has_found = own.empty() ? 0 : 1;
  job.all_gather(std::span<const std::int64_t>(&has_found, 1), std::span(finders));
  const auto first = std::ranges::find(finders, 1);
  if (first == finders.end()) return;
  std::istringstream lines(broadcast_text(own, static_cast<int>(first - finders.begin()), job));
  std::vector<std::string> said(4);
  for (std::string& line : said) std::getline(lines, line);
  const std::string of = "/" + std::to_string(job.size());
  throw Error(
      ErrorCode::kMismatch, "a rank's copy differs from that of other ranks",
      {.where = "engine.replicas",
       .who = "rank " + said[1] + of,
       .which = said[0],
       .expected = "elements " + said[3] + " as on rank " + said[2] + of,
       .hint = "ranks were alike after the step before (zeroth.compare_replicas): look for writes to this rank's "
               "parameters or states, for other libraries or another processor there, and for damaged memory"});
}

}  // namespace zeroth
