#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>
#include <zeroth/shard/degrees.h>
#include <zeroth/shard/flat_layout.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace zeroth {
namespace {

std::int64_t align_elements(std::int64_t offset, DType dtype) {
  const auto grain = static_cast<std::int64_t>(kSegmentAlignBytes / size_of(dtype));
  return (offset + grain - 1) / grain * grain;
}

/// No address space holds more; far below what would overflow in sums of lengths and bytes.
constexpr std::int64_t kMost = std::int64_t{1} << 48U;

void check_shape(const ParamSpec& param) {
  std::int64_t numel = 1;
  for (const std::int64_t extent : param.shape) {
    ZR_CHECK(extent >= 0, ErrorCode::kModel, "a parameter has a negative extent", {.which = param.name});
    ZR_CHECK(extent <= kMost && (extent == 0 || numel <= kMost / extent), ErrorCode::kModel,
             "a parameter has more elements than can be addressed", {.which = param.name});
    numel *= extent;
  }
  ZR_CHECK(!param.trainable || is_trained(param.dtype), ErrorCode::kModel,
           "trainable parameters must be float64, float32 or bfloat16",
           {.which = param.name, .got = std::string(name_of(param.dtype))});
  ZR_CHECK(std::isfinite(param.grad_factor), ErrorCode::kModel, "the gradient factor of a parameter is not finite",
           {.which = param.name, .got = std::to_string(param.grad_factor)});
}

/// Of 16 bits, their gradients may come wide where those of matrices do not (decision 0012). Where matrices travel in
/// codes, vectors do not.
bool is_separate_vector(const ParamSpec& param) {
  return param.shape.size() < 2 && (param.separate || accumulation_dtype(param.dtype) != param.dtype);
}

}  // namespace

std::vector<std::int64_t> FlatLayout::counts() const {
  std::vector<std::int64_t> result;
  for (int rank = 0; rank < world(); ++rank) result.push_back(shard(rank).size());
  return result;
}

std::vector<std::int64_t> shard_boundaries(std::int64_t length, std::span<const int> pieces, int rotate) {
  const int world = static_cast<int>(pieces.size());
  ZR_ASSERT(world >= 1 && length >= 0, "shards of what is there, for somebody");
  const std::int64_t blocks = (length + kBlockElements - 1) / kBlockElements;
  const std::int64_t base = blocks / world;
  const std::int64_t odd = blocks % world;
  std::vector<std::int64_t> blocks_of(pieces.size());
  for (int rank = 0; rank < world; ++rank) {
    const std::int64_t turn = ((rank - rotate) % world + world) % world;
    blocks_of[static_cast<std::size_t>(pieces[static_cast<std::size_t>(rank)])] = base + (turn < odd ? 1 : 0);
  }
  std::vector<std::int64_t> boundaries{0};
  for (const std::int64_t count : blocks_of)
    boundaries.push_back(std::min(boundaries.back() + count * kBlockElements, length));
  return boundaries;
}

std::vector<FlatLayout> make_flat_layouts(std::span<const ParamSpec> params, const UnitSpec& unit, int unit_index,
                                          int world, std::span<const int> degrees) {
  const std::vector<int> pieces = pieces_of_ranks(world, degrees);
  std::vector<FlatLayout> layouts;
  for (const int index : unit.params) {
    const ParamSpec& param = params[static_cast<std::size_t>(index)];
    check_shape(param);
    const bool vectors = is_separate_vector(param);
    auto found = std::find_if(layouts.begin(), layouts.end(), [&](const FlatLayout& layout) {
      return layout.dtype == param.dtype && layout.vectors == vectors && layout.trainable == param.trainable &&
             layout.grad_factor == param.grad_factor;
    });
    if (found == layouts.end()) {
      layouts.push_back({.unit = unit_index,
                         .dtype = param.dtype,
                         .vectors = vectors,
                         .trainable = param.trainable,
                         .grad_factor = param.grad_factor});
      found = layouts.end() - 1;
    }
    const std::int64_t offset = align_elements(found->length, param.dtype);
    found->segments.push_back({index, offset, param.numel()});
    found->length = offset + param.numel();
    ZR_CHECK(found->length <= kMost, ErrorCode::kModel, "a unit has more elements than can be addressed",
             {.which = unit.name, .got = param.name + " and those before it"});
  }
  for (FlatLayout& layout : layouts) {
    layout.length = align_elements(layout.length, layout.dtype);
    layout.boundaries = shard_boundaries(layout.length, pieces, unit_index);
    layout.pieces = pieces;
  }
  return layouts;
}

Range intersect(const Range& one, const Range& other) {
  const std::int64_t begin = std::max(one.begin, other.begin);
  const std::int64_t end = std::min(one.end, other.end);
  return begin < end ? Range{begin, end} : Range{begin, begin};
}

}  // namespace zeroth
