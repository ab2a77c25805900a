// The planner of splits against all choices there are, each played through tick by tick.
#include "support/error_of.h"

#include <zeroth/base/error.h>
#include <zeroth/offload/plan_split.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Something that does one job at a time.
struct Worker {
  std::optional<int> block{};
  int left = 0;
  void start(int of, int ticks) {
    block = of;
    left = ticks;
  }
  /// The block that is done now, if one is.
  std::optional<int> finish() {
    if (!block || left > 0) return std::nullopt;
    const std::optional<int> done = block;
    block.reset();
    return done;
  }
  void tick() {
    if (block) --left;
  }
};

struct TierCase {
  int blocks, slots, update, read, write, ahead, behind;
};

/// Ticks from the first update to the end of the last; with writes that go on beyond `behind`.
int play(const TierCase& of, const std::vector<bool>& in_files) {
  Worker processor;
  Worker reader;
  Worker writer;
  std::vector<int> filed;
  for (int block = 0; block < of.blocks; ++block) {
    if (in_files[static_cast<std::size_t>(block)]) filed.push_back(block);
  }
  std::size_t next_read = 0;
  std::size_t next_write = 0;
  int next_update = 0;
  int in_slots = 0;
  int updates_end = 0;
  int writes_end = std::numeric_limits<int>::min() / 2;
  std::vector<bool> here(static_cast<std::size_t>(of.blocks));
  std::vector<bool> updated(static_cast<std::size_t>(of.blocks));
  for (int now = -of.ahead;; ++now) {
    for (bool changed = true; changed;) {
      changed = false;
      if (const auto block = reader.finish()) here[static_cast<std::size_t>(*block)] = changed = true;
      if (const auto block = processor.finish()) {
        updated[static_cast<std::size_t>(*block)] = changed = true;
        updates_end = now;
      }
      if (writer.finish()) {
        --in_slots;
        writes_end = now;
        changed = true;
      }
      if (!reader.block && next_read < filed.size() && in_slots < of.slots) {
        reader.start(filed[next_read++], of.read);
        ++in_slots;
        changed = true;
      }
      if (!processor.block && now >= 0 && next_update < of.blocks &&
          (!in_files[static_cast<std::size_t>(next_update)] || here[static_cast<std::size_t>(next_update)])) {
        processor.start(next_update++, of.update);
        changed = true;
      }
      if (!writer.block && next_write < filed.size() && updated[static_cast<std::size_t>(filed[next_write])]) {
        writer.start(filed[next_write++], of.write);
        changed = true;
      }
    }
    if (next_update == of.blocks && !processor.block && next_write == filed.size() && !writer.block)
      return std::max(updates_end, writes_end - of.behind);
    for (Worker* worker : {&processor, &reader, &writer}) worker->tick();
  }
}

TierSplitProblem problem_of(const TierCase& of, std::uint64_t memory_bytes) {
  TierSplitProblem problem{.blocks = of.blocks,
                           .slots = of.slots,
                           .update_s = of.update * 1.0,
                           .read_s = of.read * 1.0,
                           .write_s = of.write * 1.0,
                           .ahead_s = of.ahead * 1.0,
                           .behind_s = of.behind * 1.0,
                           .memory_bytes = memory_bytes};
  for (int files = 0; files <= of.blocks; ++files)
    problem.memory_of.push_back(static_cast<std::uint64_t>(of.blocks - files + std::min(files, of.slots)) * 100);
  return problem;
}

std::vector<bool> bits(unsigned value, int count) {
  std::vector<bool> result;
  for (int bit = 0; bit < count; ++bit) result.push_back((value >> static_cast<unsigned>(bit) & 1U) != 0);
  return result;
}

