#include <zeroth/checkpoint/box_range.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace zeroth {
namespace {

/// Of all extents; -1 where it does not fit.
std::int64_t product(const std::vector<std::int64_t>& extents) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : extents) {
    if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements)) return -1;
  }
  return elements;
}

}  // namespace

BoxRange BoxRange::of_whole(std::vector<std::int64_t> shape, std::int64_t begin, std::int64_t end) {
  BoxRange range{.logical = shape, .offset = std::vector<std::int64_t>(shape.size(), 0), .begin = begin, .end = end};
  range.shape = std::move(shape);
  return range;
}

std::int64_t BoxRange::logical_elements() const {
  return product(logical);
}

BoxRange BoxRange::in_memory() const {
  if (order.empty()) return *this;
  BoxRange range{.begin = begin, .end = end};
  for (const int dim : order) {
    const auto at = static_cast<std::size_t>(dim);
    range.logical.push_back(logical[at]);
    range.offset.push_back(offset[at]);
    range.shape.push_back(shape[at]);
  }
  return range;
}

bool BoxRange::is_valid() const {
  if (offset.size() != logical.size() || shape.size() != logical.size()) return false;
  if (!order.empty()) {
    std::vector<int> dims(logical.size());
    std::iota(dims.begin(), dims.end(), 0);
    if (!std::ranges::is_permutation(order, dims)) return false;
  }
  for (std::size_t dim = 0; dim < logical.size(); ++dim) {
    if (shape[dim] < 0 || offset[dim] < 0 || shape[dim] > logical[dim] || offset[dim] > logical[dim] - shape[dim])
      return false;
  }
  if (!viewed.empty() && product(viewed) != product(logical)) return false;
  return product(logical) >= 0 && begin >= 0 && begin <= end && end <= product(shape);
}

std::vector<Run> runs_of(const BoxRange& range) {
  if (!range.order.empty()) return runs_of(range.in_memory());
  std::vector<Run> runs;
  if (range.size() == 0) return runs;
  // Rows of the box: the last dimensions that it has whole, and the one before them.
  std::size_t first_whole = range.shape.size();
  std::int64_t inner = 1;  // elements of what is whole
  while (first_whole > 0 && range.shape[first_whole - 1] == range.logical[first_whole - 1]) {
    --first_whole;
    inner *= range.shape[first_whole];
  }
  if (first_whole == 0) return {{.logical = range.begin, .local = 0, .count = range.size()}};
  const std::size_t cut = first_whole - 1;  // the innermost dimension of which the box has a part
  const std::int64_t row = range.shape[cut] * inner;
  std::vector<std::int64_t> strides(cut + 1);  // of the tensor, in elements
  strides[cut] = inner;
  for (std::size_t dim = cut; dim-- > 0;) strides[dim] = strides[dim + 1] * range.logical[dim + 1];
  for (std::int64_t at = range.begin; at < range.end;) {
    const std::int64_t in_row = at % row;
    const std::int64_t count = std::min(range.end - at, row - in_row);
    std::int64_t rest = at / row;
    std::int64_t logical = range.offset[cut] * inner + in_row;
    for (std::size_t dim = cut; dim-- > 0;) {
      logical += (range.offset[dim] + rest % range.shape[dim]) * strides[dim];
      rest /= range.shape[dim];
    }
    runs.push_back({.logical = logical, .local = at - range.begin, .count = count});
    at += count;
  }
  return runs;
}

}  // namespace zeroth
