// Gathers and reductions in codes: the bits of an oracle in plain loops, with one hop and with two; errors that are fed
// back; bytes and memory as the formulas say; how well both come through.
#include "zero/coded_calls.h"

#include "support/host_machine.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/decorators.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/model_layout.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace zeroth {
namespace {

struct CodedCase {
  int world = 2;
  int node = 0;
  int bits = 4;
  std::int64_t block = 256;
};
constexpr CodedCase kCodedCases[] = {{2, 0, 4, 256}, {3, 0, 8, 64},  {4, 0, 4, 1024}, {4, 2, 4, 256},
                                     {4, 2, 8, 16},  {6, 3, 4, 256}, {6, 2, 8, 128},  {1, 0, 4, 256}};

ShardingPlan coded_plan_of(const CodedCase& item) {
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.codes = {.parameter_bits = 8, .gradient_bits = item.bits, .node_degree = item.node, .block = item.block};
  plan.validate();
  return plan;
}

/// Lengths that fit neither blocks nor pieces, and one that leaves ranks without a piece.
ModelLayout coded_layout_of(DType dtype, const ShardingPlan& plan, int world) {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (const std::int64_t n : {9001, 130, 3 * 1024 + 16}) {
    params.push_back({.name = "p" + std::to_string(n), .shape = {n, 1}, .dtype = dtype, .separate = true});
    units.push_back({.name = "u" + std::to_string(n), .params = {static_cast<int>(params.size()) - 1}});
  }
  params.push_back({.name = "bias", .shape = {40}, .dtype = dtype, .separate = true});
  units.front().params.push_back(3);
  return make_model_layout(std::move(params), std::move(units), plan.degrees(world));
}

template <class T>
std::vector<T> values_of(const FlatLayout& flat, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<std::size_t>(flat.length), T{});
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<T>(normal(random) * static_cast<float>(1 + i % 7));
  return values;
}

/// What comes of `values` on the way, and what it misses.
std::vector<float> coded(const std::vector<float>& values, std::int64_t block, int bits, std::vector<float>* error) {
  std::vector<float> result(values.size());
  const float most = bits == 8 ? 127.0F : 7.0F;
  for (std::size_t begin = 0; begin < values.size(); begin += static_cast<std::size_t>(block)) {
    const std::size_t end = std::min(values.size(), begin + static_cast<std::size_t>(block));
    float greatest = 0.0F;
    for (std::size_t i = begin; i < end; ++i) greatest = std::max(greatest, std::fabs(values[i]));
    const float scale = greatest / most;
    for (std::size_t i = begin; i < end; ++i) {
      const float code = scale == 0.0F ? 0.0F : std::nearbyint(values[i] / scale) + 0.0F;  // no -0
      result[i] = code * scale;
      if (error != nullptr) (*error)[i] = values[i] - code * scale;
    }
  }
  return result;
}

std::vector<float> slice(const std::vector<float>& values, const Range& range) {
  return {values.begin() + range.begin, values.begin() + range.end};
}

/// The sum over `ranks` of the ranks' messages of one part.
std::vector<float> sum_of(const std::vector<std::vector<float>>& messages) {
  std::vector<float> sum = messages.front();
  for (std::size_t rank = 1; rank < messages.size(); ++rank) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + messages[rank][i];
  }
  return sum;
}

