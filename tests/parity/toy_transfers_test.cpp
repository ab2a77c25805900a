// What an engine says of its transfers: the bytes that it counts are those of the formula, its hidden share is that of
// the clock, and its order of reads, computations and writes is the one in which they overlap.
#include "support/simulated_disk.h"
#include "support/thread_ranks.h"
#include "toy_residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// --- bytes ---

/// Reports of each rank after each step.
struct Reports {
  std::mutex mutex;
  std::map<int, std::vector<TransferReport>> of_rank;
  std::map<int, std::uint64_t> moments;  ///< of each rank, bytes of blocks of two float32 an element that it updates
  std::map<int, std::uint64_t> blocks;   ///< and their number
};

/// Two moments an element in blocks of 1,024 elements, each block a multiple of 4,096 bytes.
void add_moments(const ModelLayout& layout, int rank, int degree, Reports& reports) {
  std::uint64_t& bytes = reports.moments[rank] = 0;
  std::uint64_t& blocks = reports.blocks[rank] = 0;
  for (const FlatLayout& flat : layout.flats) {
    if (!flat.trainable) continue;
    const std::int64_t elements = flat.part(rank, degree).size();
    for (std::int64_t at = 0; at < elements; at += 1024) {
      const auto n = static_cast<std::uint64_t>(std::min<std::int64_t>(1024, elements - at));
      bytes += (2 * ((n * 4 + 63) / 64 * 64) + 4095) / 4096 * 4096;
      ++blocks;
    }
  }
}

ToyTraining reporting(ToyTraining training, Reports& reports, int degree) {
  training.steps = 4;
  training.reports_memory = false;
  training.after_step = [&reports, degree](Engine& engine, ToyModel&, const StepResult&) {
    const std::lock_guard lock(reports.mutex);
    reports.of_rank[engine.rank()].push_back(engine.transfer_report());
    add_moments(engine.layout(), engine.rank(), degree, reports);
  };
  return training;
}

/// What moved is what the step asked for, less what was in memory, and what was read for a later use.
void expect_moved(const TransferRow& row, const StoreCounters& before, const std::string& text) {
  const StoreCounters& step = row.last_step;
  EXPECT_EQ(step.read_bytes + before.ahead_bytes,
            step.needed_bytes - step.spared_read_bytes + step.unused_bytes + step.ahead_bytes)
      << text;
  EXPECT_EQ(step.write_bytes, step.changed_bytes - step.spared_write_bytes) << text;
  EXPECT_EQ(step.prefetched + step.late + step.on_demand > 0, step.needed_bytes > step.spared_read_bytes) << text;
}

void expect_the_formula(const FactorRow& row) {
  Reports reports;
  const int stage = row[0];
  const int ranks = row[1] + 1;
  const int degree = stage == 0 ? 1 : ranks;
  (void)train_toy(reporting(in_files(training_of(row), row), reports, degree));
  std::string factors = "factors";
  for (const int level : row) factors += " " + std::to_string(level);
  const double ratio = row[10] == kParameters ? 0.0 : kRatios[row[4]];
  ASSERT_EQ(reports.of_rank.size(), static_cast<std::size_t>(ranks));
  for (const auto& [rank, of_step] : reports.of_rank) {
    for (std::size_t step = 1; step < of_step.size(); ++step) {
      const std::string text =
          factors + ", rank " + std::to_string(rank) + ", step " + std::to_string(step) + "\n" + to_text(of_step[step]);
      EXPECT_EQ(of_step[step].row("optimizer") != nullptr, ratio > 0.0) << text;
      EXPECT_EQ(of_step[step].row("parameters") != nullptr, row[10] != kOptimizerStates) << text;
      for (const TransferRow& set : of_step[step].rows) {
        ASSERT_TRUE(set.planned) << text;
        EXPECT_EQ(set.last_step.needed_bytes, set.planned->read_bytes) << set.set << ", " << text;
        EXPECT_EQ(set.last_step.changed_bytes, set.planned->write_bytes) << set.set << ", " << text;
        expect_moved(set, of_step[step - 1].row(set.set)->last_step, set.set + ", " + text);
      }
      const TransferRow* optimizer = of_step[step].row("optimizer");
      if (row[3] != 0 || row[7] != 0 || ratio < 1.0) continue;  // moments of float32 and nothing else, all in files
      EXPECT_EQ(optimizer->planned->read_bytes, reports.moments.at(rank)) << text;
      EXPECT_EQ(optimizer->planned->write_bytes, reports.moments.at(rank)) << text;
    }
  }
}

