// RankMark: a rank's word in the folder of a save that it has written its file, for the rank that commits.
//
// [Note: Marks] Files of a save that runs behind the training are written by threads, which make no calls between
// ranks. What they tell each other is in the folder that they write to. A rank makes "rank-00003.mark" and locks it
// before anybody writes; when its file is on the disk it writes what it has done there, and unlocks it. The lock goes
// with the process. So a mark without a lock and without a whole text is of a rank that died.
#pragma once

#include <string>

namespace zeroth::detail {

/// "rank-00003.mark".
[[nodiscard]] std::string rank_mark_name(int rank);

class RankMark {
 public:
  /// Makes and locks it. Throws kIo.
  RankMark(const std::string& folder, int rank);
  RankMark(const RankMark&) = delete;
  RankMark& operator=(const RankMark&) = delete;
  /// A mark that was not told is that of a rank that died.
  ~RankMark();

  /// Writes a text and unlocks. False, and still locked, if it could not be written; there is always room for a text of
  /// 4,000 bytes.
  [[nodiscard]] bool tell(const std::string& text) noexcept;

 private:
  int fd_ = -1;
};

/// What can be seen of another rank's mark.
struct SeenMark {
  bool locked = false;  ///< its rank lives and writes
  std::string text{};   ///< "" if it is locked, or its rank has ended without a word
};

/// Never blocks. A mark that cannot be read is one without a lock and a text.
[[nodiscard]] SeenMark look_at_mark(const std::string& folder, int rank);

/// The rank that makes and commits the temporary folder of a save holds its lock. Never blocks.
enum class Committer { kWorks, kDied, kEnded };
/// kEnded: there is no such folder any more, because it was committed or removed.
[[nodiscard]] Committer look_at_committer(const std::string& folder);

}  // namespace zeroth::detail
