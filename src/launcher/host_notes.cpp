#include "launcher/host_notes.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kMostNamed = 4;
/// A flood of different notes must not be searched for ever, nor held.
constexpr std::size_t kMostWaiting = 256;

std::string line_of(const std::string& text, const std::vector<std::string>& hosts) {
  if (hosts.size() == 1) return fmt::format("host {}: {}", hosts.front(), text);
  const std::size_t named = hosts.size() > kMostNamed + 1 ? kMostNamed : hosts.size();
  const std::string more = named < hosts.size() ? fmt::format(" and {} more", hosts.size() - named) : "";
  return fmt::format("hosts {}{}: {}", join(std::span(hosts).first(named), ", "), more, text);
}

}  // namespace

void HostNotes::add(const std::string& host, std::string_view text, TimePoint now) {
  // After everything that this host has said before: so its notes stay in order.
  auto from = waiting_.end();
  while (from != waiting_.begin() && std::ranges::find(std::prev(from)->hosts, host) == std::prev(from)->hosts.end()) --from;
  const auto same = std::find_if(from, waiting_.end(), [text](const Note& note) { return note.text == text; });
  if (same != waiting_.end()) {
    same->hosts.push_back(host);
    return;
  }
  waiting_.push_back({.text = std::string(text), .hosts = {host}, .due = now + kNoteWindow});
}

std::vector<std::string> HostNotes::take(TimePoint now) {
  std::vector<std::string> lines;
  for (; !waiting_.empty() && (waiting_.front().due <= now || waiting_.size() > kMostWaiting); waiting_.pop_front()) lines.push_back(line_of(waiting_.front().text, waiting_.front().hosts));
  return lines;
}

std::optional<HostNotes::TimePoint> HostNotes::next() const {
  return waiting_.empty() ? std::nullopt : std::optional(waiting_.front().due);
}

}  // namespace zeroth::launcher
