#include <zeroth/base/error.h>
#include <zeroth/base/platform.h>
#include <zeroth/shard/flat_layout.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth {
namespace {

/// Of ranks that have the pieces in their own order.
std::vector<std::int64_t> boundaries_of(std::int64_t length, int world, int rotate) {
  std::vector<int> pieces(static_cast<std::size_t>(world));
  std::iota(pieces.begin(), pieces.end(), 0);
  return shard_boundaries(length, pieces, rotate);
}

constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat64};

struct Model {
  std::vector<ParamSpec> params;
  UnitSpec unit;
};

Model any_model(bool mixed) {
  Model model;
  const auto count = *rc::gen::inRange(0, 12);
  for (int index = 0; index < count; ++index) {
    ParamSpec param;
    param.name = "p" + std::to_string(index);
    // Scalars, empty ones, odd ones, and some of many blocks.
    param.shape = *rc::gen::container<std::vector<std::int64_t>>(
        *rc::gen::inRange<std::size_t>(0, 4), rc::gen::element<std::int64_t>(0, 1, 2, 3, 7, 16, 31, 33));
    if (mixed) {
      param.dtype = kFloats[*rc::gen::inRange<std::size_t>(0, 3)];
      param.trainable = *rc::gen::inRange(0, 4) != 0;
      param.grad_factor = *rc::gen::element(1.0, 0.25);
    }
    model.params.push_back(param);
    model.unit.params.push_back(index);
  }
  std::shuffle(model.unit.params.begin(), model.unit.params.end(), std::mt19937(*rc::gen::arbitrary<unsigned>()));
  return model;
}

void check_segments(const Model& model, const FlatLayout& layout) {
  std::int64_t end = 0;
  for (const Segment& segment : layout.segments) {
    const ParamSpec& param = model.params[static_cast<std::size_t>(segment.param)];
    RC_ASSERT(segment.numel == param.numel());
    RC_ASSERT(segment.offset * static_cast<std::int64_t>(size_of(layout.dtype)) % 64 == 0);
    RC_ASSERT(segment.offset >= end);      // disjoint, in order
    RC_ASSERT(segment.offset - end < 32);  // and no more padding than alignment asks for
    end = segment.offset + segment.numel;
    RC_ASSERT(layout.vectors == (param.dtype == DType::kBFloat16 && param.shape.size() <= 1));
    RC_ASSERT(param.dtype == layout.dtype && param.trainable == layout.trainable &&
              param.grad_factor == layout.grad_factor);
  }
  RC_ASSERT(layout.length >= end);
  RC_ASSERT(layout.length - end < 32);
  RC_ASSERT(layout.bytes() % kSegmentAlignBytes == 0);
  RC_ASSERT(layout.bytes() == static_cast<std::size_t>(layout.length) * size_of(layout.dtype));
}

RC_GTEST_PROP(FlatLayoutProperty, SegmentsAreDisjointAlignedAndCoverEveryParameterOnce, ()) {
  const Model model = any_model(true);
  const auto world = *rc::gen::inRange(1, 9);
  const auto layouts = make_flat_layouts(model.params, model.unit, 3, world);
  std::multiset<int> covered;
  std::set<std::tuple<DType, bool, bool, double>> kinds;
  for (const FlatLayout& layout : layouts) {
    check_segments(model, layout);
    RC_ASSERT(layout.unit == 3);
    RC_ASSERT(layout.world() == world);
    RC_ASSERT(!layout.segments.empty());
    RC_ASSERT(kinds.insert({layout.dtype, layout.vectors, layout.trainable, layout.grad_factor}).second);
    for (const Segment& segment : layout.segments) covered.insert(segment.param);
  }
  RC_ASSERT(covered == std::multiset<int>(model.unit.params.begin(), model.unit.params.end()));
}

RC_GTEST_PROP(FlatLayoutProperty, OffsetsDoNotDependOnTheWorldOrTheUnitsNumber, ()) {
  const Model model = any_model(true);
  const auto one = make_flat_layouts(model.params, model.unit, 0, 1);
  const auto many = make_flat_layouts(model.params, model.unit, *rc::gen::inRange(0, 50), *rc::gen::inRange(1, 70));
  RC_ASSERT(one.size() == many.size());
  for (std::size_t index = 0; index < one.size(); ++index) {
    RC_ASSERT(one[index].segments == many[index].segments);
    RC_ASSERT(one[index].length == many[index].length);
  }
}

