#include "trace/trace.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace zeroth::trace {
namespace {

constexpr int kMostRanks = 1 << 20;

template <class T>
T field(const nlohmann::json& object, const char* name) {
  return object.at(name).get<T>();
}

/// By (group, sequence).
using Index = std::map<std::pair<std::string, std::uint64_t>, const Call*>;

bool is_wait(const Call& call) {
  return call.name == "wait";
}

std::string in_brackets(const std::string& about) {
  return about.empty() ? "" : " (" + about + ")";
}

Index index_of(const RankTrace& trace) {
  Index index;
  for (const Call& call : trace.calls) {
    if (!is_wait(call)) index.emplace(std::pair(call.group, call.sequence), &call);
  }
  return index;
}

std::int64_t median(std::vector<std::int64_t> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string list_of(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// What one group's calls with one number say.
void compare_call(const std::string& group, std::uint64_t sequence, const std::map<int, const Call*>& made,
                  const std::vector<int>& without, std::vector<std::string>& lines) {
  std::map<std::string, std::vector<int>> by_what;
  std::vector<int> open;
  for (const auto& [rank, call] : made) {
    by_what[call->what].push_back(rank);
    if (call->ended_ns == 0) open.push_back(rank);
  }
  const std::string& name = made.begin()->second->name;
  if (by_what.size() > 1) {
    std::vector<std::string> sides;
    for (const auto& [what, ranks] : by_what) sides.push_back(list_of(ranks) + ": " + what);
    lines.push_back(fmt::format("{}#{}: ranks make different calls. {}", group, sequence, fmt::join(sides, "; ")));
  } else if (!without.empty()) {
    std::vector<int> begun;
    for (const auto& [rank, call] : made) begun.push_back(rank);
    lines.push_back(fmt::format("{}#{}: {} ha{} begun {}, {} ha{} not", group, sequence, list_of(begun),
                                begun.size() == 1 ? "s" : "ve", made.begin()->second->what, list_of(without),
                                without.size() == 1 ? "s" : "ve"));
  } else if (!open.empty()) {
    lines.push_back(fmt::format("{}#{}: all ranks have begun {}, {} ha{} not ended it", group, sequence, name,
                                list_of(open), open.size() == 1 ? "s" : "ve"));
  }
}

}  // namespace

RankTrace parse(std::string_view text, const std::string& file) {
  RankTrace trace;
  nlohmann::json names = nlohmann::json::array();
  int number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    if (line.empty()) continue;
    try {
      const nlohmann::json object = nlohmann::json::parse(line);
      if (number == 1) {
        trace.rank = field<int>(object, "rank");
        trace.size = field<int>(object, "size");
        trace.host = field<std::string>(object, "host");
        trace.now_ns = field<std::int64_t>(object, "now_ns");
        names = object.value("names", names);
        ZR_CHECK(trace.size >= 1 && trace.size <= kMostRanks && trace.rank >= 0 && trace.rank < trace.size,
                 ErrorCode::kIo, "no such rank",
                 {.where = "trace", .which = file, .got = fmt::format("rank {} of {}", trace.rank, trace.size)});
        continue;
      }
      Call call{
          .group = field<std::string>(object, "group"),
          .sequence = field<std::uint64_t>(object, "sequence"),
          .what = {},
          .name = field<std::string>(object, "call"),
          .about = object.contains("about") ? names.at(field<std::size_t>(object, "about")).get<std::string>() : "",
          .begun_ns = field<std::int64_t>(object, "begun_ns"),
          .ended_ns = field<std::int64_t>(object, "ended_ns")};
      const auto given = object.value("name", std::string());  // of a barrier
      call.what =
          fmt::format("{}{} {} [{}] unit={} label={}{}", call.name, given.empty() ? "" : " \"" + given + "\"",
                      field<std::string>(object, "dtype"), field<std::int64_t>(object, "elements"),
                      field<int>(object, "unit"), field<std::uint32_t>(object, "label"), in_brackets(call.about));
      trace.calls.push_back(std::move(call));
    } catch (const nlohmann::json::exception& error) {
      throw Error(ErrorCode::kIo, "not a trace of a rank",
                  {.where = "trace",
                   .which = fmt::format("{}:{}", file, number),
                   .expected = "one JSON object a line, as World.write_trace() writes them",
                   .got = error.what()});
    }
  }
  ZR_CHECK(number > 0, ErrorCode::kIo, "the trace is empty", {.where = "trace", .which = file});
  return trace;
}

void align_clocks(std::vector<RankTrace>& ranks) {
  if (ranks.empty()) return;
  std::ranges::sort(ranks, {}, &RankTrace::rank);
  const Index reference = index_of(ranks.front());
  for (RankTrace& trace : ranks) {
    if (trace.host == ranks.front().host) continue;
    std::vector<std::int64_t> ahead;
    for (const auto& [key, call] : index_of(trace)) {
      const auto same = reference.find(key);
      if (same != reference.end() && call->ended_ns != 0 && same->second->ended_ns != 0)
        ahead.push_back(call->ended_ns - same->second->ended_ns);
    }
    if (ahead.empty()) continue;
    const std::int64_t offset = median(std::move(ahead));
    trace.now_ns -= offset;
    for (Call& call : trace.calls) {
      call.begun_ns -= offset;
      if (call.ended_ns != 0) call.ended_ns -= offset;
    }
  }
}

std::vector<std::string> differences(const std::vector<RankTrace>& ranks) {
  struct Seen {
    std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
    std::map<std::uint64_t, const Call*> calls{};
  };
  std::map<std::string, std::map<int, Seen>> groups;
  for (const RankTrace& trace : ranks) {
    for (const Call& call : trace.calls) {
      if (is_wait(call)) continue;  // each rank makes its own
      Seen& seen = groups[call.group][trace.rank];
      seen.oldest = std::min(seen.oldest, call.sequence);
      seen.calls.emplace(call.sequence, &call);
    }
  }
  std::vector<std::string> lines;
  for (const auto& [group, members] : groups) {
    std::uint64_t first = 0;  // everybody's ring still holds this one
    std::uint64_t last = 0;
    for (const auto& [rank, seen] : members) {
      first = std::max(first, seen.oldest);
      last = std::max(last, seen.calls.rbegin()->first);
    }
    for (std::uint64_t sequence = first; sequence <= last; ++sequence) {
      std::map<int, const Call*> made;
      std::vector<int> without;
      for (const auto& [rank, seen] : members) {
        const auto call = seen.calls.find(sequence);
        // Messages between two ranks carry numbers of their own.
        const bool between_two =
            call != seen.calls.end() && (call->second->name == "send" || call->second->name == "recv");
        if (between_two) continue;
        if (call == seen.calls.end()) {
          without.push_back(rank);
        } else {
          made.emplace(rank, call->second);
        }
      }
      const std::size_t before = lines.size();
      if (!made.empty()) compare_call(group, sequence, made, without, lines);
      if (lines.size() > before &&
          (made.empty() || !without.empty() || lines.back().find("different") != std::string::npos))
        break;
    }
  }
  return lines;
}

std::vector<std::string> draw(const std::vector<RankTrace>& ranks, double seconds, int columns) {
  std::int64_t end = std::numeric_limits<std::int64_t>::min();
  for (const RankTrace& trace : ranks) end = std::max(end, trace.now_ns);
  const auto span = static_cast<std::int64_t>(seconds * 1e9);
  const std::int64_t begin = end - span;
  const auto column_of = [&](std::int64_t time) {
    const double part = static_cast<double>(time - begin) / static_cast<double>(span);
    return std::clamp(static_cast<int>(part * columns), 0, columns - 1);
  };
  std::vector<std::string> lines;
  for (const RankTrace& trace : ranks) {
    std::string bar(static_cast<std::size_t>(columns), '.');
    const Call* open = nullptr;
    for (const Call& call : trace.calls) {
      const std::int64_t until = call.ended_ns == 0 ? end : call.ended_ns;
      if (call.ended_ns == 0) open = &call;
      if (until < begin) continue;
      for (int column = column_of(call.begun_ns); column <= column_of(until); ++column) {
        char& mark = bar[static_cast<std::size_t>(column)];
        if (call.ended_ns == 0) mark = '>';
        if (mark == '.') mark = '#';
      }
    }
    std::string text = "no call";
    if (open != nullptr) {
      text = fmt::format("in {}#{}{} of {} for {:.1f} s", open->name, open->sequence, in_brackets(open->about),
                         open->group, static_cast<double>(end - open->begun_ns) * 1e-9);
    } else if (!trace.calls.empty()) {
      const Call& last = trace.calls.back();
      text = fmt::format("last {}#{}{} of {}, {:.1f} s before", last.name, last.sequence, in_brackets(last.about),
                         last.group, static_cast<double>(end - last.ended_ns) * 1e-9);
    }
    lines.push_back(fmt::format("rank {:<4} |{}| {}", trace.rank, bar, text));
  }
  return lines;
}

}  // namespace zeroth::trace
