#include "random_model.h"

#include <zeroth/base/error.h>
#include <zeroth/zero/model_layout.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace zeroth {
namespace {

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "did not throw";
  return {ErrorCode::kInternal, ""};
}

RC_GTEST_PROP(ModelLayoutProperty, EveryParameterHasOnePlaceAndFlatsAreInOrder, ()) {
  const auto random = test::any_model();
  const auto world = *rc::gen::inRange(1, 6);
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  RC_ASSERT(model.places.size() == random.params.size());
  RC_ASSERT(model.unit_flats.size() == random.units.size());
  for (std::size_t param = 0; param < random.params.size(); ++param) {
    const ParamPlace& place = model.places[param];
    RC_ASSERT(model.segment(static_cast<int>(param)).param == static_cast<int>(param));
    RC_ASSERT(model.flat(place.flat).unit == place.unit);
    const auto& in_unit = random.units[static_cast<std::size_t>(place.unit)].params;
    RC_ASSERT(std::count(in_unit.begin(), in_unit.end(), static_cast<int>(param)) == 1);
  }
  int next = 0;
  for (std::size_t unit = 0; unit < random.units.size(); ++unit) {
    for (const int flat : model.unit_flats[unit]) {
      RC_ASSERT(flat == next++);
      RC_ASSERT(model.flat(flat).unit == static_cast<int>(unit));
      RC_ASSERT(model.flat(flat).world() == world);
    }
  }
  RC_ASSERT(next == static_cast<int>(model.flats.size()));
  RC_ASSERT(model == make_model_layout(random.params, random.units, world));
}

TEST(ModelLayout, RefusesModelsThatAreNotPartitioned) {
  const std::vector<ParamSpec> two{{.name = "a", .shape = {2}}, {.name = "b", .shape = {3}}};
  Error error = error_of([&] { (void)make_model_layout(two, {{.name = "u", .params = {0}}}, 2); });
  EXPECT_EQ(error.code(), ErrorCode::kModel);
  EXPECT_EQ(error.context().which, "b");

  error = error_of(
      [&] { (void)make_model_layout(two, {{.name = "u", .params = {0, 1}}, {.name = "v", .params = {1}}}, 2); });
  EXPECT_EQ(error.code(), ErrorCode::kModel);
  EXPECT_EQ(error.context().which, "b");
  EXPECT_EQ(error.context().got, "u and v");

  error = error_of([&] { (void)make_model_layout(two, {{.name = "u", .params = {0, 1, 0}}}, 2); });
  EXPECT_EQ(error.code(), ErrorCode::kModel);

  for (const int index : {-1, 2}) {
    error = error_of([&] { (void)make_model_layout(two, {{.name = "u", .params = {0, 1, index}}}, 2); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_EQ(error.context().which, "u");
  }

  const std::vector<ParamSpec> twins{{.name = "a", .shape = {2}}, {.name = "a", .shape = {3}}};
  error = error_of([&] { (void)make_model_layout(twins, {{.name = "u", .params = {0, 1}}}, 2); });
  EXPECT_EQ(error.code(), ErrorCode::kModel);
  EXPECT_EQ(error.context().which, "a");
}

TEST(ModelLayout, DescribesWhatMustAgree) {
  const ModelLayout model = make_model_layout({{.name = "w", .shape = {2, 3}, .dtype = DType::kBFloat16, .group = 1},
                                               {.name = "s", .shape = {}, .trainable = false}},
                                              {{.name = "root", .params = {0, 1}}}, 2);
  EXPECT_EQ(model.describe_param(0), "w bfloat16 [2, 3] trainable group 1 unit root");
  EXPECT_EQ(model.describe_param(1), "s float32 [] frozen group 0 unit root");
}

TEST(ModelLayout, NothingIsAModelToo) {
  const ModelLayout model = make_model_layout({}, {}, 3);
  EXPECT_TRUE(model.flats.empty());
  EXPECT_TRUE(ring_positions(model).empty());
  EXPECT_EQ(make_slot_table(model, {}, true, 2).total_bytes(), 0U);
}

RC_GTEST_PROP(SlotTableProperty, SlotsFitTheirUnitsAndAreNoLargerThanTheLargest, ()) {
  const auto random = test::any_model();
  const ModelLayout model = make_model_layout(random.params, random.units, 2);
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : model.flats) bytes.push_back(*rc::gen::arbitrary<bool>() ? flat.bytes() : 0);
  const auto shared = *rc::gen::arbitrary<bool>();
  const auto ring = *rc::gen::inRange(1, 5);
  const SlotTable table = make_slot_table(model, bytes, shared, ring);
  RC_ASSERT(table == make_slot_table(model, bytes, shared, ring));

  std::vector<std::size_t> largest(table.slot_bytes.size(), 0);
  std::vector<std::set<int>> positions(table.slot_bytes.size());
  std::vector<int> single_users(table.slot_bytes.size(), 0);
  int position = 0;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    std::size_t need = 0;
    for (const int flat : model.unit_flats[unit]) {
      const auto index = static_cast<std::size_t>(flat);
      RC_ASSERT(table.flat_offset[index] == need);  // one behind the other
      need += bytes[index];
    }
    const bool in_ring = model.units[unit].repeated;
    const int place = in_ring ? position++ % ring : -1;
    const int slot = table.unit_slot[unit];
    RC_ASSERT((slot < 0) == (need == 0));
    if (slot < 0) continue;
    const auto at = static_cast<std::size_t>(slot);
    RC_ASSERT(need <= table.slot_bytes[at]);
    largest[at] = std::max(largest[at], need);
    if (shared && in_ring) {
      positions[at].insert(place);
    } else {
      ++single_users[at];
    }
  }
  std::size_t total = 0;
  for (std::size_t slot = 0; slot < table.slot_bytes.size(); ++slot) {
    RC_ASSERT(table.slot_bytes[slot] == largest[slot]);
    RC_ASSERT(table.slot_bytes[slot] % kSegmentAlignBytes == 0U);
    // A slot is one place of the ring or one unit's own, never both.
    RC_ASSERT(positions[slot].size() + static_cast<std::size_t>(single_users[slot]) == 1U);
    total += table.slot_bytes[slot];
  }
  RC_ASSERT(table.total_bytes() == total);
}

TEST(SlotTable, TwentyFourLayersShareARingOfThree) {
  std::vector<ParamSpec> params{{.name = "embedding", .shape = {1000}}};
  std::vector<UnitSpec> units{{.name = "root", .params = {0}}};
  for (int layer = 0; layer < 24; ++layer) {
    params.push_back({.name = "w" + std::to_string(layer), .shape = {layer % 5 == 0 ? 3000 : 2000}});
    units.push_back({.name = "block" + std::to_string(layer), .params = {layer + 1}, .repeated = true});
  }
  const ModelLayout model = make_model_layout(params, units, 2);
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : model.flats) bytes.push_back(flat.bytes());
  const SlotTable table = make_slot_table(model, bytes, true, 3);
  EXPECT_EQ(table.slot_bytes, (std::vector<std::size_t>{4032, 12032, 12032, 12032}));
  EXPECT_EQ(table.unit_slot[0], 0);
  for (int layer = 0; layer < 24; ++layer)
    EXPECT_EQ(table.unit_slot[static_cast<std::size_t>(layer) + 1], 1 + layer % 3);
  EXPECT_EQ(make_slot_table(model, bytes, true, 100).slot_bytes.size(), 25U) << "no more slots than units";
  EXPECT_EQ(make_slot_table(model, bytes, false, 3).slot_bytes.size(), 25U);
}

}  // namespace
}  // namespace zeroth
