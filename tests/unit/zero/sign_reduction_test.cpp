// The 1-bit all-reduce of a flat: the bits of an oracle in plain loops on every rank, errors that are fed back, bytes
// as the formula says, parameters that have no gradient.
#include "zero/sign_reduction.h"

#include "support/host_machine.h"
#include "support/thread_ranks.h"

#include <kernels/norm/norm.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/zero/model_layout.h>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace zeroth {
namespace {

constexpr double kBeta = 0.9;
constexpr int kSteps = 4;

/// Sizes that fit neither bytes of signs nor pieces.
ModelLayout layout_of(DType dtype, int world) {
  std::vector<ParamSpec> params;
  for (const std::int64_t n : {4099, 3, 1, 2500, 0, 77}) {
    params.push_back(
        {.name = "p" + std::to_string(params.size()), .shape = {n, 1}, .dtype = dtype});  // one flat for all
  }
  return make_model_layout(std::move(params), {{.name = "root", .params = {0, 1, 2, 3, 4, 5}}}, world);
}

/// The parameter in the middle has no gradient in the second step.
std::vector<bool> active_in(const FlatLayout& flat, int step) {
  std::vector<bool> active;
  for (const Segment& segment : flat.segments) active.push_back(step != 1 || segment.param != 3);
  return active;
}

template <class T>
std::vector<T> gradient_of(const FlatLayout& flat, int rank, int step) {
  std::mt19937 random(static_cast<unsigned>(rank * 101 + step * 7 + 1));
  std::normal_distribution<double> normal;
  std::vector<T> grad(static_cast<std::size_t>(flat.length), T{});
  for (const Segment& segment : flat.segments) {
    for (std::int64_t i = segment.offset; i < segment.offset + segment.numel; ++i)
      grad[static_cast<std::size_t>(i)] = static_cast<T>(static_cast<float>(normal(random) * (1.0 + segment.param)));
  }
  return grad;
}

template <class T>
struct State {
  std::vector<T> momentum;
  std::vector<std::vector<T>> worker;  ///< one a rank
  std::vector<T> server;               ///< of all pieces, in the place of the flat