TEST(TierSplit, IsTheBestOfAllChoicesThatFit) {
  std::mt19937 random(7);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  int constrained = 0;
  for (int number = 0; number < 250; ++number) {
    const TierCase one{draw(1, 9), draw(2, 4), draw(1, 9), draw(0, 12), draw(0, 12), draw(0, 3) * 7, draw(0, 3) * 7};
    const TierSplitProblem problem = problem_of(one, static_cast<std::uint64_t>(draw(1, one.blocks)) * 100);
    int best = std::numeric_limits<int>::max();
    long fewest = 0;
    for (unsigned value = 0; value < 1U << static_cast<unsigned>(one.blocks); ++value) {
      const std::vector<bool> choice = bits(value, one.blocks);
      const long files = std::ranges::count(choice, true);
      if (problem.memory_of[static_cast<std::size_t>(files)] > problem.memory_bytes) continue;
      const int ticks = play(one, choice);
      ASSERT_EQ(static_cast<double>(ticks), update_time(problem, choice)) << "case " << number << ", choice " << value;
      if (ticks < best || (ticks == best && files < fewest)) fewest = files;
      best = std::min(best, ticks);
    }
    const TierSplitPlan plan = plan_tier_split(problem);
    ASSERT_EQ(plan.chosen.fits, best != std::numeric_limits<int>::max());
    if (!plan.chosen.fits) continue;
    ASSERT_EQ(plan.chosen.step_s, static_cast<double>(best)) << "case " << number << ": " << plan.why;
    ASSERT_EQ(plan.chosen.files, fewest) << "case " << number;
    ASSERT_EQ(play(one, plan.chosen.in_files), best) << "case " << number;
    if (plan.chosen.files > 0) ++constrained;
  }
  EXPECT_GT(constrained, 50) << "memory decided too rarely";
}

TEST(TierSplit, OfManyBlocksIsNearTheBoundOfItsResources) {
  std::mt19937 random(8);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int number = 0; number < 40; ++number) {
    const TierCase one{draw(200, 900), draw(4, 8), draw(1, 9), draw(1, 12), draw(1, 12), 0, 0};
    const int memory = draw(one.slots, one.blocks);
    const TierSplitPlan plan = plan_tier_split(problem_of(one, static_cast<std::uint64_t>(memory) * 100));
    ASSERT_TRUE(plan.chosen.fits);
    const int files = plan.chosen.files;
    const double bound = std::max({one.blocks * one.update, files * one.read, files * one.write,
                                   files * (one.read + one.update + one.write) / one.slots});
    EXPECT_LE(plan.chosen.step_s, bound * 1.1) << "case " << number << ": " << plan.why;
    EXPECT_EQ(files, std::ranges::count(plan.chosen.in_files, true));
  }
}

TEST(TierSplit, SaysWhy) {
  const TierCase one{8, 2, 4, 6, 8, 0, 0};
  EXPECT_THAT(plan_tier_split(problem_of(one, 800)).why,
              AllOf(HasSubstr("all 8 blocks stay in memory"), HasSubstr("nothing is faster")));
  EXPECT_THAT(plan_tier_split(problem_of(one, 600)).why,
              AllOf(HasSubstr("4 of 8 blocks rest in files"), HasSubstr("the fewest that leave memory within 600 B"),
                    HasSubstr("all in memory would take 3.2e+04 ms"), HasSubstr("read in 6e+03 ms")));
  EXPECT_THAT(plan_tier_split(problem_of(one, 100)).why, HasSubstr("even so 200 B of memory are needed where 100 B"));
}

TEST(TierSplit, AnotherLimitIsNamed) {
  for (const int blocks : {6, 200}) {
    TierSplitProblem problem = problem_of({blocks, 2, 1, 3, 2, 0, 0}, 1'000'000);
    problem.least_files = blocks - 1;
    problem.limit = "the budget of a rank";
    const TierSplitPlan plan = plan_tier_split(problem);
    EXPECT_GE(plan.chosen.files, blocks - 1);
    EXPECT_TRUE(plan.chosen.fits);
    EXPECT_THAT(plan.why, AllOf(HasSubstr("within the budget of a rank"), HasSubstr("all blocks would need")));
    EXPECT_THAT(plan.why, Not(HasSubstr("TiB")));
  }
}

TEST(TierSplit, RefusesWhatHasNoMeaning) {
  const auto error = [](TierSplitProblem problem) {
    return test::error_of(ErrorCode::kUsage, [&] { (void)plan_tier_split(problem); });
  };
  EXPECT_THAT(error({.blocks = 0}), HasSubstr("too few blocks or slots"));
  EXPECT_THAT(error({.blocks = 1, .memory_of = {1}}), AllOf(HasSubstr("2 sizes"), HasSubstr("got: 1")));
  EXPECT_THAT(error({.blocks = 1, .read_s = -1.0, .memory_of = {1, 1}}), HasSubstr("negative or not finite"));
}

