// The stores of one rank each, on ranks that are threads: what a gather brings, what it refuses, and what it
// counts.
#include "stores.h"
#include "zero/signals.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

class ParameterStoreWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ParameterStoreWorlds, ::testing::Values(1, 2, 3),
                         [](const auto& world) { return "of" + std::to_string(world.param); });

TEST_P(ParameterStoreWorlds, AGatherBringsTheShardsOfAllRanksInEveryVersion) {
  run_ranks(GetParam(), [](int /*rank*/, const Backend& backend) {
    Stores stores(backend);
    for (int version = 1; version <= 3; ++version) {
      stores.publish_next();
      for (const int unit : {0, kBlock0, kBlock1, kBlock2, kBlock1, 0}) {
        stores.parameters.acquire(unit);
        stores.require_values(unit);
        stores.parameters.release(unit);
        stores.require_unbound(unit);
      }
      stores.parameters.quiesce();
      stores.barrier();  // nobody overwrites a shard that somebody reads
    }
    require_equal(18, stores.parameters.counters().gathers, "gathers");
    require_equal(0, stores.parameters.counters().overflow_slots, "overflow slots");
  });
}

TEST_P(ParameterStoreWorlds, AWholeFlatIsReadWithoutALease) {
  run_ranks(GetParam(), [](int /*rank*/, const Backend& backend) {
    Stores stores(backend);
    stores.publish_next();
    for (int flat = 0; flat < static_cast<int>(stores.model.flats.size()); ++flat) {
      std::vector<std::byte> out(stores.model.flat(flat).bytes());
      stores.parameters.read(flat, out.data());
      require(out == whole_flat(stores.model, flat, 1), "flat " + std::to_string(flat));
    }
    require_equal(0, stores.live(MemoryState::kGathered), "gathered bytes");
    require_equal(0, static_cast<std::uint64_t>(stores.bound.binds), "binds");
    stores.barrier();
  });
}

TEST_P(ParameterStoreWorlds, LeasesAreCountedAndTheLastOneUnbinds) {
  run_ranks(GetParam(), [](int /*rank*/, const Backend& backend) {
    Stores stores(backend);
    stores.publish_next();
    UnshardLease first(stores.parameters, kBlock1);
    stores.parameters.acquire(kBlock1);
    require_equal(2, static_cast<std::uint64_t>(stores.parameters.leases(kBlock1)), "leases");
    require_equal(1, stores.parameters.counters().gathers, "gathers");
    UnshardLease second = std::move(first);
    first.reset();  // NOLINT(bugprone-use-after-move): an empty lease gives nothing back
    require_equal(2, static_cast<std::uint64_t>(stores.parameters.leases(kBlock1)), "leases after a move");
    second.reset();
    second.reset();
    require_equal(1, static_cast<std::uint64_t>(stores.parameters.leases(kBlock1)), "leases after one release");
    stores.require_values(kBlock1);
    stores.parameters.release(kBlock1);
    stores.require_unbound(kBlock1);
    require_equal(0, static_cast<std::uint64_t>(stores.parameters.leases(kBlock1)), "leases at the end");
    require_equal(1, stores.parameters.counters().gathers, "gathers at the end");
    stores.barrier();
  });
}

