// Where the ranks of this host read which ranks of the job have ended well (zeroth/base/ended_ranks.h).
#pragma once

#include "base/unique_fd.h"

#include <zeroth/base/ended_ranks.h>

#include <string>
#include <string_view>

namespace zeroth::launcher {

/// Memory of this process. Where the system gives none, ranks are told nothing.
class EndedBoard {
 public:
  EndedBoard(std::string_view job, int num_ranks);

  /// For ZEROTH_ENDED_RANKS; "" without memory. It can be opened while this process lives.
  [[nodiscard]] std::string path() const;
  void add(const EndedRank& rank) noexcept;

 private:
  void write(const std::string& text) noexcept;

  UniqueFd memory_;
};

}  // namespace zeroth::launcher