/// Sums of all ranks' `gradients`, in the place of the flat; replaces `errors`.
std::vector<float> oracle(const FlatLayout& flat, const CodedCase& item,
                          const std::vector<std::vector<float>>& gradients, std::vector<std::vector<float>>& errors) {
  const bool two = item.node > 1 && item.node < item.world;
  const int degree = two ? item.node : item.world;
  // By rank: the sum of its node's ranks, of its part.
  std::vector<std::vector<float>> of_node(static_cast<std::size_t>(item.world));
  std::vector<std::vector<float>> next = errors;
  for (int rank = 0; rank < item.world; ++rank) {
    const Range part = flat.part(rank, degree);
    const SubGroup ranks = sub_group_of(rank, degree, 1);
    std::vector<std::vector<float>> messages;
    for (int index = 0; index < ranks.count; ++index) {
      const auto sender = static_cast<std::size_t>(ranks.rank(index));
      std::vector<float> message = slice(gradients[sender], part);
      const std::vector<float> error = slice(errors[sender], part);
      for (std::size_t i = 0; i < message.size(); ++i) message[i] = message[i] + error[i];
      std::vector<float> missed(message.size());
      messages.push_back(coded(message, item.block, item.bits, &missed));
      std::ranges::copy(missed, next[sender].begin() + part.begin);
    }
    of_node[static_cast<std::size_t>(rank)] = sum_of(messages);
  }
  errors = std::move(next);
  std::vector<float> sums(static_cast<std::size_t>(flat.length));
  for (int rank = 0; rank < item.world; ++rank) {
    const Range piece = flat.part(rank, item.world);
    std::vector<float> sum = of_node[static_cast<std::size_t>(rank)];
    if (two) {
      const std::int64_t begin = flat.part(rank, degree).begin;
      const SubGroup ranks = sub_group_of(rank, item.world, degree);
      std::vector<std::vector<float>> messages;
      for (int index = 0; index < ranks.count; ++index) {
        const std::vector<float>& node = of_node[static_cast<std::size_t>(ranks.rank(index))];
        messages.push_back(
            coded(slice(node, {piece.begin - begin, piece.end - begin}), item.block, item.bits, nullptr));
      }
      sum = sum_of(messages);
    }
    std::ranges::copy(sum, sums.begin() + piece.begin);
  }
  return sums;
}

template <class T>
bool same_bits(const std::byte* got, const std::vector<T>& expected) {
  return expected.empty() || std::memcmp(got, expected.data(), expected.size() * sizeof(T)) == 0;
}

template <class T>
std::vector<float> widened(const std::vector<T>& values) {
  std::vector<float> wide;
  for (const T value : values) wide.push_back(static_cast<float>(value));
  return wide;
}

struct Counted {
  std::vector<std::shared_ptr<TrafficTable>> tables;
  test::ThreadRanksOptions options;
  explicit Counted(int world) {
    for (int rank = 0; rank < world; ++rank) tables.push_back(std::make_shared<TrafficTable>());
    options.group_over = [this](int rank, std::unique_ptr<CommBackend> base, const CommOptions&) {
      return std::make_unique<CountingBackend>(std::move(base), tables[static_cast<std::size_t>(rank)]);
    };
  }
};

constexpr int kReductionSteps = 3;

