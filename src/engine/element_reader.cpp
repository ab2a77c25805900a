#include "engine/element_reader.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

namespace zeroth {

bool read_elements(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                   std::vector<detail::KnownFile>& files, std::span<std::byte> values) {
  struct Wanted {
    std::size_t file;
    std::uint64_t offset;
    std::size_t bytes;
    std::size_t at;
  };
  // Runs of all sources, by their first element.
  struct Known {
    Run run;
    const Source* source;
  };
  std::vector<Known> known;
  for (const Source& source : sources) {
    for (const Run& run : runs_of(source.entry.range)) known.push_back({run, &source});
  }
  std::ranges::sort(known, {}, [](const Known& one) { return one.run.logical; });
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

}  // namespace zeroth