RC_GTEST_PROP(ShardBoundariesProperty, AreBalancedBlocksThatSumUpAndOnlyTheLastIsShort, ()) {
  const auto length = *rc::gen::inRange<std::int64_t>(0, 5000 * kBlockElements);
  const auto world = *rc::gen::inRange(1, 130);
  const auto rotate = *rc::gen::inRange(-300, 300);
  const auto boundaries = boundaries_of(length, world, rotate);
  RC_ASSERT(boundaries.size() == static_cast<std::size_t>(world) + 1);
  RC_ASSERT(boundaries.front() == 0);
  RC_ASSERT(boundaries.back() == length);
  std::int64_t least = length;
  std::int64_t most = 0;
  for (std::size_t rank = 0; rank + 1 < boundaries.size(); ++rank) {
    RC_ASSERT(boundaries[rank] % kBlockElements == 0 || boundaries[rank] == length);
    RC_ASSERT(boundaries[rank] <= boundaries[rank + 1]);
    const std::int64_t blocks = (boundaries[rank + 1] - boundaries[rank] + kBlockElements - 1) / kBlockElements;
    least = std::min(least, blocks);
    most = std::max(most, blocks);
  }
  RC_ASSERT(most - least <= 1);
}

RC_GTEST_PROP(ShardBoundariesProperty, RotationSpreadsOddBlocksOverAllRanks, ()) {
  const auto world = *rc::gen::inRange(1, 20);
  const auto blocks = *rc::gen::inRange<std::int64_t>(0, 200);
  std::vector<std::int64_t> sums(static_cast<std::size_t>(world), 0);
  for (int rotate = 0; rotate < world; ++rotate) {
    const auto boundaries = boundaries_of(blocks * kBlockElements, world, rotate);
    for (std::size_t rank = 0; rank < sums.size(); ++rank) sums[rank] += boundaries[rank + 1] - boundaries[rank];
  }
  for (const std::int64_t sum : sums) RC_ASSERT(sum == blocks * kBlockElements);
}

RC_GTEST_PROP(IntersectProperty, PartsOfASegmentOverAllShardsAreTheSegment, ()) {
  const Model model = any_model(false);
  const auto world = *rc::gen::inRange(1, 9);
  for (const FlatLayout& layout : make_flat_layouts(model.params, model.unit, 1, world)) {
    const auto counts = layout.counts();
    RC_ASSERT(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == layout.length);
    for (const Segment& segment : layout.segments) {
      std::int64_t next = segment.offset;
      for (int rank = 0; rank < world; ++rank) {
        const Range part = intersect(segment.range(), layout.shard(rank));
        RC_ASSERT(part.size() >= 0);
        if (part.size() == 0) continue;
        RC_ASSERT(part.begin == next);
        next = part.end;
      }
      RC_ASSERT(next == segment.offset + segment.numel);
    }
  }
}

TEST(FlatLayout, GroupsInOrderOfFirstAppearance) {
  const std::vector<ParamSpec> params{{.name = "w", .shape = {5}, .dtype = DType::kBFloat16},
                                      {.name = "frozen", .shape = {5}, .dtype = DType::kBFloat16, .trainable = false},
                                      {.name = "norm", .shape = {3}},
                                      {.name = "b", .shape = {40}, .dtype = DType::kBFloat16},
                                      {.name = "expert", .shape = {3}, .grad_factor = 0.5},
                                      {.name = "matrix", .shape = {5, 1}, .dtype = DType::kBFloat16},
                                      {.name = "same dtype as norm", .shape = {1, 1}}};
  const auto layouts = make_flat_layouts(params, {.name = "u", .params = {0, 1, 2, 3, 4, 5, 6}}, 0, 2);
  ASSERT_EQ(layouts.size(), 5U);
  EXPECT_EQ(layouts[0].segments, (std::vector<Segment>{{0, 0, 5}, {3, 32, 40}}));
  EXPECT_FALSE(layouts[1].trainable);
  EXPECT_TRUE(layouts[0].vectors && layouts[1].vectors);
  EXPECT_EQ(layouts[2].segments, (std::vector<Segment>{{2, 0, 3}, {6, 16, 1}})) << "32 bits: one flat for all shapes";
  EXPECT_FALSE(layouts[2].vectors);
  EXPECT_EQ(layouts[3].grad_factor, 0.5);
  EXPECT_EQ(layouts[4].segments, (std::vector<Segment>{{5, 0, 5}})) << "two dimensions, whatever their extents";
  EXPECT_FALSE(layouts[4].vectors);
  EXPECT_EQ(layouts[0].accumulation(), DType::kFloat32);
  EXPECT_EQ(layouts[0].length, 96);  // 72 elements, in units of 64 bytes
  EXPECT_EQ(layouts[0].accumulation_bytes(), 384U);
}