template <class T>
void check_reduction(const CodedCase& item) {
  const ShardingPlan plan = coded_plan_of(item);
  const ModelLayout model = coded_layout_of(DTypeOf<T>::value, plan, item.world);
  // By step and flat.
  std::vector<std::vector<std::vector<float>>> sums(kReductionSteps);
  std::vector<std::vector<std::vector<std::vector<float>>>> errors(kReductionSteps);
  std::vector<std::vector<std::vector<float>>> error_of(model.flats.size());
  const auto seed = [](int rank, int step, std::size_t flat) {
    return rank * 1000 + step * 10 + static_cast<int>(flat);
  };
  for (int step = 0; step < kReductionSteps; ++step) {
    for (std::size_t number = 0; number < model.flats.size(); ++number) {
      const FlatLayout& flat = model.flats[number];
      std::vector<std::vector<float>> gradients;
      for (int rank = 0; rank < item.world; ++rank)
        gradients.push_back(widened(values_of<T>(flat, seed(rank, step, number))));
      if (step == 0)
        error_of[number].assign(static_cast<std::size_t>(item.world),
                                std::vector<float>(static_cast<std::size_t>(flat.length)));
      sums[static_cast<std::size_t>(step)].push_back(oracle(flat, item, gradients, error_of[number]));
      errors[static_cast<std::size_t>(step)].push_back(error_of[number]);
    }
  }
  Counted counted(item.world);
  test::run_ranks(
      item.world,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        test::HostMachine machine(rank % 2 == 0 ? kernels::best_isa() : kernels::Isa::kScalar);
        const auto ledger = MemoryLedger::create();
        CodedReduction reduction(model, plan, *backend, *machine.kernels, machine.stream, *ledger);
        test::require(ledger->live()[MemoryState::kStaging] == code_memory(model, plan, rank).reduction, "memory");
        std::vector<std::vector<float>> own(model.flats.size());
        TrafficTable& table = *counted.tables[static_cast<std::size_t>(rank)];
        for (int step = 0; step < kReductionSteps; ++step) {
          table.reset();
          for (std::size_t number = 0; number < model.flats.size(); ++number) {
            const FlatLayout& flat = model.flats[number];
            if (!has_codes(flat)) continue;
            own[number].resize(static_cast<std::size_t>(flat.length));
            const std::vector<T> bucket = values_of<T>(flat, seed(rank, step, number));
            const std::byte* sum = reduction.reduce(flat, reinterpret_cast<const std::byte*>(bucket.data()), flat.dtype,
                                                    own[number].data());
            const std::string where =
                "rank " + std::to_string(rank) + " step " + std::to_string(step) + " flat " + std::to_string(number);
            test::require(
                same_bits(sum, slice(sums[static_cast<std::size_t>(step)][number], flat.part(rank, item.world))),
                where + ": the sum");
            test::require(same_bits(reinterpret_cast<const std::byte*>(own[number].data()),
                                    errors[static_cast<std::size_t>(step)][number][static_cast<std::size_t>(rank)]),
                          where + ": the errors");
          }
          ShardingPlan vectors = plan;  // of which none has been sent here
          vectors.codes = {};
          std::uint64_t planned = plan_wire(model, plan, rank, 1).reduce_gradients;
          for (const FlatLayout& flat : model.flats) {
            if (!has_codes(flat))
              planned -= array_bytes(flat.shard(rank).size(), flat.accumulation()) *
                         static_cast<std::uint64_t>(item.world - 1);
          }
          test::require(table.row(CollectiveKind::kAllToAll).bytes == planned, "bytes " + table.text());
        }
      },
      counted.options);
}

TEST(CodedReduction, HasTheBitsOfPlainLoopsAndTheBytesOfItsFormula) {
  for (const CodedCase& item : kCodedCases) {
    if (item.world == 1) continue;
    SCOPED_TRACE("world " + std::to_string(item.world) + " nodes of " + std::to_string(item.node) + " bits " +
                 std::to_string(item.bits) + " block " + std::to_string(item.block));
    check_reduction<float>(item);
    check_reduction<BFloat16>(item);
  }
}

TEST(CodedGather, GivesEveryRankTheValuesOfCodes) {
  for (const CodedCase& item : kCodedCases) {
    if (item.world == 1) continue;
    const ShardingPlan plan = coded_plan_of(item);
    const ModelLayout model = coded_layout_of(DType::kBFloat16, plan, item.world);
    const CodeHop hop = hop_of_parameters(plan.degrees(item.world));
    test::run_ranks(item.world, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
      test::HostMachine machine(rank % 2 == 0 ? kernels::best_isa() : kernels::Isa::kScalar);
      const auto ledger = MemoryLedger::create();
      SubGroupCalls calls(model, *backend, hop.from, hop.to, "parameters");
      CodedGather gather(model, plan, calls, rank, *machine.kernels, machine.stream, *ledger);
      test::require(ledger->live()[MemoryState::kStaging] == code_memory(model, plan, rank).gather, "memory");
      for (std::size_t number = 0; number < model.flats.size(); ++number) {
        const FlatLayout& flat = model.flats[number];
        if (!has_codes(flat)) continue;
        const std::vector<BFloat16> all = values_of<BFloat16>(flat, static_cast<int>(number));
        const Range own = flat.part(rank, hop.from);
        const Range part = flat.part(rank, hop.to);
        std::vector<BFloat16> got(static_cast<std::size_t>(part.size()));
        gather.gather(CallPurpose::kGatherParameters, flat, reinterpret_cast<const std::byte*>(all.data() + own.begin),
                      reinterpret_cast<std::byte*>(got.data()));
        std::vector<BFloat16> expected;
        for (const float value : coded(slice(widened(all), part), item.block, 8, nullptr)) expected.emplace_back(value);
        test::require(same_bits(reinterpret_cast<const std::byte*>(got.data()), expected),
                      "rank " + std::to_string(rank) + " flat " + std::to_string(number));
      }
    });
  }
}