TEST(Transfers, CountedBytesAreThoseOfTheFormulaFromTheSecondStepOn) {
  for (const FactorRow& row : covering_array(kResidencyLevels, 2, {})) expect_the_formula(row);
}

TEST(Transfers, ACacheSparesItsBlocksInBothDirections) {
  const FactorRow row{1, 1, 0, 0, 0, 0, 0, 0, 0, 0, kOptimizerStates, 0};
  Reports reports;
  ToyTraining training = reporting(in_files(training_of(row), row), reports, 2);
  training.plan.residency.cache_blocks = 3;
  (void)train_toy(training);
  for (const auto& [rank, of_step] : reports.of_rank) {
    const std::uint64_t blocks = reports.blocks.at(rank);
    ASSERT_GT(blocks, 5U);
    for (std::size_t step = 1; step < of_step.size(); ++step) {
      const TransferRow& set = *of_step[step].row("optimizer");
      const std::string text = to_text(of_step[step]);
      EXPECT_EQ(set.last_step.needed_bytes, set.planned->read_bytes) << text;
      EXPECT_EQ(set.last_step.changed_bytes, set.planned->write_bytes) << text;
      EXPECT_EQ(set.last_step.writes, blocks - 3) << text;
      EXPECT_LE(set.last_step.reads, blocks - 3) << text;
      expect_moved(set, of_step[step - 1].row("optimizer")->last_step, text);
    }
  }
}

// --- on a simulated disk: one rank ---

/// Says when it updates, and lets the clock go on meanwhile.
class WatchedOptimizer final : public Optimizer {
 public:
  WatchedOptimizer(std::shared_ptr<SimulatedDisk> disk, std::chrono::nanoseconds time)
      : disk_(std::move(disk)), time_(time), inner_(make_optimizer({})) {}
  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] std::vector<StateDeclaration> states() const override { return inner_->states(); }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    disk_->note("begin update");
    disk_->compute(time_);
    inner_->step(block, kernels, stream);
    disk_->note("end update");
  }

 private:
  std::shared_ptr<SimulatedDisk> disk_;
  std::chrono::nanoseconds time_;
  std::unique_ptr<Optimizer> inner_;
};

struct OnDisk {
  std::chrono::nanoseconds update{0};  ///< of a block
  std::chrono::nanoseconds unit{0};    ///< of a forward or a backward of a unit
  Filed filed = kOptimizerStates;
  int slots = 4;
  bool tells_ends = true;
};

constexpr std::chrono::nanoseconds kTransfer{1000};

/// One rank at stage 3; all parameters of a unit are one block.
ToyTraining on_disk(const std::shared_ptr<SimulatedDisk>& disk, const OnDisk& options) {
  ToyTraining training = small(3, 1);
  training.model = {.width = 30, .blocks = 8};  // 930 parameters a unit
  training.steps = 3;
  training.reports_memory = false;
  training.plan.residency = {.optimizer = options.filed == kParameters ? Residency::kDevice : Residency::kFiles,
                             .parameter = options.filed == kOptimizerStates ? Residency::kDevice : Residency::kFiles,
                             .block_elements = 1024,
                             .slots = options.slots};
  training.tamper = [disk, options](int, ToyStructure& structure, EngineSettings& settings) {
    for (ParamSpec& param : structure.params) param.group = 0;  // one update a block
    settings.storage = {
        .folders = {std::filesystem::temp_directory_path().string()},
        .own_queue = [disk](const std::string&, const IoQueueOptions& queue) { return disk->open(queue); },
        .now = [disk] { return disk->now(); }};
    settings.own_optimizer = [disk, options] { return std::make_unique<WatchedOptimizer>(disk, options.update); };
  };
  training.visitor = [disk, options](CommBackend&) {
    return [disk, options](bool backward, int unit) {
      if (unit < 0) return;
      disk->note((backward ? "backward of unit " : "forward of unit ") + std::to_string(unit));
      disk->compute(options.unit);
    };
  };
  training.after_step = [disk](Engine&, ToyModel&, const StepResult& result) {
    if (result.step == 2) disk->forget_events();
  };
  return training;
}

