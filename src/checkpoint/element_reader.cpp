#include "checkpoint/element_reader.h"

#include <algorithm>
#include <utility>

namespace zeroth::detail {
namespace {

struct Known {
  Run run;
  const Source* source;
};

/// Runs of all sources, by their first element.
std::vector<Known> known_runs(const std::vector<Source>& sources) {
  std::vector<Known> known;
  for (const Source& source : sources) {
    for (const Run& run : runs_of(source.entry.range)) known.push_back({run, &source});
  }
  std::ranges::sort(known, {}, [](const Known& one) { return one.run.logical; });
  return known;
}

}  // namespace

bool read_elements(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                   std::vector<KnownFile>& files, std::span<std::byte> values) {
  struct Wanted {
    std::size_t file;
    std::uint64_t offset;
    std::size_t bytes;
    std::size_t at;
  };
  const std::vector<Known> known = known_runs(sources);
  std::vector<Wanted> wanted;
  for (const Run& run : runs_of(has)) {
    std::int64_t next = run.logical;
    const std::int64_t end = run.logical + run.count;
    auto at = std::ranges::upper_bound(known, next, {}, [](const Known& one) { return one.run.logical; });
    if (at != known.begin()) --at;
    for (; next < end; ++at) {
      while (at != known.end() && at->run.logical + at->run.count <= next) ++at;
      if (at == known.end() || at->run.logical > next) return false;
      const std::int64_t count = std::min(end, at->run.logical + at->run.count) - next;
      const std::int64_t in_source = at->run.local + (next - at->run.logical);
      wanted.push_back({.file = at->source->file,
                        .offset = at->source->entry.begin + static_cast<std::uint64_t>(in_source) * element,
                        .bytes = static_cast<std::size_t>(count) * element,
                        .at = static_cast<std::size_t>(run.local + (next - run.logical)) * element});
      next += count;
    }
  }
  std::ranges::sort(wanted, {}, [](const Wanted& one) { return std::pair(one.file, one.offset); });
  for (const Wanted& one : wanted) files[one.file].read(one.offset, values.subspan(one.at, one.bytes));
  return true;
}

Coverage coverage_of(std::int64_t elements, const std::vector<Source>& sources) {
  Coverage coverage;
  const auto lacks = [&coverage](std::int64_t from, std::int64_t to) {
    if (to <= from) return;
    if (coverage.missing == 0) coverage.first_missing = from;
    coverage.missing += to - from;
  };
  std::int64_t next = 0;
  for (const Known& one : known_runs(sources)) {
    const std::int64_t end = one.run.logical + one.run.count;
    lacks(next, one.run.logical);
    if (const std::int64_t again = std::min(end, next) - one.run.logical; again > 0) {
      if (coverage.twice == 0) coverage.first_twice = one.run.logical;
      coverage.twice += again;
    }
    next = std::max(next, end);
  }
  lacks(next, elements);
  return coverage;
}

}  // namespace zeroth::detail
