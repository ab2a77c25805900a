// Copies of parameters for the device that computes; here that device is the CPU, whose memory a test can look into.
#include "libtorch/device_copies.h"

#include "adapter_checks.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using libtorch::DeviceCopies;

/// A root unit and four repeated ones with a flat of 16 floats each.
ModelLayout five_units() {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < 5; ++unit) {
    params.push_back({.name = std::to_string(unit), .shape = {16}});
    units.push_back({.name = std::to_string(unit), .params = {unit}, .repeated = unit > 0});
  }
  return make_model_layout(params, units, 2);
}

std::vector<float> values_at(const at::DataPtr& place) {
  const auto* first = static_cast<const float*>(place.get());
  return {first, first + 16};
}

const std::byte* bytes_of(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

TEST(DeviceCopies, EveryUnitHasAPlaceUnlessParametersAreSharded) {
  const ModelLayout layout = five_units();
  for (int stage = 0; stage < 3; ++stage)
    EXPECT_EQ(DeviceCopies(at::kCPU, layout, zero_plan(stage, {"dp"})).bytes(), 5U * 64);
  EXPECT_EQ(DeviceCopies(at::kCPU, layout, zero_plan(3, {"dp"})).bytes(), 3U * 64) << "the root and a ring of two";
}

TEST(DeviceCopies, UnitsShareTheRingAndWhoFindsItTakenGetsMemoryForAWhile) {
  const ModelLayout layout = five_units();
  DeviceCopies copies(at::kCPU, layout, zero_plan(3, {"dp"}));
  const std::vector<float> one(16, 1.0F);
  const std::vector<float> three(16, 3.0F);
  const at::DataPtr first = copies.fetch(1, bytes_of(one));
  at::DataPtr third = copies.fetch(3, bytes_of(three));  // the same slot, and it is taken
  EXPECT_NE(first.get(), third.get());
  EXPECT_EQ(values_at(first), one);
  EXPECT_EQ(values_at(third), three);
  EXPECT_EQ(copies.bytes(), 4U * 64);
  copies.release(3);
  EXPECT_EQ(values_at(third), three) << "an address keeps its memory as long as somebody has it";
  copies.release(1);
  third = copies.fetch(3, bytes_of(three));
  EXPECT_EQ(third.get(), first.get());
  EXPECT_EQ(copies.bytes(), 4U * 64) << "the peak stays";
}

TEST(DeviceCopies, NewValuesKeepThePlace) {
  const ModelLayout layout = five_units();
  DeviceCopies copies(at::kCPU, layout, zero_plan(1, {"dp"}));
  std::vector<float> values(16, 1.0F);
  const at::DataPtr place = copies.fetch(2, bytes_of(values));
  values.assign(16, 2.0F);
  EXPECT_NE(values_at(place), values);
  copies.refresh(2, bytes_of(values));
  EXPECT_EQ(values_at(place), values);
}

TEST(DeviceCopies, AnEngineComputesOnThemWithTheSameBits) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      std::vector<double> norms[2];
      std::map<std::string, std::vector<std::byte>> values[2];
      for (const bool copied : {false, true}) {
        Config config = config_of(stage);
        config.runtime.compute_copies = copied;
        Trainee trainee(NetOptions{.layers = 5}, config, world);
        for (int step = 0; step < 3; ++step) norms[copied ? 1 : 0].push_back(trainee.train(step).grad_norm);
        values[copied ? 1 : 0] = trainee.values();
        const MemoryReport report = trainee.engine.memory_report();
        require((report.compute_copies > 0) == copied, to_text(report));
        require(report.planned == report.measured_peak, to_text(report));
      }
      require(norms[0] == norms[1] && values[0] == values[1],
              "stage " + std::to_string(stage) + ": other bits with copies");
    });
  }
}

}  // namespace
}  // namespace zeroth::test