TEST_P(ParameterStoreWorlds, TwoUnitsOfOneSlotAtOnceGetMemoryBeyondThePlan) {
  run_ranks(GetParam(), [](int /*rank*/, const Backend& backend) {
    Stores stores(backend, make_plan(1));
    const SlotTable& table = stores.memory.gathered_table();
    require(table.unit_slot[kBlock0] == table.unit_slot[kBlock2], "the blocks have slots of their own");
    const std::size_t slot_bytes = table.slot_bytes[static_cast<std::size_t>(table.unit_slot[kBlock0])];
    stores.publish_next();
    stores.parameters.acquire(kBlock0);
    stores.parameters.acquire(kBlock2);
    stores.require_values(kBlock0);
    stores.require_values(kBlock2);
    const ParameterStore::Counters& counters = stores.parameters.counters();
    require_equal(1, counters.overflow_slots, "overflow slots");
    require_equal(slot_bytes, stores.live(MemoryState::kOverflow), "overflow bytes");
    require_equal(2, static_cast<std::uint64_t>(counters.live_slots), "live slots");
    require_equal(stores.unit_bytes(kBlock0) + stores.unit_bytes(kBlock2), counters.live_bytes, "live bytes");

    stores.parameters.release(kBlock0);  // the owner of the slot goes first: the other must not notice
    stores.require_values(kBlock2);
    stores.parameters.acquire(kBlock1);
    stores.require_values(kBlock1);
    stores.require_values(kBlock2);
    require_equal(1, counters.overflow_slots, "the slot is free again");
    stores.parameters.release(kBlock2);
    stores.parameters.release(kBlock1);

    require_equal(0, stores.live(MemoryState::kOverflow), "overflow bytes after the release");
    require_equal(slot_bytes, stores.device->ledger().state_peaks()[MemoryState::kOverflow], "peak of overflow bytes");
    require_equal(0, static_cast<std::uint64_t>(counters.live_slots), "live slots at the end");
    require_equal(0, counters.live_bytes, "live bytes at the end");
    require_equal(2, static_cast<std::uint64_t>(counters.live_slots_peak), "peak of live slots");
    require_equal(stores.unit_bytes(kBlock1) + stores.unit_bytes(kBlock2), counters.live_bytes_peak,
                  "peak of live bytes");
    stores.counters.reset_peaks();
    require_equal(0, static_cast<std::uint64_t>(counters.live_slots_peak), "peak of live slots, forgotten");
    require_equal(0, counters.live_bytes_peak, "peak of live bytes, forgotten");
    stores.barrier();
  });
}

TEST_P(ParameterStoreWorlds, UnitsInAnotherOrderThanInTheStepBeforeAreCounted) {
  run_ranks(GetParam(), [](int /*rank*/, const Backend& backend) {
    Stores stores(backend);
    const auto step = [&stores](const std::vector<int>& units) {
      for (const int unit : units) {
        stores.parameters.acquire(unit);
        stores.parameters.release(unit);
      }
      stores.parameters.quiesce();
      stores.barrier();
      stores.publish_next();
      return stores.parameters.counters().order_deviations;
    };
    stores.publish_next();
    require_equal(0, step({0, kBlock0, kBlock1, kBlock2}), "nothing to compare with");
    require_equal(0, step({0, kBlock0, kBlock1, kBlock2}), "the same order");
    require_equal(2, step({0, kBlock1, kBlock0, kBlock2}), "two changed places");
    require_equal(2, step({0, kBlock1, kBlock0}), "the last one is left out");
    require_equal(3, step({0, kBlock1, kBlock0, kBlock2}), "one more than before");
  });
}

TEST_P(ParameterStoreWorlds, TheStepCannotEndWhileAUnitIsInUse) {
  run_ranks(GetParam(), [](int /*rank*/, const Backend& backend) {
    Stores stores(backend);
    stores.publish_next();
    stores.parameters.acquire(kBlock1);
    try {
      stores.parameters.quiesce();
      throw std::runtime_error("quiesce() let it pass");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kUsage, error.what());
      require(error.context().which == "unit blocks.1", error.what());
    }
    stores.require_values(kBlock1);
    stores.parameters.release(kBlock1);
    stores.parameters.quiesce();
    stores.barrier();
  });
}

/// Every rank finds out by itself.
ThreadRanksOptions alone() {
  ThreadRanksOptions options;
  options.abort_on_failure = false;
  return options;
}

void expect_mismatch_of_all(const RankReport& report, int world, const std::vector<std::string>& texts) {
  EXPECT_EQ(report.failures.size(), static_cast<std::size_t>(world)) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    // Who finds another rank at fault names it; the rank at fault finds the others.
    const std::string culprit = failure.rank == 1 ? "rank 0" : "rank 1";
    for (const std::string& text : texts) EXPECT_NE(failure.text.find(text), std::string::npos) << failure.text;
    EXPECT_NE(failure.text.find("on " + culprit), std::string::npos) << failure.text;
    EXPECT_NE(failure.text.find("who: rank " + std::to_string(failure.rank)), std::string::npos) << failure.text;
  }
}