double share_of(const OnDisk& options, TransferTimes* times = nullptr) {
  const auto disk = std::make_shared<SimulatedDisk>(kTransfer, options.tells_ends);
  ToyTraining training = on_disk(disk, options);
  TransferReport report;
  training.after_step = [&report](Engine& engine, ToyModel&, const StepResult&) { report = engine.transfer_report(); };
  (void)train_toy(training);
  if (times != nullptr) *times = report.last_step;
  return report.last_step.hidden_share();
}

TEST(Transfers, TheHiddenShareIsNothingWhereNobodyComputesAndAllWhereComputingIsLong) {
  TransferTimes times;
  // 9 blocks are read and written, one after the other, and nobody does anything else meanwhile.
  EXPECT_EQ(share_of({}, &times), 0.0);
  EXPECT_EQ(times.in_flight, times.waited);
  EXPECT_GE(times.in_flight, 9 * kTransfer);
  // An update takes as long as three transfers: but for the first read, they are over when they are needed.
  EXPECT_GT(share_of({.update = 3 * kTransfer, .unit = kTransfer}, &times), 0.9);
  EXPECT_EQ(times.waited, kTransfer) << "the first block";
  EXPECT_EQ(times.in_flight, 18 * kTransfer) << "9 reads and 9 writes, one after the other";
  // An update takes as long as one of the two transfers of its block.
  const double half = share_of({.update = kTransfer, .unit = kTransfer});
  EXPECT_GT(half, 0.4);
  EXPECT_LT(half, 0.7);
  // Parameters: forwards and backwards hide the reads of gathers, updates the others and the writes.
  EXPECT_EQ(share_of({.filed = kParameters}), 0.0);
  EXPECT_GT(share_of({.update = 3 * kTransfer, .unit = 3 * kTransfer, .filed = kParameters}), 0.85);
}

// As with io_uring: the rank sees that a transfer has ended, and not when.
TEST(Transfers, WhereNobodyKnowsWhenTransfersEndedTheShareIsNeverTooLarge) {
  EXPECT_EQ(share_of({.tells_ends = false}), 0.0);
  for (const int update : {1, 3, 8}) {
    OnDisk options{.update = update * kTransfer, .unit = kTransfer};
    TransferTimes known;
    TransferTimes bound;
    const double share = share_of(options, &known);
    options.tells_ends = false;
    EXPECT_LE(share_of(options, &bound), share) << update;
    EXPECT_LE(bound.in_flight, known.in_flight) << update;
    EXPECT_EQ(bound.waited, known.waited) << update;
  }
}

std::size_t place(const std::vector<std::string>& events, const std::string& what, std::size_t from = 0) {
  const auto begin = events.begin() + static_cast<std::ptrdiff_t>(from);
  const auto found = std::find_if(begin, events.end(), [&](const std::string& event) { return event.find(what) == 0; });
  return static_cast<std::size_t>(found - events.begin());
}

TEST(Transfers, TheReadOfALaterUnitBeginsBeforeTheUnitComputes) {
  const auto disk = std::make_shared<SimulatedDisk>(kTransfer);
  (void)train_toy(on_disk(disk, {.filed = kParameters}));
  const std::vector<std::string>& events = disk->events();
  // In the third step; its first units were read ahead in the second.
  int seen = 0;
  for (int unit = 1; unit + 3 <= 8; ++unit) {
    const std::string later = "begin read parameters of unit blocks." + std::to_string(unit + 3 - 1) + " ";
    const std::size_t computes = place(events, "forward of unit " + std::to_string(unit));
    ASSERT_LT(computes, events.size()) << unit;
    const std::size_t reads = place(events, later);
    const std::size_t needed = place(events, "forward of unit " + std::to_string(unit + 3));
    if (reads > needed) continue;  // it was in memory, and is read for the backward only
    EXPECT_LT(reads, computes) << later << "only after the computation of unit " << unit;
    ++seen;
  }
  EXPECT_GE(seen, 3);
}

TEST(Transfers, TheWriteOfABlockOverlapsTheUpdateOfTheNextOne) {
  const auto disk = std::make_shared<SimulatedDisk>(kTransfer);
  (void)train_toy(on_disk(disk, {.update = 3 * kTransfer, .unit = kTransfer}));
  const std::vector<std::string>& events = disk->events();
  std::vector<std::size_t> begun;  // updates of the third step
  std::vector<std::size_t> ended;
  std::vector<std::size_t> writes;
  for (std::size_t at = 0; at < events.size(); ++at) {
    if (events[at] == "begin update") begun.push_back(at);
    if (events[at] == "end update") ended.push_back(at);
    if (events[at].find("begin write states of unit ") == 0) writes.push_back(at);
  }
  ASSERT_EQ(begun.size(), 9U);
  ASSERT_EQ(writes.size(), 9U);
  for (std::size_t block = 0; block + 1 < writes.size(); ++block) {
    EXPECT_LT(writes[block], ended[block + 1]) << block;
    // The clock stands still from the write to the update: who saw its end has waited for it.
    const std::string written = events[writes[block]].substr(std::string("begin ").size());
    EXPECT_GT(place(events, "end " + written, writes[block]), begun[block + 1])
        << written << " was waited for before the next update";
  }
}

