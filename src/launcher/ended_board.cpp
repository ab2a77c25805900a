#include "launcher/ended_board.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <exception>

namespace zeroth::launcher {

EndedBoard::EndedBoard(std::string_view job, int num_ranks) : memory_(::memfd_create("zeroth:ended", MFD_CLOEXEC)) {
  write(head_of_ended_ranks(job, num_ranks));
}

std::string EndedBoard::path() const {
  return memory_ ? fmt::format("/proc/{}/fd/{}", ::getpid(), memory_.get()) : "";
}

void EndedBoard::add(const EndedRank& rank) noexcept {
  try {
    write(line_of(rank));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no memory to say so; ranks wait until a deadline
  }
}

void EndedBoard::write(const std::string& text) noexcept {
  if (memory_) [[maybe_unused]]
    const ssize_t written = ::write(memory_.get(), text.data(), text.size());
}

}  // namespace zeroth::launcher