TEST(ParameterStoreDegrees, AGatherBringsTheShardsOfAGroupWithWhatOthersHaveUpdated) {
  for (const auto& [parameter, optimizer] : {std::pair{1, 2}, {2, 2}, {2, 4}, {1, 8}, {2, 8}, {4, 8}}) {
    run_ranks(8, [parameter = parameter, optimizer = optimizer](int /*rank*/, const Backend& backend) {
      ShardingPlan plan = make_plan();
      plan.parameter_degree = parameter;
      plan.optimizer_degree = optimizer;
      Stores stores(backend, plan);
      for (int version = 1; version <= 3; ++version) {
        stores.update();
        stores.parameters.publish();  // and no barrier
        for (const int unit : {0, kBlock0, kBlock1, kBlock2, kBlock1, 0}) {
          stores.parameters.acquire(unit);
          stores.require_values(unit);
          stores.parameters.release(unit);
        }
        stores.parameters.quiesce();
        stores.barrier();  // nobody overwrites a shard that somebody reads
      }
    });
  }
}

TEST(ParameterStoreDegrees, AGatherInsideAGroupWaitsForNobodyElse) {
  run_ranks(4, [](int rank, const Backend& backend) {
    Stores stores(backend, hsdp_plan(2, {"dp"}));
    stores.update();
    if (rank >= 2) stores.barrier();  // the other group has no version yet
    stores.parameters.publish();
    stores.parameters.acquire(kBlock1);
    stores.require_values(kBlock1);
    stores.parameters.release(kBlock1);
    if (rank < 2) stores.barrier();
    stores.barrier();
  });
}

/// A rank's epoch is that of all that it has at rest, so it comes after what others have updated.
TEST(ParameterStoreDegrees, TheEpochWaitsForTheUpdatesOfOthers) {
  run_ranks(4, [](int rank, const Backend& backend) {
    Stores stores(backend, hpz_plan(2, {"dp"}));
    const int flat = stores.model.unit_flats[kBlock1].front();
    stores.update();
    if (rank == 3) {
      // Rank 1 has all it needs but this rank's part of the update.
      const Signals& waiting = stores.memory.signals(1);
      backend->wait_until([&] { return waiting.updated().load() == 1; }, {.what = "rank 1"});
      require(waiting.epoch(flat).load() == 0, "an epoch without all updates");
    }
    stores.parameters.publish();
    require(stores.memory.signals(rank).epoch(flat).load() == 1, "no epoch");
    stores.barrier();
  });
}

int flat_of(const ModelLayout& model, int unit) {
  return model.unit_flats[static_cast<std::size_t>(unit)].front();
}

TEST(ParameterStore, AnotherLayoutOfAUnitIsAMismatchThatNamesUnitAndRank) {
  for (const int world : {2, 3}) {
    const RankReport report = try_ranks(
        world,
        [](int rank, const Backend& backend) {
          Stores stores(backend);
          SignalWord& tag = stores.memory.signals(rank).tag(flat_of(stores.model, kBlock1));
          require(tag.load() != 0, "a tag is 0");
          if (rank == 1) tag.fetch_xor(1);
          stores.publish_next();
          stores.parameters.acquire(kBlock0);  // only what differs is refused
          stores.parameters.release(kBlock0);
          try {
            stores.parameters.acquire(kBlock1);
          } catch (const Error&) {
            stores.require_unbound(kBlock1);
            require_equal(0, static_cast<std::uint64_t>(stores.parameters.leases(kBlock1)), "leases");
            stores.barrier();  // before somebody leaves
            throw;
          }
        },
        alone());
    expect_mismatch_of_all(
        report, world, {"different ways", "where: zero.gather", "unit blocks.1", "expected: layout ", "got: layout "});
  }
}

TEST(ParameterStore, AShardOfAnotherVersionIsAMismatchThatNamesUnitAndRank) {
  const RankReport report = try_ranks(
      3,
      [](int rank, const Backend& backend) {
        Stores stores(backend);
        stores.publish_next();
        const int flat = flat_of(stores.model, kBlock2);
        // Rank 1 runs ahead of the others, in its shard and in what it asks of them.
        if (rank == 1) stores.memory.signals(rank).epoch(flat).store(5);
        stores.barrier();
        try {
          stores.parameters.acquire(kBlock2);
        } catch (const Error&) {
          stores.barrier();
          throw;
        }
      },
      alone());
  EXPECT_EQ(report.failures.size(), 3U) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    for (const char* text :
         {"where: zero.gather", "unit blocks.2", "shard of rank 1", "expected: epoch 1", "got: epoch 5 on rank 1"}) {
      EXPECT_NE(failure.text.find(text), std::string::npos) << failure.text;
    }
  }
}

