// The loss scale against sequences of DeepSpeed 0.19's DynamicLossScaler, and what it does beside them.
#include <zeroth/optim/loss_scaler.h>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <string_view>
#include <tuple>

namespace zeroth {
namespace {

/// Powers of two after each step ("x": overflow); "!" where the scale cannot fall.
std::string powers(const LossScaling& scaling, std::string_view steps) {
  LossScaler scaler(scaling);
  std::string text;
  for (const char step : steps) {
    if (!text.empty()) text += ' ';
    if (!scaler.update(step == 'x')) return text + '!';
    text += std::to_string(std::ilogb(scaler.scale()));
  }
  return text;
}

TEST(LossScaler, FollowsDeepSpeedStepForStep) {
  const auto scaling = [](int power, int window, double lowest, int hysteresis, bool consecutive) {
    return LossScaling{.enabled = true,
                       .initial_power = power,
                       .window = window,
                       .hysteresis = hysteresis,
                       .consecutive_hysteresis = consecutive,
                       .min_scale = lowest};
  };
  EXPECT_EQ(powers(scaling(16, 3, 1, 2, false), "xx...x....x.xxxxx......."),
            "16 15 15 15 15 14 14 14 14 15 15 15 14 13 12 11 10 10 10 10 11 11 11 12");
  EXPECT_EQ(powers(scaling(16, 3, 1, 2, true), "x.x.xx...x....x.xxxxx......."),
            "16 16 16 16 16 15 15 15 15 15 15 15 15 16 16 16 16 15 14 13 12 12 12 12 13 13 13 14");
  EXPECT_EQ(powers(scaling(4, 2, 4, 1, false), "..x....xxxxxx"), "4 4 3 3 3 4 4 3 2 !");
  EXPECT_EQ(powers(scaling(2, 1000, 1, 3, false), "xxxxxxxx"), "2 2 1 0 !");
  EXPECT_EQ(powers(scaling(8, 1, 1, 1, false), "...x...x.."), "8 9 10 9 9 10 11 10 10 11");
}

TEST(LossScaler, AStaticScaleStaysAndOneThatIsOffIsOne) {
  LossScaler fixed({.enabled = true, .static_scale = 128});
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_TRUE(fixed.update(true));
  fixed.set_state({.scale = 4});
  EXPECT_EQ(fixed.scale(), 128);
  LossScaler off{LossScaling{}};
  EXPECT_TRUE(off.update(true));
  EXPECT_EQ(off.scale(), 1);
}

TEST(LossScaler, GoesOnFromItsState) {
  const LossScaling scaling{.enabled = true, .initial_power = 10, .window = 2, .hysteresis = 2};
  LossScaler whole(scaling);
  LossScaler first(scaling);
  const std::string_view steps = "x..x.x....xx...";
  for (std::size_t step = 0; step < steps.size(); ++step) {
    LossScaler second(scaling);
    second.set_state(first.state());
    EXPECT_EQ(second.state(), whole.state()) << step;
    ASSERT_EQ(whole.update(steps[step] == 'x'), second.update(steps[step] == 'x'));
    first = second;
  }
  LossScaler broken(scaling);
  broken.set_state({.scale = std::nan(""), .steps = -5, .last_overflow = 99, .hysteresis = 0});
  EXPECT_EQ(broken.scale(), 1);
  EXPECT_TRUE(broken.update(false));
}

}  // namespace
}  // namespace zeroth
