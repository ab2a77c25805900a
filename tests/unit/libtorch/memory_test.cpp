// Planned == a closed formula that this test computes itself == measured, exactly: memory by state and bytes
// on the wire.
#include "support/covering_array.h"
#include "support/torch_training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

constexpr std::uint64_t kPage = 4096;

/// One flat buffer of the GPT: each parameter at a multiple of 64 bytes.
struct Flat {
  std::uint64_t length = 0;
  std::uint64_t element = 4;  ///< bytes of a parameter
  std::uint64_t wide = 4;     ///< bytes of a sum or moment; a master has what the parameter lacks of them
  bool repeated = false;
  bool vectors = false;  ///< of 16 bits, with gradients of 32
};

Flat flat_of(const std::vector<std::uint64_t>& sizes, std::uint64_t element, bool repeated) {
  Flat flat{.element = element, .wide = element == 8 ? 8U : 4U, .repeated = repeated};
  const std::uint64_t grain = 64 / element;
  for (const std::uint64_t size : sizes) flat.length += (size + grain - 1) / grain * grain;
  return flat;
}

Flat vector_of(std::uint64_t size) {
  Flat flat = flat_of({size}, 2, true);
  flat.vectors = true;
  return flat;
}

/// The model of torch_training.cpp, written down once more: [unit][flat].
std::vector<std::vector<Flat>> gpt_units(const TorchTraining& training) {
  const auto d = static_cast<std::uint64_t>(training.width);
  std::vector<std::vector<Flat>> units;
  if (training.dtype == DType::kBFloat16) {
    units.push_back({flat_of({17 * d, 5 * d}, 2, false), flat_of({d}, 4, false)});
    for (int layer = 0; layer < training.layers; ++layer) {
      units.push_back(
          {flat_of({d, d}, 4, true), flat_of({3 * d * d, d * d, 2 * d * d, d * d}, 2, true), vector_of(2 * d)});
    }
    return units;
  }
  const std::uint64_t element = training.dtype == DType::kFloat64 ? 8 : 4;
  units.push_back({flat_of({17 * d, 5 * d, d}, element, false)});
  for (int layer = 0; layer < training.layers; ++layer) {
    units.push_back({flat_of({d, 3 * d * d, d * d, d, 2 * d * d, 2 * d, d * d}, element, true)});
  }
  return units;
}