TEST(ParameterStore, TagsDependOnEverythingThatALayoutHolds) {
  // One rank, one tag a model: any change of what is laid out must change it.
  const auto tag_of = [](const std::vector<ParamSpec>& params, const std::string& unit) {
    std::uint64_t tag = 0;
    run_ranks(1, [&](int /*rank*/, const Backend& backend) {
      std::vector<int> all;
      for (std::size_t param = 0; param < params.size(); ++param) all.push_back(static_cast<int>(param));
      const ModelLayout model = make_model_layout(params, {{.name = unit, .params = all}}, 1);
      const ShardingPlan plan = make_plan();
      const auto device = make_cpu_device();
      ThreadPool pool(1);
      const auto kernels = make_host_kernels(*device, pool, kernels::best_isa());
      ModelMemory memory(model, plan, element_states(2), 1, *device, *kernels, *backend);
      Bound bound;
      ParameterStore::Counters counters;
      const ParameterStore store(model, plan, memory, *backend, *device, device->make_stream("gather"), *kernels, bound,
                                 counters);
      tag = memory.signals(0).tag(0).load();
    });
    return tag;
  };
  const std::vector<ParamSpec> base{{.name = "a", .shape = {100}}, {.name = "b", .shape = {200}}};
  const auto changed = [&base](auto change) {
    std::vector<ParamSpec> params = base;
    change(params);
    return params;
  };
  const std::uint64_t tag = tag_of(base, "unit");
  EXPECT_EQ(tag_of(base, "unit"), tag);
  EXPECT_NE(tag_of(base, "other"), tag);
  // Both have 1,024 elements of float32 in the end: only the segments differ.
  EXPECT_NE(tag_of(changed([](auto& params) { std::swap(params[0].shape, params[1].shape); }), "unit"), tag);
  EXPECT_NE(tag_of(changed([](auto& params) { params[1].shape = {201}; }), "unit"), tag);
  EXPECT_NE(tag_of(changed([](auto& params) {
                     for (auto& param : params) param.dtype = DType::kFloat64;
                   }),
                   "unit"),
            tag);
  EXPECT_NE(tag_of(changed([](auto& params) {
                     for (auto& param : params) param.trainable = false;
                   }),
                   "unit"),
            tag);
  EXPECT_NE(tag_of(changed([](auto& params) {
                     for (auto& param : params) param.grad_factor = 0.5;
                   }),
                   "unit"),
            tag);
}

TEST(GradientStore, ABucketOfAnotherLayoutIsAMismatchThatNamesUnitAndRank) {
  for (const int zero_stage : {0, 1, 2, 3}) {
    const RankReport report = try_ranks(
        2,
        [zero_stage](int rank, const Backend& backend) {
          Stores stores(backend, zero_plan(zero_stage, {"dp"}));
          const int flat = flat_of(stores.model, kBlock1);
          if (rank == 1) stores.memory.signals(rank).tag(flat).fetch_xor(1);
          stores.barrier();
          const int param = stores.model.units[kBlock1].params.front();
          const ParamSpec& spec = stores.model.params[static_cast<std::size_t>(param)];
          const std::vector<float> grad(static_cast<std::size_t>(spec.numel()), 1.0F);
          try {
            stores.gradients.add(param, {reinterpret_cast<const std::byte*>(grad.data()), spec.shape, spec.dtype});
            stores.gradients.close_backward();
            stores.gradients.complete();
          } catch (const Error&) {
            stores.barrier();
            throw;
          }
        },
        alone());
    expect_mismatch_of_all(
        report, 2, {"different ways", "where: zero.reduce", "unit blocks.1", "expected: layout ", "got: layout "});
  }
}

}  // namespace
}  // namespace zeroth::test