struct ProcessorCase {
  int blocks, slots, host, device, fetch, back, upload;
};

/// The link to the device serves blocks in their order, as do host and device.
int play(const ProcessorCase& of, const std::vector<bool>& on_device) {
  enum class At : std::uint8_t { kRest, kMoving, kThere, kUpdating, kUpdated, kReturning, kDone };
  std::vector<At> at(static_cast<std::size_t>(of.blocks), At::kRest);
  Worker host;
  Worker device;
  Worker link;
  Worker back;
  const auto state = [&at](int block) -> At& { return at[static_cast<std::size_t>(block)]; };
  const auto first = [&](bool device_block, At wanted) {
    for (int block = 0; block < of.blocks; ++block) {
      if (on_device[static_cast<std::size_t>(block)] == device_block && state(block) == wanted) return block;
    }
    return -1;
  };
  int linked = 0;  // the next block that the link serves
  for (int now = 0;; ++now) {
    for (bool changed = true; changed;) {
      changed = false;
      const auto done = [&](Worker& worker, At then) {
        if (const auto block = worker.finish()) {
          state(*block) = then;
          changed = true;
        }
      };
      if (link.block && link.left == 0) {
        const bool fetched = on_device[static_cast<std::size_t>(*link.block)];
        done(link, fetched ? At::kThere : At::kDone);
      }
      done(host, At::kUpdated);
      done(device, At::kUpdated);
      done(back, At::kDone);
      if (const int block = first(false, At::kRest); !host.block && block >= 0) {
        host.start(block, of.host);
        state(block) = At::kUpdating;
        changed = true;
      }
      if (const int block = first(true, At::kThere); !device.block && block >= 0) {
        device.start(block, of.device);
        state(block) = At::kUpdating;
        changed = true;
      }
      if (const int block = first(true, At::kUpdated); !back.block && block >= 0) {
        back.start(block, of.back);
        state(block) = At::kReturning;
        changed = true;
      }
      if (!link.block && linked < of.blocks) {
        const bool fetches = on_device[static_cast<std::size_t>(linked)];
        int taken = 0;
        for (int block = 0; block < linked; ++block) {
          if (on_device[static_cast<std::size_t>(block)] && state(block) != At::kDone) ++taken;
        }
        if (fetches ? taken < of.slots : state(linked) == At::kUpdated) {
          link.start(linked, fetches ? of.fetch : of.upload);
          if (fetches) state(linked) = At::kMoving;
          ++linked;
          changed = true;
        }
      }
    }
    if (std::ranges::all_of(at, [](At one) { return one == At::kDone; })) return now;
    for (Worker* worker : {&host, &device, &link, &back}) worker->tick();
  }
}

TEST(ProcessorSplit, IsTheBestOfAllChoices) {
  std::mt19937 random(9);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  int mixed = 0;
  for (int number = 0; number < 150; ++number) {
    const ProcessorCase one{draw(1, 8), draw(2, 4), draw(1, 20), draw(1, 4), draw(1, 9), draw(1, 9), draw(0, 3)};
    const ProcessorSplitProblem problem{.blocks = one.blocks,
                                        .slots = one.slots,
                                        .host_update_s = one.host * 1.0,
                                        .device_update_s = one.device * 1.0,
                                        .fetch_s = one.fetch * 1.0,
                                        .return_s = one.back * 1.0,
                                        .upload_s = one.upload * 1.0};
    int best = std::numeric_limits<int>::max();
    for (unsigned value = 0; value < 1U << static_cast<unsigned>(one.blocks); ++value) {
      const std::vector<bool> choice = bits(value, one.blocks);
      const int ticks = play(one, choice);
      ASSERT_EQ(static_cast<double>(ticks), update_time(problem, choice)) << "case " << number << ", choice " << value;
      best = std::min(best, ticks);
    }
    const ProcessorSplitPlan plan = plan_processor_split(problem);
    ASSERT_EQ(plan.step_s, static_cast<double>(best)) << "case " << number << ": " << plan.why;
    ASSERT_EQ(play(one, plan.on_device), best);
    const long device = std::ranges::count(plan.on_device, true);
    if (device > 0 && device < one.blocks) ++mixed;
  }
  EXPECT_GT(mixed, 40) << "one processor did it all too often";
}

}  // namespace
}  // namespace zeroth