std::uint64_t paged(std::uint64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

/// Bytes of the buffer through which every flat comes in at construction.
std::uint64_t largest_flat(const TorchTraining& training) {
  std::uint64_t largest = 0;
  for (const std::vector<Flat>& unit : gpt_units(training)) {
    for (const Flat& flat : unit) largest = std::max(largest, flat.length * flat.element);
  }
  return largest;
}

/// Bytes of a gradient in its bucket: of a block that one of 16 bits, where nothing is added there.
std::uint64_t gradient_bytes(const TorchTraining& training, const Flat& flat) {
  const bool added =
      training.zero_stage == 0 || (training.policy == ReductionPolicy::kPerStep && training.micro_steps > 1);
  return flat.repeated && !flat.vectors && !added ? flat.element : flat.wide;
}

/// Bytes of slots on one rank: every unit outside the repeated class has its own, the others share `ring`.
std::uint64_t slots(const TorchTraining& training, bool gradients, std::uint64_t ring) {
  std::uint64_t total = 0;
  std::uint64_t in_ring = 0;
  for (const std::vector<Flat>& unit : gpt_units(training)) {
    std::uint64_t bytes = 0;
    for (const Flat& flat : unit) bytes += flat.length * (gradients ? gradient_bytes(training, flat) : flat.element);
    if (unit[0].repeated && in_ring++ >= ring) continue;  // all repeated units are of one size here
    total += bytes;
  }
  return total;
}

/// Sum over ranks, by state.
MemorySnapshot formula(const TorchTraining& training) {
  const auto world = static_cast<std::uint64_t>(training.world);
  const auto units = gpt_units(training);
  const int stage = training.zero_stage;
  MemorySnapshot sum;
  const auto add = [&sum](MemoryState state, std::uint64_t bytes) {
    sum.bytes[static_cast<std::size_t>(state)] += bytes;
  };
  std::uint64_t flats = 0;
  for (const std::vector<Flat>& unit : units) {
    for (const Flat& flat : unit) {
      ++flats;
      const auto at_rest = [&](bool sharded, std::uint64_t bytes) {
        return (sharded ? 1 : world) * flat.length * bytes;  // the shards of all ranks are one whole
      };
      add(MemoryState::kParameter, at_rest(stage >= 3, flat.element));
      if (flat.wide != flat.element) add(MemoryState::kMaster, at_rest(stage >= 1, flat.wide - flat.element));
      add(MemoryState::kOptimizer, 2 * at_rest(stage >= 1, flat.wide));
    }
  }
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  const auto ring = static_cast<std::uint64_t>(training.ring_slots);
  const bool per_step = training.policy == ReductionPolicy::kPerStep;
  const std::uint64_t all_buckets = slots(training, true, kAll);
  const std::uint64_t few_buckets = slots(training, true, ring);
  const bool all_held = stage < 2 || (per_step && training.micro_steps > 1);
  // Reduced once a step: wide sums lie in the buckets of the units that nothing comes after in their slot, which are
  // the first in the model, as many as slots. Sums of 16-bit buckets lie beside them.
  const bool once = training.micro_steps == 1 || per_step;
  std::uint64_t beside_narrow = 0;
  std::uint64_t beside_ring = 0;
  std::uint64_t blocks = 0;
  for (const std::vector<Flat>& unit : units) {
    if (unit[0].repeated) ++blocks;
    for (const Flat& flat : unit) {
      const bool narrow = gradient_bytes(training, flat) != flat.wide;
      if (narrow || !once) beside_narrow += flat.length * flat.wide;
      if (!narrow && once && blocks > ring) beside_ring += flat.length * flat.wide;
    }
  }
  const bool all_in_buckets = once && (all_held || world * all_buckets <= world * few_buckets + beside_ring);
  add(MemoryState::kBucket, world * (all_held || all_in_buckets ? all_buckets : few_buckets));
  add(MemoryState::kReduced, beside_narrow + (all_in_buckets ? 0 : beside_ring));
  // The unit that computes, and one gathered ahead where the device works asynchronously.
  const std::uint64_t at_once = training.mode == ExecutionMode::kInline ? 1 : 2;
  if (stage >= 3)
    add(MemoryState::kGathered,
        world * slots(training, false, training.reshard == Reshard::kNone ? kAll : std::min(ring, at_once)));
  // 16 words of header, epoch, published, tag, and what was taken from each rank, a flat.
  add(MemoryState::kControl, world * paged(8 * (16 + flats * (3 + world))));
  return sum;
}

void expect_planned_memory(const TorchTraining& training) {
  const TorchOutcome got = train_torch(training);
  MemorySnapshot planned;
  MemorySnapshot measured;
  for (const MemoryReport& report : got.memory) {
    EXPECT_EQ(report.planned, report.measured_peak) << training.text() << "\n" << to_text(report);
    EXPECT_EQ(report.overflow_slots, 0U);
    EXPECT_EQ(report.construction_peak, largest_flat(training)) << training.text();
    // Everything planned was touched, and nothing else: within a page for each of the two mappings.
    EXPECT_LE(report.resident, report.planned.total() + 2 * kPage) << training.text();
    EXPECT_GE(report.resident + 2 * kPage, report.planned.total()) << training.text();
    for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
      planned.bytes[state] += report.planned.bytes[state];
      measured.bytes[state] += report.measured_peak.bytes[state];
    }
  }
  const MemorySnapshot expected = formula(training);
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    EXPECT_EQ(expected.bytes[state], planned.bytes[state])
        << training.text() << ": " << name_of(static_cast<MemoryState>(state));
  }
  EXPECT_EQ(expected, measured) << training.text();
}

void expect_planned_wire(const TorchTraining& training) {
  const int stage = training.zero_stage;
  const auto units = gpt_units(training);
  // Received by all ranks together: everything but the own shard, that is world - 1 times the
  // whole.
  std::uint64_t gathered = 0;
  std::uint64_t reduced = 0;
  const auto micro = static_cast<std::uint64_t>(training.micro_steps);
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const bool stays = training.reshard == Reshard::kNone ||
                       (training.reshard == Reshard::kDefault && (unit == 0 || unit + 1 == units.size()));
    for (const Flat& flat : units[unit]) {
      const std::uint64_t parameters = flat.length * flat.element;
      const std::uint64_t gradients = flat.length * gradient_bytes(training, flat);
      if (stage == 0) gathered += flat.length * flat.wide;
      if (stage == 1 || stage == 2) gathered += parameters;
      if (stage == 3) gathered += parameters * micro * (stays ? 1 : 2);
      reduced += gradients * (training.policy == ReductionPolicy::kPerMicroStep ? micro : 1);
    }
  }
  const TorchOutcome got = train_torch(training);
  std::uint64_t all_gather = 0;
  std::uint64_t reduce_scatter = 0;
  std::uint64_t planned = 0;
  for (const TorchWire& wire : got.wire) {
    all_gather += wire.all_gather;
    reduce_scatter += wire.reduce_scatter;
    planned += wire.planned.total();
    EXPECT_EQ(wire.planned.reduce_gradients, wire.reduce_scatter) << training.text();
    EXPECT_EQ(wire.planned.total(), wire.all_gather + wire.reduce_scatter) << training.text();
  }
  EXPECT_EQ(all_gather, 2 * gathered) << training.text();
  EXPECT_EQ(reduce_scatter, 2 * reduced) << training.text();
  EXPECT_EQ(planned, 2 * (gathered + reduced)) << training.text();
}

