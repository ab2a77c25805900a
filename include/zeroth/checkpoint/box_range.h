// BoxRange: which elements of a logical tensor a rank has. A value; nothing in it depends on flats, shards or padding.
//
// A parameter on a rank is a box of a logical tensor (ParamSpec::logical_shape). A rank's part of a state is a range of
// the box's elements, in their order in memory: a shard boundary may lie anywhere in a row.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace zeroth {

struct BoxRange {
  std::vector<std::int64_t> logical{};  ///< shape of the tensor; empty: a scalar
  std::vector<std::int64_t> offset{};   ///< of the box's first element, one entry a dimension
  std::vector<std::int64_t> shape{};    ///< of the box
  std::int64_t begin = 0;               ///< elements of the box, in `order`
  std::int64_t end = 0;
  /// Shape of the tensor where `logical` is another view of its elements: [h, 3 h], seen as [h, 3, h]. Empty:
  /// `logical`.
  std::vector<std::int64_t> viewed{};
  /// Dimensions of `logical`, the one with the largest stride first: [0, 2, 3, 1] of a channels-last image. Empty: row
  /// major.
  std::vector<int> order{};

  /// A range of a whole tensor.
  [[nodiscard]] static BoxRange of_whole(std::vector<std::int64_t> shape, std::int64_t begin, std::int64_t end);
  [[nodiscard]] std::int64_t size() const { return end - begin; }
  [[nodiscard]] const std::vector<std::int64_t>& tensor_shape() const { return viewed.empty() ? logical : viewed; }
  [[nodiscard]] std::int64_t logical_elements() const;
  /// The same elements of the tensor whose dimensions are in the order of the memory: row major there. What it says of
  /// `viewed` is lost.
  [[nodiscard]] BoxRange in_memory() const;
  /// The box lies in the tensor, the range in the box, `order` has each dimension once, and no product overflows.
  [[nodiscard]] bool is_valid() const;
  bool operator==(const BoxRange&) const = default;
};

/// Elements that lie one after the other both in the tensor and in the range.
struct Run {
  std::int64_t logical = 0;  ///< first element, counted in the tensor in the range's order of dimensions
  std::int64_t local = 0;    ///< the same element, counted from the begin of the range
  std::int64_t count = 0;
  bool operator==(const Run&) const = default;
};

/// The runs of a valid range, in order; as few as there can be, but for neighbours across rows.
[[nodiscard]] std::vector<Run> runs_of(const BoxRange& range);

}  // namespace zeroth
