#include "checkpoint/element_reader.h"

#include <algorithm>
#include <cstring>
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

constexpr std::size_t kSlabBytes = std::size_t{1} << 20U;

/// Where elements lie that are counted in a box, in its order, or in its tensor, row major.
class Places {
 public:
  explicit Places(const BoxRange& range)
      : range_(range), in_tensor_(range.logical.size()), in_box_(range.shape.size()) {
    std::int64_t of_tensor = 1;
    for (std::size_t dim = range.logical.size(); dim-- > 0;) {
      in_tensor_[dim] = of_tensor;
      of_tensor *= range.logical[dim];
    }
    std::int64_t of_box = 1;
    for (std::size_t at = range.shape.size(); at-- > 0;) {
      const std::size_t dim = range.order.empty() ? at : static_cast<std::size_t>(range.order[at]);
      in_box_[dim] = of_box;
      of_box *= range.shape[dim];
    }
  }

  /// Of an element of the box.
  [[nodiscard]] std::int64_t in_tensor(std::int64_t of_box) const {
    std::int64_t place = 0;
    for (std::size_t dim = 0; dim < in_box_.size(); ++dim)
      place += (range_.offset[dim] + of_box / in_box_[dim] % range_.shape[dim]) * in_tensor_[dim];
    return place;
  }

  /// Of an element of the tensor; -1 if it is not in the range.
  [[nodiscard]] std::int64_t in_range(std::int64_t of_tensor) const {
    std::int64_t place = 0;
    for (std::size_t dim = 0; dim < in_tensor_.size(); ++dim) {
      const std::int64_t index = of_tensor / in_tensor_[dim] % range_.logical[dim] - range_.offset[dim];
      if (index < 0 || index >= range_.shape[dim]) return -1;
      place += index * in_box_[dim];
    }
    return place >= range_.begin && place < range_.end ? place - range_.begin : -1;
  }

 private:
  const BoxRange& range_;
  std::vector<std::int64_t> in_tensor_;  ///< steps between indices of a dimension
  std::vector<std::int64_t> in_box_;
};

/// As read_elements(), from ranges in another order: each element by itself. Reads all of the sources.
bool read_reordered(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                    std::vector<KnownFile>& files, std::span<std::byte> values) {
  const Places wanted(has);
  std::vector<bool> known(static_cast<std::size_t>(has.size()), false);
  std::int64_t found = 0;
  std::vector<std::byte> slab(kSlabBytes / element * element);
  for (const Source& source : sources) {
    const BoxRange& range = source.entry.range;
    const Places places(range);
    const auto most = static_cast<std::int64_t>(slab.size() / element);
    for (std::int64_t begin = range.begin; begin < range.end && found < has.size(); begin += most) {
      const std::int64_t count = std::min(most, range.end - begin);
      files[source.file].read(source.entry.begin + static_cast<std::uint64_t>(begin - range.begin) * element,
                              std::span(slab).first(static_cast<std::size_t>(count) * element));
      for (std::int64_t at = 0; at < count; ++at) {
        const std::int64_t place = wanted.in_range(places.in_tensor(begin + at));
        if (place < 0) continue;
        std::memcpy(values.data() + static_cast<std::size_t>(place) * element,
                    slab.data() + static_cast<std::size_t>(at) * element, element);
        if (!known[static_cast<std::size_t>(place)]) ++found;
        known[static_cast<std::size_t>(place)] = true;
      }
    }
  }
  return found == has.size();
}

}  // namespace

bool read_elements(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                   std::vector<KnownFile>& files, std::span<std::byte> values) {
  const bool in_order =
      std::ranges::all_of(sources, [&has](const Source& source) { return source.entry.range.order == has.order; });
  if (!in_order) return read_reordered(has, element, sources, files, values);
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
