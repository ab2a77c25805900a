#include "random_model.h"

#include <zeroth/base/error.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/state_table.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace zeroth {
namespace {

const std::vector<StateDeclaration> kEveryShape{
    {.name = "moment"},
    {.name = "of rows", .shape = StateShape::kRow, .initial = 1.0},
    {.name = "of tensors", .shape = StateShape::kTensor},
    {.name = "error", .shape = StateShape::kRank, .dtype = DType::kBFloat16},
    {.name = "bytes", .dtype = DType::kUInt8},
    {.name = "sixth"}};

TEST(StateTable, OneDecisionForMasters) {
  EXPECT_EQ(master_of(DType::kFloat32), Master::kNone);
  EXPECT_EQ(master_of(DType::kFloat64), Master::kNone);
  EXPECT_EQ(master_of(DType::kBFloat16), Master::kLowerHalf);
  EXPECT_EQ(master_of(DType::kFloat16), Master::kWhole);
}

TEST(StateTable, RowsSayWhatLiesWhere) {
  const ModelLayout model = make_model_layout({{.name = "w", .shape = {64, 32}, .dtype = DType::kBFloat16},
                                               {.name = "frozen", .shape = {64}, .trainable = false}},
                                              {{.name = "root", .params = {0, 1}}}, 2);
  const std::vector<StateRow> rows = state_table(model, zero_plan(3, {"dp"}), 1, kEveryShape, 1);
  std::vector<std::string> names;
  for (const StateRow& row : rows) names.push_back(row.name);
  EXPECT_EQ(names, (std::vector<std::string>{"parameter", "master", "moment", "of rows", "of tensors", "error", "bytes",
                                             "sixth", "parameter"}));
  EXPECT_TRUE(rows[0].shared && rows[0].placement() == Placement::kFlat);
  EXPECT_EQ(rows[0].range, (Range{1024, 2048}));
  EXPECT_EQ(rows[1].bytes(), 2U * 1024);
  EXPECT_EQ(rows[2].dtype, DType::kFloat32);
  EXPECT_EQ(rows[3].entries, 32);
  EXPECT_EQ(rows[4].entries, 1);
  EXPECT_EQ(rows[4].bytes(), 64U);
  EXPECT_EQ(rows[5].range, (Range{0, 2048})) << "every rank has its own of all elements";
  EXPECT_EQ(rows[6].bytes(), 1024U);
}

RC_GTEST_PROP(StateTableProperty, EntriesAreThoseOfTheElementsOfARank, ()) {
  const auto random = test::any_model();
  const auto world = *rc::gen::inRange(1, 6);
  const auto rank = *rc::gen::inRange(0, world);
  const ShardingPlan plan = test::any_plan();
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  for (const StateRow& row : state_table(model, plan, rank, kEveryShape, 1)) {
    if (row.shape == StateShape::kElement || row.shape == StateShape::kRank) {
      RC_ASSERT(row.entries == row.range.size());
      continue;
    }
    // Slowly: an entry for each (parameter, row) of which the rank has an element, in the order of the elements.
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> seen;
    for (const Segment& segment : model.flat(row.flat).segments) {
      const Range part = intersect(segment.range(), row.range);
      const ParamSpec& param = model.params[static_cast<std::size_t>(segment.param)];
      for (std::int64_t element = part.begin; element < part.end; ++element) {
        const std::int64_t in_row =
            row.shape == StateShape::kTensor ? 0 : (element - segment.offset) / row_length(param);
        const auto [entry, _] = seen.try_emplace({segment.offset, in_row}, static_cast<std::int64_t>(seen.size()));
        RC_ASSERT(entry_of(model, row, element) == entry->second);
      }
    }
    RC_ASSERT(row.entries == static_cast<std::int64_t>(seen.size()));
  }
}

RC_GTEST_PROP(StateTableProperty, ThePlanIsTheSumOfItsRows, ()) {
  const auto random = test::any_model();
  const auto world = *rc::gen::inRange(1, 6);
  const auto rank = *rc::gen::inRange(0, world);
  const ShardingPlan plan = test::any_plan();
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  MemorySnapshot planned = plan_memory(model, plan, rank, kEveryShape, 1);
  for (const StateRow& row : state_table(model, plan, rank, kEveryShape, 1)) {
    RC_ASSERT(row.bytes() % kSegmentAlignBytes == 0U);
    planned.bytes[static_cast<std::size_t>(row.memory())] -= row.bytes();
  }
  for (const MemoryState state :
       {MemoryState::kParameter, MemoryState::kMaster, MemoryState::kOptimizer, MemoryState::kReduced}) {
    RC_ASSERT(planned[state] == 0U);
  }
}

TEST(StateTable, RowsNeedAParameterWhoseRowsFollowEachOther) {
  ParamSpec param{.name = "w", .shape = {4, 3, 2}};
  EXPECT_EQ(row_length(param), 6);
  param.memory_order = {0, 2, 1};  // channels last
  EXPECT_EQ(row_length(param), 6);
  param.memory_order = {1, 0, 2};
  EXPECT_THROW((void)row_length(param), Error);
}

}  // namespace
}  // namespace zeroth