  State(const FlatLayout& flat, int world)
      : momentum(static_cast<std::size_t>(flat.length), T{}),
        worker(static_cast<std::size_t>(world), momentum),
        server(momentum) {}
};

template <class T>
double scale_of(const T* values, std::int64_t n) {
  kernels::NormAccumulator norm;
  norm.add(values, DTypeOf<T>::value, n, kernels::Isa::kScalar);
  return std::sqrt(norm.sum_of_squares() / static_cast<double>(n));
}

/// One call, as sign_reduction.h says it, element by element on one processor.
template <class T, class Grad>
void oracle_step(const FlatLayout& flat, int world, int step, State<T>& state) {
  const std::vector<bool> active = active_in(flat, step);
  const auto a = static_cast<T>(kBeta);
  const auto b = static_cast<T>(1.0 - kBeta);
  std::vector<T> next = state.momentum;
  for (std::size_t number = 0; number < flat.segments.size(); ++number) {
    const Segment& segment = flat.segments[number];
    if (!active[number] || segment.numel == 0) continue;
    std::vector<std::vector<T>> packed;
    for (int rank = 0; rank < world; ++rank) {
      const std::vector<Grad> grad = gradient_of<Grad>(flat, rank, step);
      std::vector<T>& error = state.worker[static_cast<std::size_t>(rank)];
      for (std::int64_t i = segment.offset; i < segment.offset + segment.numel; ++i) {
        const auto at = static_cast<std::size_t>(i);
        error[at] = error[at] + std::fma(a, state.momentum[at], b * static_cast<T>(static_cast<float>(grad[at])));
      }
      const auto scale = static_cast<T>(scale_of(error.data() + segment.offset, segment.numel));
      packed.emplace_back(static_cast<std::size_t>(flat.length), T{});
      for (std::int64_t i = segment.offset; i < segment.offset + segment.numel && world > 1; ++i) {
        const auto at = static_cast<std::size_t>(i);
        packed.back()[at] = error[at] < T{0} ? -scale : scale;
        error[at] = error[at] - packed.back()[at];
      }
    }
    if (world == 1) {
      for (std::int64_t i = segment.offset; i < segment.offset + segment.numel; ++i) {
        next[static_cast<std::size_t>(i)] = state.worker[0][static_cast<std::size_t>(i)];
        state.worker[0][static_cast<std::size_t>(i)] = T{0};
      }
      continue;
    }
    for (int owner = 0; owner < world; ++owner) {
      const Range piece = flat.shard(owner);
      const std::int64_t begin = std::max(piece.begin, segment.offset);
      const std::int64_t end = std::min(piece.end, segment.offset + segment.numel);
      if (begin >= end) continue;
      for (std::int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        T sum = packed[0][at];
        for (std::size_t rank = 1; rank < packed.size(); ++rank) sum = sum + packed[rank][at];
        state.server[at] = sum * static_cast<T>(1.0 / world) + state.server[at];
      }
      const auto scale = static_cast<T>(scale_of(state.server.data() + begin, end - begin));
      for (std::int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        next[at] = state.server[at] < T{0} ? -scale : scale;
        state.server[at] = state.server[at] - next[at];
      }
    }
  }
  state.momentum = std::move(next);
}

template <class T>
bool same_bits(const T* one, const T* other, std::int64_t n) {
  return std::memcmp(one, other, static_cast<std::size_t>(n) * sizeof(T)) == 0;
}

/// Grad: of what a rank gives.
template <class T, class Grad>
void check(DType dtype, int world) {
  const ModelLayout model = layout_of(dtype, world);
  ASSERT_EQ(model.flats.size(), 1U);
  const FlatLayout& flat = model.flat(0);
  State<T> oracle(flat, world);
  std::vector<State<T>> after;  // of each step
  for (int step = 0; step < kSteps; ++step) {
    oracle_step<T, Grad>(flat, world, step, oracle);
    after.push_back(oracle);
  }
  test::ThreadRanksOptions options;
  std::vector<std::shared_ptr<TrafficTable>> tables;
  for (int rank = 0; rank < world; ++rank) tables.push_back(std::make_shared<TrafficTable>());
  options.group_over = [&](int rank, std::unique_ptr<CommBackend> base, const CommOptions&) {
    return std::make_unique<CountingBackend>(std::move(base), tables[static_cast<std::size_t>(rank)]);
  };
  test::run_ranks(
      world,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        test::HostMachine machine(rank % 2 == 0 ? kernels::best_isa() : kernels::Isa::kScalar);
        const Communicator communicator(backend);
        SignReduction reduction(flat, communicator, *machine.kernels, machine.stream);
        const Range piece = flat.shard(rank);
        std::vector<T> momentum(static_cast<std::size_t>(flat.length), T{});
        std::vector<T> worker(momentum);
        std::vector<T> server(static_cast<std::size_t>(piece.size()), T{});
        const auto bytes_of = [](auto& values) { return reinterpret_cast<std::byte*>(values.data()); };
        for (int step = 0; step < kSteps; ++step) {
          const std::vector<Grad> grad = gradient_of<Grad>(flat, rank, step);
          TrafficTable& table = *tables[static_cast<std::size_t>(rank)];
          table.reset();
          std::vector<std::optional<MessageFactors>> factors;
          for (const bool active : active_in(flat, step)) {
            factors.emplace_back();
            if (active) factors.back() = {.momentum = kBeta, .grad = 1.0 - kBeta};
          }
          reduction.reduce({.momentum = bytes_of(momentum),
                            .grad = reinterpret_cast<const std::byte*>(grad.data()),
                            .grad_dtype = DTypeOf<Grad>::value},
                           factors, bytes_of(worker), bytes_of(server), bytes_of(momentum));
          const State<T>& wanted = after[static_cast<std::size_t>(step)];
          const std::string where = "rank " + std::to_string(rank) + " step " + std::to_string(step);
          test::require(same_bits(momentum.data(), wanted.momentum.data(), flat.length), where + ": the result");
          test::require(same_bits(worker.data(), wanted.worker[static_cast<std::size_t>(rank)].data(), flat.length),
                        where + ": the worker's error");
          test::require(same_bits(server.data(), wanted.server.data() + piece.begin, piece.size()),
                        where + ": the server's error");
          const MessageWire wire = reduction.wire();
          const auto counted = [&table](CollectiveKind kind) {
            return static_cast<std::int64_t>(table.row(kind).bytes);
          };
          test::require(counted(CollectiveKind::kAllToAll) == wire.all_to_all &&
                            counted(CollectiveKind::kAllGather) == wire.all_gather &&
                            static_cast<std::int64_t>(table.bytes()) == wire.all_to_all + wire.all_gather,
                        where + ": bytes " + table.text());
        }
      },
      options);
}

TEST(SignReduction, HasTheBitsOfPlainLoopsAndTheBytesOfItsFormula) {
  for (const int world : {1, 2, 3, 4}) {
    check<float, float>(DType::kFloat32, world);
    check<double, double>(DType::kFloat64, world);
    check<float, BFloat16>(DType::kBFloat16, world);
  }
}

TEST(SignReduction, SendsAThirtySecondOfFloat32BesideScales) {
  constexpr int kWorld = 4;
  constexpr std::int64_t kElements = std::int64_t{1} << 20;
  const ModelLayout model =
      make_model_layout({{.name = "w", .shape = {kElements}}}, {{.name = "root", .params = {0}}}, kWorld);
  test::run_ranks(kWorld, [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    test::HostMachine machine;
    const SignReduction reduction(model.flat(0), Communicator(backend), *machine.kernels, machine.stream);
    const MessageWire wire = reduction.wire();
    constexpr std::int64_t kSigns = kElements / 8 * (kWorld - 1) / kWorld;
    test::require(wire.all_to_all == kSigns, "one way");
    test::require(wire.all_gather == kSigns + 8 * (kWorld - 1) * 2, "and back, with a scale of each rank for each way");
  });
}

}  // namespace
}  // namespace zeroth
