#include <zeroth/optim/schedule.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <string_view>

namespace zeroth {
namespace {

using Kind = LearningRateSchedule::Kind;
using Schedule = LearningRateSchedule;

/// DeepSpeed's schedulers as state machines: they are stepped after each update, and the optimizer runs with
/// what they left.
class Oracle {
 public:
  explicit Oracle(const Schedule& schedule)
      : s_(schedule), warmup_(std::max(2.0, static_cast<double>(schedule.warmup_steps))) {
    ratio_ = s_.warmup_start;
  }
  [[nodiscard]] double ratio() const { return ratio_; }
  void step() {
    const double i = iteration_++;
    const double total = static_cast<double>(s_.total_steps);
    if (i < warmup_) {
      const double rise = s_.logarithmic ? std::log(i + 1) / std::log(warmup_) : i / warmup_;
      ratio_ = s_.warmup_start + rise * (1 - s_.warmup_start);
    } else if (s_.kind == Kind::kWarmup) {
      ratio_ = 1;
    } else if (s_.kind == Kind::kWarmupLinear) {
      ratio_ = std::max(0.0, (total - i) / std::max(1.0, total - warmup_));
    } else {
      const double progress = (i - warmup_ + 1) / (total - warmup_);
      ratio_ = s_.floor + (1 - s_.floor) * (1 + std::cos(std::numbers::pi * progress)) / 2;
    }
  }

 private:
  Schedule s_;
  double warmup_;
  double ratio_;
  double iteration_ = 0;
};

TEST(Schedule, ConstantIsOne) {
  for (const std::int64_t t : {0, 1, 1000000}) EXPECT_EQ(Schedule{}.factor(t), 1.0);
}

TEST(Schedule, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (const Kind kind : {Kind::kConstant, Kind::kWarmup, Kind::kWarmupLinear, Kind::kWarmupCosine}) {
    names.insert(name_of(kind));
  }
  EXPECT_EQ(names.size(), 4U);
}

TEST(Schedule, FollowsDeepSpeedsCurves) {
  for (const Kind kind : {Kind::kWarmup, Kind::kWarmupLinear, Kind::kWarmupCosine}) {
    for (const bool logarithmic : {false, true}) {
      for (const std::int64_t warmup : {1, 2, 3, 10, 100}) {
        const Schedule schedule{.kind = kind,
                                .warmup_steps = warmup,
                                .total_steps = 150,
                                .warmup_start = 0.125,
                                .logarithmic = logarithmic,
                                .floor = 0.01};
        Oracle oracle(schedule);
        for (std::int64_t t = 0; t < 150; ++t) {
          ASSERT_NEAR(schedule.factor(t), oracle.ratio(), 1e-14)
              << name_of(kind) << (logarithmic ? " log" : " linear") << " warmup " << warmup << " t " << t;
          oracle.step();
        }
      }
    }
  }
}

TEST(Schedule, KnownPointsOfWarmupLr) {
  const Schedule linear{.kind = Kind::kWarmup, .warmup_steps = 10, .warmup_start = 0.2};
  EXPECT_EQ(linear.factor(0), 0.2);
  EXPECT_EQ(linear.factor(1), 0.2);
  EXPECT_NEAR(linear.factor(6), 0.6, 1e-15);
  EXPECT_EQ(linear.factor(11), 1.0);
  EXPECT_EQ(linear.factor(100000), 1.0);
  const Schedule log{.kind = Kind::kWarmup, .warmup_steps = 16, .logarithmic = true};
  EXPECT_EQ(log.factor(0), 0.0);
  EXPECT_EQ(log.factor(1), 0.0);
  EXPECT_NEAR(log.factor(2), 0.25, 1e-15);  // log 2 / log 16
  EXPECT_NEAR(log.factor(4), 0.5, 1e-15);
  EXPECT_EQ(log.factor(16), 1.0);
}

TEST(Schedule, KnownPointsOfTheDecays) {
  const Schedule linear{.kind = Kind::kWarmupLinear, .warmup_steps = 10, .total_steps = 110};
  EXPECT_EQ(linear.factor(11), 1.0);
  EXPECT_NEAR(linear.factor(61), 0.5, 1e-15);
  EXPECT_NEAR(linear.factor(110), 0.01, 1e-15);
  EXPECT_EQ(linear.factor(111), 0.0);
  EXPECT_EQ(linear.factor(5000), 0.0);
  const Schedule cosine{.kind = Kind::kWarmupCosine, .warmup_steps = 10, .total_steps = 110, .floor = 0.1};
  EXPECT_EQ(cosine.factor(10), 0.9);  // the last of the linear warmup: iteration 9 of 10
  EXPECT_NEAR(cosine.factor(60), 0.55, 1e-15);
  EXPECT_NEAR(cosine.factor(110), 0.1, 1e-15);
  EXPECT_NEAR(cosine.factor(5000), 0.1, 1e-15) << "it does not rise again";
}

TEST(Schedule, NoWarmupStartsAtTheTop) {
  for (const Kind kind : {Kind::kWarmup, Kind::kWarmupLinear, Kind::kWarmupCosine}) {
    for (const bool logarithmic : {false, true}) {
      const Schedule schedule{.kind = kind, .total_steps = 10, .warmup_start = 0.5, .logarithmic = logarithmic};
      EXPECT_EQ(schedule.factor(0), 1.0) << name_of(kind);
    }
  }
}

RC_GTEST_PROP(ScheduleProperty, StaysWithinZeroAndOneRisesThenFalls, ()) {
  const Schedule schedule{
      .kind = *rc::gen::element(Kind::kWarmup, Kind::kWarmupLinear, Kind::kWarmupCosine),
      .warmup_steps = *rc::gen::inRange<std::int64_t>(0, 50),
      .total_steps = *rc::gen::inRange<std::int64_t>(50, 200),
      .warmup_start = static_cast<double>(*rc::gen::inRange(0, 101)) / 100,
      .logarithmic = *rc::gen::arbitrary<bool>(),
      .floor = static_cast<double>(*rc::gen::inRange(0, 101)) / 100,
  };
  const std::int64_t top = schedule.warmup_steps == 0 ? 0 : std::max<std::int64_t>(2, schedule.warmup_steps);
  for (std::int64_t t = 0; t < 250; ++t) {
    const double now = schedule.factor(t);
    const double next = schedule.factor(t + 1);
    RC_ASSERT(now >= 0.0 && now <= 1.0);
    if (t + 1 <= top) RC_ASSERT(next >= now);
    if (t > top) RC_ASSERT(next <= now);
  }
}

}  // namespace
}  // namespace zeroth