TEST(FlatLayout, ScalarsAndEmptyParametersHaveTheirPlace) {
  const std::vector<ParamSpec> params{
      {.name = "scalar", .shape = {}}, {.name = "empty", .shape = {3, 0, 5}}, {.name = "last", .shape = {1}}};
  const auto layouts = make_flat_layouts(params, {.name = "u", .params = {0, 1, 2}}, 0, 3);
  ASSERT_EQ(layouts.size(), 1U);
  EXPECT_EQ(layouts[0].segments, (std::vector<Segment>{{0, 0, 1}, {1, 16, 0}, {2, 16, 1}}));
  EXPECT_EQ(layouts[0].length, 32);
  EXPECT_EQ(layouts[0].counts(), (std::vector<std::int64_t>{32, 0, 0}));
}

TEST(FlatLayout, OnlyEmptyParametersGiveAnEmptyLayout) {
  const std::vector<ParamSpec> params{{.name = "empty", .shape = {0}}};
  const auto layouts = make_flat_layouts(params, {.name = "u", .params = {0}}, 5, 2);
  ASSERT_EQ(layouts.size(), 1U);
  EXPECT_EQ(layouts[0].length, 0);
  EXPECT_EQ(layouts[0].counts(), (std::vector<std::int64_t>{0, 0}));
  EXPECT_TRUE(make_flat_layouts(params, {.name = "nothing"}, 0, 2).empty());
}

TEST(FlatLayout, RefusesShapesThatCannotBe) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 40U;
  const std::vector<std::vector<std::int64_t>> shapes{{-1},
                                                      {3, -5},
                                                      {kLarge, kLarge},
                                                      {kLarge, kLarge, 0},
                                                      {std::numeric_limits<std::int64_t>::max()},
                                                      {std::numeric_limits<std::int64_t>::min()},
                                                      {std::int64_t{1} << 32U, std::int64_t{1} << 32U},
                                                      {(std::int64_t{1} << 48U) + 1}};
  for (const auto& shape : shapes) {
    const std::vector<ParamSpec> params{{.name = "absurd", .shape = shape}};
    try {
      (void)make_flat_layouts(params, {.name = "u", .params = {0}}, 0, 2);
      ADD_FAILURE() << shape[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kModel);
      EXPECT_EQ(error.context().which, "absurd");
    }
  }
}

TEST(FlatLayout, RefusesManyLargeParametersThatOverflowTogether) {
  std::vector<ParamSpec> params;
  UnitSpec unit{.name = "too large"};
  for (int index = 0; index < 40; ++index) {
    params.push_back({.name = std::to_string(index), .shape = {std::int64_t{1} << 47U}});
    unit.params.push_back(index);
  }
  try {
    (void)make_flat_layouts(params, unit, 0, 2);
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kModel);
    EXPECT_EQ(error.context().which, "too large");
  }
}

TEST(FlatLayout, RefusesIntegersAndFactorsThatAreNotFinite) {
  for (const ParamSpec& param : {ParamSpec{.name = "ids", .shape = {2}, .dtype = DType::kInt64},
                                 ParamSpec{.name = "nan", .shape = {2}, .grad_factor = std::nan("")},
                                 ParamSpec{.name = "inf", .shape = {2}, .grad_factor = INFINITY}}) {
    try {
      (void)make_flat_layouts(std::vector{param}, {.name = "u", .params = {0}}, 0, 1);
      ADD_FAILURE() << param.name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kModel);
      EXPECT_EQ(error.context().which, param.name);
    }
  }
}

TEST(ShardBoundaries, TheShortBlockGoesToWhoHasTheLast) {
  EXPECT_EQ(boundaries_of(kBlockElements + 16, 2, 0),
            (std::vector<std::int64_t>{0, kBlockElements, kBlockElements + 16}));
  EXPECT_EQ(boundaries_of(16, 3, 1), (std::vector<std::int64_t>{0, 0, 16, 16}));
}

TEST(ShardBoundaries, RefusesNobodyAndLessThanNothing) {
  EXPECT_THROW((void)boundaries_of(-1, 2, 0), Error);
  EXPECT_THROW((void)boundaries_of(kBlockElements, 0, 0), Error);
}

TEST(ShardBoundaries, KnownTable) {
  const auto blocks = [](std::int64_t count, int world, int rotate) {
    auto boundaries = boundaries_of(count * kBlockElements, world, rotate);
    for (std::int64_t& boundary : boundaries) boundary /= kBlockElements;
    return boundaries;
  };
  EXPECT_EQ(blocks(11, 3, 0), (std::vector<std::int64_t>{0, 4, 8, 11}));
  EXPECT_EQ(blocks(11, 3, 1), (std::vector<std::int64_t>{0, 3, 7, 11}));
  EXPECT_EQ(blocks(1, 3, 2), (std::vector<std::int64_t>{0, 0, 0, 1}));
  EXPECT_EQ(blocks(0, 2, 0), (std::vector<std::int64_t>{0, 0, 0}));
}

}  // namespace
}  // namespace zeroth
