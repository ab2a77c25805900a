// Parameters that rest in files: what a gather brings, what is read ahead of it, and how much of it is in memory.
#include "stores.h"

#include <zeroth/io/io_queue.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

std::string folder() {
  return std::filesystem::temp_directory_path().string();
}

/// A queue on threads that has done each transfer when submit() returns, and says what it reads and writes.
class SeenQueue final : public IoQueue {
 public:
  explicit SeenQueue(std::vector<std::string>& seen)
      : seen_(seen), queue_(open_io_queue(folder(), {.engine = IoEngineKind::kThreads})) {}

  Work submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& request : requests) {
      if (request.op == IoOp::kRead) seen_.push_back("read " + request.name);
    }
    Work work = queue_->submit(requests);
    work.wait();
    return work;
  }
  void progress() override { queue_->progress(); }
  [[nodiscard]] int depth() const override { return queue_->depth(); }
  [[nodiscard]] std::size_t pending() const override { return queue_->pending(); }
  [[nodiscard]] IoCounters counters() const override { return queue_->counters(); }
  [[nodiscard]] std::string_view name() const override { return queue_->name(); }
  [[nodiscard]] const std::string& reason() const override { return queue_->reason(); }

 private:
  std::vector<std::string>& seen_;
  std::unique_ptr<IoQueue> queue_;
};

ShardingPlan in_files(ShardingPlan plan, std::int64_t elements = 0) {
  plan.residency = {.parameter = Residency::kFiles, .block_elements = 1024, .parameter_elements = elements};
  return plan;
}

StateFiles files_of(std::shared_ptr<IoQueue> queue) {
  return {.folders = {folder()}, .stripe_bytes = 4096, .queue = std::move(queue)};
}

/// Units of 2,000 elements each: two blocks.
ModelLayout chain(int units, int world) {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> specs;
  for (int unit = 0; unit < units; ++unit) {
    const std::string name = "blocks." + std::to_string(unit);
    params.push_back({.name = name + ".weight", .shape = {2000}});
    specs.push_back({.name = name, .params = {unit}, .repeated = true});
  }
  return make_model_layout(std::move(params), std::move(specs), world);
}

TEST(FiledParameters, AGatherBringsEveryVersionUnderEveryPlan) {
  std::vector<std::pair<int, ShardingPlan>> plans;  // ranks
  for (const ShardingPlan& plan : all_zero_plans({"dp"})) {
    for (const int world : {1, 2, 3}) plans.emplace_back(world, plan);
  }
  plans.emplace_back(4, hpz_plan(2, {"dp"}));
  plans.emplace_back(4, hsdp_plan(2, {"dp"}));
  for (const auto& [world, plan] : plans) {
    run_ranks(world, [&plan = plan](int /*rank*/, const Backend& backend) {
      const ShardingPlan filed = in_files(plan);
      const std::shared_ptr<IoQueue> queue = open_io_queue(folder(), {.engine = IoEngineKind::kThreads});
      Stores stores(backend, filed, make_model(filed.degrees(backend->size())), 1, files_of(queue));
      for (int version = 1; version <= 3; ++version) {
        stores.publish_next();
        for (const int unit : {0, kBlock0, kBlock1, kBlock2, kBlock1, 0}) {
          stores.parameters.acquire(unit);
          stores.require_values(unit);
          stores.parameters.release(unit);
          stores.require_unbound(unit);
        }
        for (int flat = 0; flat < static_cast<int>(stores.model.flats.size()); ++flat) {
          std::vector<std::byte> out(stores.model.flat(flat).bytes());
          stores.parameters.read(flat, out.data());
          require(out == whole_flat(stores.model, flat, stores.parameters.epoch()), "flat " + std::to_string(flat));
        }
        stores.parameters.quiesce();
        stores.barrier();
      }
      require_equal(0, stores.live(MemoryState::kParameter), "parameters at rest in memory");
      const MemorySnapshot planned = plan_memory(stores.model, filed, backend->rank(), 2, 1);
      require_equal(planned[MemoryState::kStaging], stores.live(MemoryState::kStaging), "the working set");
      require_equal(plan_file_bytes(stores.model, filed, backend->rank(), {}, 1, 4096),
                    stores.memory.state_store(BlockSet::kParameters)->measured_file_bytes(), "bytes on disk");
    });
  }
}

