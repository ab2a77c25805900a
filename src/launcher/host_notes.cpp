#include "launcher/host_notes.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <span>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kMostNamed = 4;
/// A flood of different notes must not be searched for ever, nor held.
constexpr std::size_t kMostNotes = 256;

std::string line_of(const std::string& text, const std::vector<std::string>& hosts) {
  if (hosts.size() == 1) return fmt::format("host {}: {}", hosts.front(), text);
  const std::size_t named = hosts.size() > kMostNamed + 1 ? kMostNamed : hosts.size();
  const std::string more = named < hosts.size() ? fmt::format(" and {} more", hosts.size() - named) : "";
  return fmt::format("hosts {}{}: {}", join(std::span(hosts).first(named), ", "), more, text);
}

}  // namespace

void HostNotes::add(const std::string& host, std::string_view text, TimePoint now) {
  waiting_.add(host, text, now + kNoteWindow);
}

std::vector<std::string> HostNotes::take(TimePoint now) {
  std::vector<std::string> lines;
  while (!waiting_.empty() && (waiting_.first().due <= now || waiting_.size() > kMostNotes)) {
    const auto note = waiting_.take_first();
    lines.push_back(line_of(note.text, note.by));
  }
  return lines;
}

}  // namespace zeroth::launcher