TEST(CodedReduction, ErrorsThatAreFedBackMakeTheMeanOverStepsRight) {
  constexpr CodedCase kCodedCase{4, 0, 4, 256};
  const ShardingPlan plan = coded_plan_of(kCodedCase);
  const ModelLayout model = coded_layout_of(DType::kFloat32, plan, kCodedCase.world);
  const FlatLayout& flat = model.flats.front();
  const auto error_after = [&](int steps, bool feedback) {
    double worst = 0;
    std::vector<std::vector<float>> errors(4, std::vector<float>(static_cast<std::size_t>(flat.length)));
    std::vector<double> got(static_cast<std::size_t>(flat.length));
    std::vector<double> right(got);
    for (int step = 0; step < steps; ++step) {
      std::vector<std::vector<float>> gradients;
      for (int rank = 0; rank < 4; ++rank) gradients.push_back(values_of<float>(flat, rank));  // always the same
      if (!feedback) errors.assign(4, std::vector<float>(static_cast<std::size_t>(flat.length)));
      const std::vector<float> sums = oracle(flat, kCodedCase, gradients, errors);
      for (std::size_t i = 0; i < sums.size(); ++i) {
        got[i] += sums[i];
        for (const std::vector<float>& one : gradients) right[i] += one[i];
      }
    }
    for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::fabs(got[i] - right[i]) / steps);
    return worst;
  };
  EXPECT_LT(error_after(64, true), error_after(64, false) / 20);
}

TEST(CodedReduction, SendsAQuarterOfBfloat16BetweenNodes) {
  CodedCase item{4, 2, 4, 256};
  ShardingPlan plan = coded_plan_of(item);
  constexpr std::int64_t kElements = std::int64_t{1} << 20;
  ModelLayout model = make_model_layout({{.name = "w", .shape = {kElements / 1024, 1024}, .dtype = DType::kBFloat16}},
                                        {{.name = "root", .params = {0}}}, plan.degrees(4));
  plan.codes.parameter_bits = 8;
  const NodeLevels nodes{.node_sizes = {2, 2}};
  const auto far = [&](const ShardingPlan& one) { return plan_far_wire(model, one, 0, 1, nodes); };
  // Of the bytes of all parameters: what a node of two ranks gets, when each of both gets half of it.
  constexpr double kBytes = 2.0 * kElements;
  const auto share = [&](std::uint64_t bytes) { return 2.0 * static_cast<double>(bytes) / kBytes; };
  ShardingPlan plain = zero_plan(3, {"dp"});
  plain.reshard = Reshard::kAll;
  plan.reshard = Reshard::kAll;
  constexpr double kScales = 4.0 / 256.0;  // bytes an element
  EXPECT_DOUBLE_EQ(share(far(plan).reduce_gradients), (0.5 + kScales) / 2 / 2);
  EXPECT_DOUBLE_EQ(share(far(plan).gather_parameters), (1.0 + kScales) / 2 / 2);
  EXPECT_EQ(far(plan).publish_parameters, 0U);
}

}  // namespace
}  // namespace zeroth