/// One step over units in this order, and the begin of the next one.
void step(Stores& stores, std::vector<std::string>& seen, const std::vector<int>& units) {
  for (const int unit : units) {
    stores.parameters.acquire(unit);
    seen.push_back("use blocks." + std::to_string(unit));
    stores.require_values(unit);
    stores.parameters.release(unit);
  }
  stores.parameters.quiesce();
  stores.publish_next();
  seen.emplace_back("step");
}

std::string unit_read(const std::string& line) {
  const std::string begin = "read parameters of unit ";
  return line.starts_with(begin) ? line.substr(begin.size(), line.find(' ', begin.size()) - begin.size()) : "";
}

TEST(FiledParameters, UnitsAreReadThreeUsesAheadInTheRecordedOrder) {
  const std::vector<int> order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
  for (const int world : {1, 2}) {
    run_ranks(world, [&order](int /*rank*/, const Backend& backend) {
      std::vector<std::string> seen;
      Stores stores(backend, in_files(make_plan()), chain(10, backend->size()), 1,
                    files_of(std::make_shared<SeenQueue>(seen)));
      stores.publish_next();
      step(stores, seen, order);
      const std::uint64_t recorded = stores.parameters.counters().demand_fetches;
      require(recorded > 0, "the first step foresees nothing");
      seen.clear();
      for (int more = 0; more < 3; ++more) step(stores, seen, order);
      require_equal(recorded, stores.parameters.counters().demand_fetches, "reads on demand in the recorded order");
      require_equal(0, stores.parameters.counters().order_deviations, "deviations");
      int reads = 0;
      for (auto line = seen.begin(); line != seen.end(); ++line) {
        if (unit_read(*line).empty()) continue;
        const auto use = std::find(line, seen.end(), "use " + unit_read(*line));
        if (use == seen.end()) continue;  // for a step that does not come
        ++reads;
        const auto between = std::count_if(line, use, [](const std::string& one) { return one.starts_with("use "); });
        const bool before_the_step = std::find(line, use, "step") != use;
        require(between >= 3 || before_the_step, *line + " only " + std::to_string(between) + " uses ahead");
      }
      require(reads > 20, "blocks stayed in memory: nothing was tested");
    });
  }
}

TEST(FiledParameters, AUnitOutOfOrderIsReadOnDemandAndCounted) {
  run_ranks(1, [](int /*rank*/, const Backend& backend) {
    std::vector<std::string> seen;
    const std::vector<int> order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    Stores stores(backend, in_files(make_plan()), chain(10, 1), 1, files_of(std::make_shared<SeenQueue>(seen)));
    stores.publish_next();
    for (int more = 0; more < 2; ++more) step(stores, seen, order);
    const ParameterStore::Counters before = stores.parameters.counters();
    // Unit 8 in the place of 2: nobody has read it. The others go on as foreseen.
    step(stores, seen, {0, 1, 8, 3, 4, 5, 6, 7, 2, 9});
    const ParameterStore::Counters& after = stores.parameters.counters();
    require_equal(before.order_deviations + 2, after.order_deviations, "deviations");
    require(after.demand_fetches > before.demand_fetches, "no read on demand");
    require(after.demand_fetches <= before.demand_fetches + 3, "more reads on demand than units out of order");
    step(stores, seen, order);  // against the order with the deviation
    const std::uint64_t known = stores.parameters.counters().demand_fetches;
    step(stores, seen, order);
    require_equal(known, stores.parameters.counters().demand_fetches, "reads on demand once the order is known again");
  });
}

TEST(FiledParameters, TheWorkingSetHasTheFourLargestUnitsOrWhatItIsGiven) {
  const ModelLayout model = chain(10, 2);
  const auto slots = [&model](std::int64_t elements) {
    const ShardingPlan plan = in_files(make_plan(), elements);
    return block_slots(model, plan.residency, state_table(model, plan, 0, {}, 1), BlockSet::kParameters);
  };
  EXPECT_EQ(slots(0), 4);  // a rank has one block of each unit
  EXPECT_EQ(slots(3 * 1024), 3);
  EXPECT_EQ(slots(std::int64_t{1} << 40U), 10);
  require_parameter_slots(model, in_files(make_plan(), 2 * 1024));
  try {
    require_parameter_slots(model, in_files(make_plan(), 1024));
    FAIL() << "one block at once: none could be read ahead";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    EXPECT_EQ(error.context().expected, "at least 2048 elements");
    EXPECT_EQ(error.context().got, "1024");
  }
}

}  // namespace
}  // namespace zeroth::test
