// What the tests of the adapter compare: the same body at every stage, and what a body throws.
#pragma once

#include "test_nets.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace zeroth::test {

inline constexpr int kStages[] = {0, 1, 2, 3};

/// Text of what `body` throws, without torch's backtrace; "" if nothing.
inline std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// What every rank is told; the same code on all of them.
inline std::string refusal(int ranks, ErrorCode code, const std::function<void(const World& world)>& body) {
  const RankReport report = try_world(ranks, body, {.abort_on_failure = false});
  EXPECT_EQ(report.failures.size(), static_cast<std::size_t>(ranks)) << report.text();
  for (const RankFailure& failure : report.failures) EXPECT_EQ(failure.code, code) << failure.text;
  return report.failures.empty() ? "" : report.failures[0].text;
}

/// The same training at every stage gives the same bits; returns them.
inline Values expect_equal_at_all_stages(int ranks, const std::function<Values(int stage, const World& world)>& body) {
  Values expected;
  for (const int stage : kStages) {
    const Values got = values_at_stage(ranks, [&](const World& world) { return body(stage, world); });
    if (stage == 0) expected = got;
    EXPECT_EQ(expected == got, true) << "stage " << stage;
  }
  return expected;
}

/// Plain training, nothing unusual.
inline Values plain_values(int ranks, const NetOptions& options, int steps) {
  return expect_equal_at_all_stages(ranks, [&](int stage, const World& world) {
    Trainee trainee(options, config_of(stage), world);
    for (int step = 0; step < steps; ++step) trainee.train(step);
    return trainee.values();
  });
}

}  // namespace zeroth::test