TEST(Transfers, ATraceHasUnitsReadsWritesAndWaitsByName) {
  const auto disk = std::make_shared<SimulatedDisk>(kTransfer);
  ToyTraining training = on_disk(disk, {.update = kTransfer, .unit = kTransfer, .filed = kBoth});
  std::string text;
  training.after_step = [&text](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 2) engine.trace_transfers(true);
    if (result.step == 3) text = engine.transfer_trace();
  };
  (void)train_toy(training);
  const auto trace = nlohmann::json::parse(text);
  std::map<int, std::string> rows;
  std::map<std::string, std::vector<std::string>> names;
  std::map<int, double> ends;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "M") {
      if (event.at("name") == "thread_name") rows[event.at("tid")] = event.at("args").at("name");
      continue;
    }
    const int row = event.at("tid");
    names[rows.at(row)].push_back(event.at("name"));
    if (rows.at(row).find("reads") == 0 || rows.at(row).find("writes") == 0) {
      EXPECT_EQ(event.at("args").at("bytes").get<int>() % 4096, 0);
      EXPECT_GE(event.at("ts").get<double>(), ends[row]) << "transfers of one row overlap";
      ends[row] = event.at("ts").get<double>() + event.at("dur").get<double>();
    }
  }
  EXPECT_THAT(names["training"], AllOf(::testing::Contains("forward blocks.3"),
                                       ::testing::Contains("backward blocks.3"), ::testing::Contains("step")));
  EXPECT_THAT(names["reads"], ::testing::Contains(HasSubstr("of unit blocks.")));
  EXPECT_THAT(names["writes"], ::testing::Contains(HasSubstr("states of unit blocks.")));
  EXPECT_THAT(names["waits for files"], ::testing::Contains(HasSubstr(" of unit ")));
  std::size_t writes = 0;
  for (const auto& [row, of_row] : names) writes += row.find("writes") == 0 ? of_row.size() : 0;
  EXPECT_EQ(writes, 18U) << "states and parameters of 9 units";
}

TEST(Transfers, NothingButStatesAndParametersGoesToTheirFiles) {
  for (const Filed filed : {kOptimizerStates, kBoth}) {
    const auto disk = std::make_shared<SimulatedDisk>(kTransfer);
    ToyTraining training = on_disk(disk, {.filed = filed});
    training.micro_steps = 3;
    IoCounters moved;
    TransferReport report;
    std::shared_ptr<IoQueue> queue;
    training.tamper = [&queue, disk, before = training.tamper](int rank, ToyStructure& structure,
                                                               EngineSettings& settings) {
      before(rank, structure, settings);
      settings.storage.own_queue = [&queue, disk](const std::string&, const IoQueueOptions& options) {
        return queue = disk->open(options);
      };
    };
    training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
      if (result.step < 3) return;
      report = engine.transfer_report();
      while (queue->pending() > 0) {  // bytes are counted at the end of a transfer
        disk->compute(kTransfer);
        queue->progress();
      }
      moved = queue->counters();
    };
    (void)train_toy(training);
    queue.reset();
    std::uint64_t read = 0;
    std::uint64_t written = 0;
    for (const TransferRow& row : report.rows) {
      read += row.all.read_bytes;
      written += row.all.write_bytes;
    }
    EXPECT_EQ(moved.bytes_read, read);
    EXPECT_EQ(moved.bytes_written, written);
    EXPECT_GT(moved.bytes_written, 0U);
    for (const std::string& event : disk->events()) {
      if (event.find("begin ") != 0 || event == "begin update") continue;
      EXPECT_TRUE(event.find(" states of unit ") != std::string::npos ||
                  (filed == kBoth && event.find(" parameters of unit ") != std::string::npos))
          << event;
    }
  }
}

}  // namespace
}  // namespace zeroth::test