/// What memory and wire are made of; in `make test` rows in which any two of it meet.
std::vector<TorchTraining> trainings(bool whole) {
  struct Place {
    int stage;
    Reshard reshard;
  };
  constexpr Place kPlaces[] = {{0, Reshard::kDefault}, {1, Reshard::kDefault}, {2, Reshard::kDefault},
                               {3, Reshard::kDefault}, {3, Reshard::kAll},     {3, Reshard::kNone}};
  constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16};
  const std::vector<int> levels{6, 3, 2, 2};
  std::vector<TorchTraining> all;
  for (const FactorRow& row : whole ? whole_grid(levels) : covering_array(levels, 2)) {
    all.push_back({.dtype = kDtypes[row[1]],
                   .layers = 4,
                   .world = 3,
                   .micro_steps = row[2] == 0 ? 1 : 3,
                   .steps = 3,
                   .zero_stage = kPlaces[row[0]].stage,
                   .reshard = kPlaces[row[0]].reshard,
                   .policy = row[3] == 0 ? ReductionPolicy::kPerMicroStep : ReductionPolicy::kPerStep});
  }
  return all;
}

TEST(TorchMemory, PlannedEqualsFormulaEqualsMeasured) {
  for (const TorchTraining& training : trainings(false)) expect_planned_memory(training);
}

TEST(LongTorchMemory, PlannedEqualsFormulaEqualsMeasured) {
  for (const TorchTraining& training : trainings(true)) expect_planned_memory(training);
}

TEST(TorchMemory, WireEqualsFormula) {
  for (const TorchTraining& training : trainings(false)) expect_planned_wire(training);
}

TEST(LongTorchMemory, WireEqualsFormula) {
  for (const TorchTraining& training : trainings(true)) expect_planned_wire(training);
}

TEST(TorchMemory, TwentyFourLayersLiveInThreeSlots) {
  for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
    for (const Reshard reshard : {Reshard::kDefault, Reshard::kAll}) {
      const TorchTraining training{.layers = 24,
                                   .width = 40,
                                   .world = 2,
                                   .micro_steps = 2,
                                   .steps = 4,
                                   .zero_stage = 3,
                                   .reshard = reshard,
                                   .ring_slots = 3,
                                   .mode = mode};
      const TorchOutcome got = train_torch(training);
      std::uint64_t parameters = 0;
      for (const auto& [name, value] : got.values) parameters += value.bytes.size();
      for (const MemoryReport& report : got.memory) {
        EXPECT_LE(report.live_slots_peak, 3) << training.text();
        EXPECT_GE(report.live_slots_peak, 1);
        EXPECT_LT(report.live_gathered_peak, parameters / 5) << training.text();
        EXPECT_EQ(report.overflow_slots, 0U) << training.text();
        EXPECT_EQ(report.planned, report.measured_peak) << training.text() << "\n" << to_text(report);
      }
    }
  }
}

TEST(TorchMemory, NothingGrowsOverTwoHundredSteps) {
  constexpr int kWorld = 2;
  for (const int stage : {0, 3}) {
    std::array<MemorySnapshot, kWorld> early;
    std::array<MemorySnapshot, kWorld> late;
    std::uint64_t early_resident = 0;
    std::uint64_t late_resident = 0;
    std::uint64_t early_total = 0;
    std::uint64_t late_total = 0;
    TorchTraining training{.world = kWorld, .steps = 200, .zero_stage = stage};
    training.after_step = [&](Engine& engine, int step) {
      if (step != 20 && step != 199) return;
      const auto rank = static_cast<std::size_t>(engine.rank());
      (step == 20 ? early : late)[rank] = engine.memory_report().live;
      engine.barrier();
      if (rank == 0) {
        (step == 20 ? early_resident : late_resident) = resident_bytes("zeroth:");
        (step == 20 ? early_total : late_total) = pss_bytes();
      }
      engine.barrier();
    };
    static_cast<void>(train_torch(training));
    EXPECT_EQ(early, late) << "stage " << stage;
    // Zeroth's own mappings by name, within a page each (two a rank, and the transport's); a kernel that does
    // not name private memory says 0 for both. The whole process: 64 KiB lost a step would be 11 MiB.
    EXPECT_LE(late_resident, early_resident + 4 * kWorld * kPage) << "stage " << stage;
    EXPECT_LT(late_total, early_total + (std::uint64_t{8} << 20U)) << "stage " << stage;
  }
}

}  // namespace
}  // namespace zeroth::test
