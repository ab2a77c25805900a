#include "launcher/line_splitter.h"

#include "launcher/error_line.h"

#include <zeroth/base/preemption.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kMaxErrorLine = 1000;
constexpr std::size_t kMaxLastLine = 300;

/// Position of the first CR or LF. Two memchr are several times faster than find_first_of.
std::size_t find_line_end(std::string_view bytes) {
  const std::size_t feed = bytes.find('\n');
  const std::size_t carriage = bytes.substr(0, feed).find('\r');
  return carriage != std::string_view::npos ? carriage : feed;
}

/// Without its end, and printable.
void keep(std::string_view line, std::string& into) {
  while (line.ends_with('\n') || line.ends_with('\r')) line.remove_suffix(1);
  into.assign(line);
  std::ranges::replace_if(into, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, '?');
}

}  // namespace

void LineSplitter::feed(std::string_view bytes, std::string& out) {
  if (style_.pass_through) {
    out += bytes;
  }
  while (!bytes.empty()) {
    if (!pending_.empty() && pending_.back() == '\r') {
      if (bytes.front() == '\n') {
        pending_ += '\n';
        bytes.remove_prefix(1);
      }
      emit(out);
      continue;
    }
    const std::size_t end = find_line_end(bytes);
    const std::size_t room = kMaxLineBytes - pending_.size();
    const std::size_t content = std::min(end, bytes.size());
    if (content > room) {
      pending_ += bytes.substr(0, room);
      bytes.remove_prefix(room);
      emit(out);
      continue;
    }
    const std::size_t taken = end == std::string_view::npos ? bytes.size() : end + 1;
    pending_ += bytes.substr(0, taken);
    bytes.remove_prefix(taken);
    if (pending_.back() == '\n') {
      emit(out);
    }
  }
}

void LineSplitter::finish(std::string& out) {
  if (!pending_.empty()) {
    emit(out);
  }
}

void LineSplitter::emit(std::string& out) {
  if (!style_.pass_through) {
    if (pending_.back() != '\n' && pending_.back() != '\r') {
      pending_ += '\n';
    }
    if (style_.taker) {
      style_.taker(pending_);
    } else {
      out += style_.prefix;
      out += pending_;
    }
  }
  makes_room_ = makes_room_ || pending_.find(kMakesRoom) != std::string::npos;
  if (const std::optional<ErrorMark> mark = find_error_mark(pending_)) {
    keep(std::string_view(pending_).substr(mark->begin, kMaxErrorLine), last_error_line_);
  }
  if (const std::size_t begin = pending_.find_first_not_of(" \t\r\n"); begin != std::string::npos)
    keep(std::string_view(pending_).substr(begin, kMaxLastLine), last_line_);
  pending_.clear();
}

}  // namespace zeroth::launcher
