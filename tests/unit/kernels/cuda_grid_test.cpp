// The bodies of the CUDA kernels, <op>_grid.h, on the host: every thread of small grids, one after the other
// in an order drawn from a seed, gives the bits of the CPU kernels and writes every element once. What a
// device adds, launches and exchanges inside a warp, is in tests/cuda.
#include "on_grid_cases.h"
#include "support/grid_threads.h"

#include <kernels/adamw/adamw_grid.h>
#include <kernels/bucket/bucket_grid.h>
#include <kernels/cast/cast_grid.h>
#include <kernels/lamb/lamb_grid.h>
#include <kernels/lion/lion_grid.h>
#include <kernels/lowrank/lowrank_grid.h>
#include <kernels/norm/norm_grid.h>
#include <kernels/quant/quant_grid.h>
#include <kernels/reduce/extreme_grid.h>
#include <kernels/reduce/reduce_grid.h>
#include <kernels/rows/rows_grid.h>
#include <kernels/sgd/sgd_grid.h>
#include <kernels/signs/signs_grid.h>
#include <kernels/topk/topk_grid.h>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

/// Memory of the machine that is this process: a copy at the misalignment that is asked for.
template <class T>
class HostArray {
 public:
  HostArray(const GuardedArray<T>& from, std::int64_t misalign) : array_(from.size(), misalign) {
    std::copy_n(from.data(), from.size(), array_.data());
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;

  [[nodiscard]] T* data() const { return array_.data(); }
  [[nodiscard]] std::vector<T> to_host() const { return {data(), data() + array_.size()}; }
  [[nodiscard]] ::testing::AssertionResult has_bits_of(const GuardedArray<T>& want) const {
    return same_bits(want, array_);
  }

 private:
  mutable GuardedArray<T> array_;
};

/// kMost: sources of one launch.
template <int kMost>
class GridMachine {
 public:
  template <class T>
  using Array = HostArray<T>;

  explicit GridMachine(std::int64_t threads, std::uint64_t seed = kSeed) : threads_(threads, seed) {}

  bool adamw(const AdamWArgs& args) {
    return run([&](auto& launch) { return adamw_on_grid(args, launch); });
  }
  bool sgd(const SgdArgs& args) {
    return run([&](auto& launch) { return sgd_on_grid(args, launch); });
  }
  bool lion(const LionArgs& args) {
    return run([&](auto& launch) { return lion_on_grid(args, launch); });
  }
  bool lamb_measure(const LambArgs& args) {
    ScrambledThreads warps(threads_.count() * kNormLanes, kSeed);
    return lamb_measure_on(warps, args);
  }
  bool lamb_apply(const LambArgs& args) {
    return run([&](auto& launch) { return lamb_apply_on_grid(args, launch); });
  }
  bool cast(const detail::CastArgs& args) {
    return run([&](auto& launch) { return cast_on_grid(args, launch); });
  }
  bool bucket(const detail::BucketArgs& args, std::int64_t* nonfinite) {
    const auto launch = [&](const auto& body, std::int64_t) {
      threads_.each([&](GridThread thread) { *nonfinite += body(thread); });
    };
    return bucket_on_grid(args, launch);
  }
  bool sum(const SumSourcesArgs& args) {
    GuardedArray<std::uint8_t> workspace(sum_workspace_bytes<kMost>(args));
    std::fill_n(workspace.data(), workspace.size(), std::uint8_t{0x5a});
    const bool good = run([&](auto& launch) {
      return sum_on_grid<kMost>(args, workspace.size() == 0 ? nullptr : workspace.data(), launch);
    });
    EXPECT_TRUE(workspace.guards_intact()) << "wrote outside the workspace";
    return good;
  }
  bool extreme(const ExtremeSourcesArgs& args) {
    GuardedArray<std::uint8_t> workspace(extreme_workspace_bytes<kMost>(args));
    const bool good = run([&](auto& launch) {
      return extreme_on_grid<kMost>(args, workspace.size() == 0 ? nullptr : workspace.data(), launch);
    });
    EXPECT_TRUE(workspace.guards_intact()) << "wrote outside the workspace";
    return good;
  }
  bool norm(const void* src, DType dtype, std::int64_t n, double* sums) {
    return norm_blocks_on(threads_, src, dtype, n, sums);
  }

  bool quantize(const QuantizeArgs& args) {
    return run([&](auto& launch) { return quantize_on(threads_, args, launch); });
  }
  bool dequantize(const DequantizeArgs& args) {
    return run([&](auto& launch) { return dequantize_on_grid<kMost>(args, launch); });
  }
  bool sign_message(const SignMessageArgs& args) {
    return run([&](auto& launch) { return sign_message_on_grid(args, launch); });
  }
  bool sign_pack(const SignPackArgs& args) {
    return run([&](auto& launch) { return sign_pack_on_grid(args, launch); });
  }
  bool sign_sum(const SignSumArgs& args) {
    return run([&](auto& launch) { return sign_sum_on_grid<kMost>(args, launch); });
  }

  bool topk(const TopkArgs& args) {
    GuardedArray<std::int64_t> workspace((topk_workspace_bytes(args.n) + 7) / 8);
    std::fill_n(workspace.data(), workspace.size(), std::int64_t{0x5a5a5a5a});
    const bool good = in_teams([&](auto& launch) { return topk_on_grid(args, workspace.data(), launch); });
    EXPECT_TRUE(workspace.guards_intact()) << "wrote outside the workspace";
    return good;
  }
  bool topk_outside(const TopkAddArgs& args, std::int64_t* outside) {
    const auto launch = [&](const auto& body, std::int64_t) {
      threads_.each([&](GridThread thread) { *outside += body(thread); });
    };
    return topk_outside_on_grid(args, launch);
  }
  bool topk_add(const TopkAddArgs& args) {
    return run([&](auto& launch) { return topk_add_on_grid(args, launch); });
  }
  bool lowrank_product(const LowRankProductArgs& args) {
    return in_teams([&](auto& launch) { return lowrank_product_on_grid(args, launch); });
  }
  bool lowrank_transposed_product(const LowRankProductArgs& args) {
    return in_teams([&](auto& launch) { return lowrank_transposed_on_grid(args, launch); });
  }
  bool lowrank_restore(const LowRankRestoreArgs& args) {
    return in_teams([&](auto& launch) { return lowrank_restore_on_grid(args, launch); });
  }
  bool lowrank_orthonormalize(const OrthonormalizeArgs& args) {
    return in_teams([&](auto& launch) { return lowrank_orthonormalize_on_grid(args, launch); });
  }
  bool lowrank_draw_missing(const LowRankDrawArgs& args) {
    return in_teams([&](auto& launch) { return lowrank_draw_missing_on_grid(args, launch); });
  }

  [[nodiscard]] int launches() const { return threads_.launches; }

 private:
  template <class Call>
  bool run(const Call& call) {
    const auto launch = [&](const auto& body, std::int64_t) { threads_.each(body); };
    return call(launch);
  }
  template <class Call>
  bool in_teams(const Call& call) {
    ScrambledLaunch launch(threads_, kSeed);
    return call(launch);
  }

  ScrambledThreads threads_;
};

constexpr std::array<std::int64_t, 17> kSizes{0, 1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 130, 1023, 1024, 1025, 2051, 4099};

/// Every size at every misalignment on grids of several widths, with edges and with ordinary numbers.
template <int kMost = kMostSources, class Check>
void on_small_grids(const Check& check) {
  for (const std::int64_t n : kSizes) {
    for (const std::int64_t misalign : {0, 1, 3}) {
      for (const std::int64_t threads : {1, 7, 129}) {
        const std::uint64_t seed = kSeed + static_cast<std::uint64_t>(n * 7 + misalign + threads / 2);
        GridMachine<kMost> machine(threads, seed);
        ASSERT_TRUE(check(machine, Range{n, misalign, seed})) << Range{n, misalign, seed} << " threads " << threads;
        ASSERT_EQ(machine.launches() > 0, n > 0);
      }
    }
  }
}

template <class T>
class CastOnGrid : public ::testing::Test {};
TYPED_TEST_SUITE(CastOnGrid, CastPairs);

TYPED_TEST(CastOnGrid, GivesTheBitsOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  on_small_grids([](auto& machine, const Range& range) { return cast_matches<In, Out>(machine, range); });
  GridMachine<kMostSources> machine(259);
  for (const std::uint64_t seed : {2U, 4U, 6U}) {  // many patterns: which NaN comes out of a NaN
    ASSERT_TRUE((cast_matches<In, Out>(machine, {200'003, 0, seed}))) << seed;
  }
}

template <class T>
class UpdateOnGrid : public ::testing::Test {};
using StateTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(UpdateOnGrid, StateTypes);

TYPED_TEST(UpdateOnGrid, OfAdamWGivesTheBitsOfTheCpu) {
  for (const bool decoupled : {true, false}) {
    for (const Storage storage : kStorages) {
      const AdamWHyper hyper{
          .lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.1, .decoupled = decoupled, .factor = 1.0 / 6.0, .step = 7};
      on_small_grids(
          [&](auto& machine, const Range& range) { return adamw_matches<TypeParam>(machine, hyper, storage, range); });
    }
  }
}

TYPED_TEST(UpdateOnGrid, OfAdamWWithoutAGradientGivesTheBitsOfTheCpu) {
  for (const Storage storage : kStorages) {
    const AdamWHyper hyper{.lr = 3e-4, .weight_decay = 0.1, .step = 7, .variance_step = 5};
    on_small_grids([&](auto& machine, const Range& range) {
      return adamw_matches<TypeParam>(machine, hyper, storage, range, true);
    });
  }
}

TYPED_TEST(UpdateOnGrid, OfSgdGivesTheBitsOfTheCpu) {
  for (const SgdHyper& hyper : sgd_forms()) {
    for (const Storage storage : kStorages) {
      on_small_grids(
          [&](auto& machine, const Range& range) { return sgd_matches<TypeParam>(machine, hyper, storage, range); });
    }
  }
}

TYPED_TEST(UpdateOnGrid, OfLionGivesTheBitsOfTheCpu) {
  for (const double decay : {0.0, 0.1}) {
    for (const Storage storage : kStorages) {
      const LionHyper hyper{.lr = 0.03, .weight_decay = decay, .factor = 1.0 / 6.0};
      on_small_grids(
          [&](auto& machine, const Range& range) { return lion_matches<TypeParam>(machine, hyper, storage, range); });
    }
  }
}

TYPED_TEST(UpdateOnGrid, OfLambGivesTheBitsOfTheCpu) {
  for (const LambForm form : kLambForms) {
    for (const Storage storage : kStorages) {
      on_small_grids(
          [&](auto& machine, const Range& range) { return lamb_matches<TypeParam>(machine, form, storage, range); });
    }
  }
}

template <class T>
class BucketOnGrid : public ::testing::Test {};
using Buckets =
    ::testing::Types<Pair<float, float>, Pair<BFloat16, float>, Pair<BFloat16, BFloat16>, Pair<double, double>>;
TYPED_TEST_SUITE(BucketOnGrid, Buckets);

TYPED_TEST(BucketOnGrid, GivesTheBitsAndTheCountOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  for (const bool add : {false, true}) {
    if (add && std::is_same_v<Out, BFloat16>) continue;
    on_small_grids([&](auto& machine, const Range& range) { return bucket_matches<In, Out>(machine, add, range); });
  }
}

template <class T>
class SumOnGrid : public ::testing::Test {};
TYPED_TEST_SUITE(SumOnGrid, SumPairs);

const std::vector<SumCase>& sum_cases() {
  static const std::vector<SumCase> cases{{.num_sources = 1},
                                          {.num_sources = 2, .accumulate = true},
                                          {.num_sources = 3},
                                          {.num_sources = 6, .accumulate = true},
                                          {.num_sources = 17},
                                          {.num_sources = 4, .groups = {2, 2}},
                                          {.num_sources = 4, .groups = {1, 3}, .accumulate = true},
                                          {.num_sources = 5, .groups = {1, 1, 1, 1, 1}},
                                          {.num_sources = 13, .groups = {3, 1, 7, 2}, .accumulate = true},
                                          {.num_sources = 14, .groups = {6, 3, 5}}};
  return cases;
}

TYPED_TEST(SumOnGrid, GivesTheBitsOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  for (SumCase c : sum_cases()) {
    for (const bool mixed : {false, true}) {
      if (mixed && !std::is_same_v<In, float>) continue;
      c.mixed = mixed;
      SCOPED_TRACE(::testing::PrintToString(c));
      on_small_grids([&](auto& machine, const Range& range) { return sum_matches<In, Out>(machine, c, range); });
    }
  }
}

// At most 3 sources a launch, so that groups end inside, at the end and right after the end of launches.
TYPED_TEST(SumOnGrid, InSeveralLaunchesGivesTheBitsOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  for (SumCase c : sum_cases()) {
    for (const bool mixed : {false, true}) {
      if (mixed && !std::is_same_v<In, float>) continue;
      c.mixed = mixed;
      SCOPED_TRACE(::testing::PrintToString(c));
      on_small_grids<3>([&](auto& machine, const Range& range) { return sum_matches<In, Out>(machine, c, range); });
    }
  }
}

TYPED_TEST(SumOnGrid, InPlaceOfAnySourceGivesTheBitsOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  if constexpr (std::is_same_v<In, Out>) {
    for (int source = 0; source < 8; ++source) {
      const SumCase c{.num_sources = 8, .groups = {5, 3}, .in_place_of = source};
      SCOPED_TRACE(::testing::PrintToString(c));
      on_small_grids([&](auto& machine, const Range& range) { return sum_matches<In, Out>(machine, c, range); });
      on_small_grids<3>([&](auto& machine, const Range& range) { return sum_matches<In, Out>(machine, c, range); });
    }
  }
}

TEST(SumOnGridLimits, MoreSourcesThanALaunchTakes) {
  for (const int num_sources :
       {kMostSources - 1, kMostSources, kMostSources + 1, 2 * kMostSources, 3 * kMostSources + 5}) {
    for (const std::uint64_t seed : {1U, 2U}) {
      GridMachine<kMostSources> machine(7);
      const SumCase c{.num_sources = num_sources};
      ASSERT_TRUE((sum_matches<float, float>(machine, c, {101, 0, seed}))) << num_sources;
      EXPECT_EQ(machine.launches(), (num_sources + kMostSources - 1) / kMostSources);
      const SumCase grouped{.num_sources = num_sources, .groups = {num_sources - 50, 20, 30}, .accumulate = true};
      ASSERT_TRUE((sum_matches<BFloat16, BFloat16>(machine, grouped, {101, 1, seed}))) << num_sources;
    }
  }
}

template <class T>
class ExtremeOnGrid : public ::testing::Test {};
using Extremes = ::testing::Types<double, float, BFloat16, Float16, std::int64_t, std::int32_t, std::uint8_t>;
TYPED_TEST_SUITE(ExtremeOnGrid, Extremes);

TYPED_TEST(ExtremeOnGrid, GivesTheBitsOfTheCpu) {
  for (const int num_sources : {1, 2, 3, 7}) {
    for (const bool greatest : {false, true}) {
      for (int source = -1; source < num_sources; ++source) {
        const auto check = [&](auto& machine, const Range& range) {
          return extreme_matches<TypeParam>(machine, num_sources, greatest, source, range);
        };
        on_small_grids(check);
        on_small_grids<2>(check);
      }
    }
  }
}

template <class T>
class NormOnGrid : public ::testing::Test {};
using NormTypes = ::testing::Types<float, double, BFloat16>;
TYPED_TEST_SUITE(NormOnGrid, NormTypes);

TYPED_TEST(NormOnGrid, GivesTheSumsAndTheWordsOfTheCpu) {
  for (const std::int64_t n : {0, 1, 3, 31, 32, 33, 1000, 1023, 1024, 1025, 2048, 5000, 40'961}) {
    for (const std::int64_t misalign : {0, 1, 3}) {
      for (const std::int64_t warps : {1, 3, 41}) {
        for (std::uint64_t seed = 1; seed <= 4; ++seed) {
          GridMachine<kMostSources> machine(warps * kNormLanes, seed);
          const Range range{n, misalign, seed};
          ASSERT_TRUE(norm_matches<TypeParam>(machine, range)) << range << " warps " << warps;
        }
      }
    }
  }
}

TEST(NormAddBlocks, GivesTheWordsOfMergedBlocksWithCarriesBetween) {
  constexpr std::size_t kBlocks = (std::size_t{1} << 18U) + 77;
  std::vector<double> sums(kBlocks, std::numeric_limits<double>::max());
  for (std::size_t i = 0; i < kBlocks; i += 3) sums[i] = 0x1.fffffffffffffp-1023 * static_cast<double>(i % 7);
  sums[5] = std::numeric_limits<double>::infinity();
  sums[9] = std::numeric_limits<double>::quiet_NaN();
  NormAccumulator together;
  together.add_blocks(sums);
  NormAccumulator in_parts;
  for (std::size_t at = 0; at < kBlocks; at += 1001) {
    NormAccumulator part;
    part.add_blocks(std::span(sums).subspan(at, std::min<std::size_t>(1001, kBlocks - at)));
    in_parts.merge(part);
  }
  EXPECT_EQ(together.num_blocks(), static_cast<std::int64_t>(kBlocks));
  EXPECT_EQ(together.nonfinite_blocks(), 2);
  EXPECT_TRUE(std::equal(together.words().begin(), together.words().end(), in_parts.words().begin()));
}

/// Launches a body on several grids and sees that every element of [first, first + n) is written by one
/// thread, and that the threads that are said to have work have some. A written element is one that is not
/// `unlike` any more, a value that no result has.
template <class T>
class WriteCounter {
 public:
  WriteCounter(T* first, std::int64_t n, T unlike) : first_(first), n_(static_cast<std::size_t>(n)), unlike_(unlike) {}

  template <class Body>
  void operator()(const Body& body, std::int64_t useful) const {
    for (const std::int64_t threads : {std::int64_t{5}, useful, useful + 3}) {
      std::vector<int> writes(n_);
      for (std::int64_t index = 0; index < threads; ++index) {
        std::fill_n(first_, n_, unlike_);
        body(GridThread{index, threads});
        bool worked = false;
        for (std::size_t i = 0; i < n_; ++i) {
          const bool written = std::memcmp(first_ + i, &unlike_, sizeof(T)) != 0;
          writes[i] += written ? 1 : 0;
          worked = worked || written;
        }
        EXPECT_EQ(worked, index < useful) << "thread " << index << " of " << threads << ", useful " << useful;
      }
      EXPECT_EQ(static_cast<std::size_t>(std::count(writes.begin(), writes.end(), 1)), n_);
    }
  }

 private:
  T* first_;
  std::size_t n_;
  T unlike_;
};

TEST(WritesOnGrid, EveryElementIsWrittenByOneThread) {
  for (const std::int64_t n : {1, 3, 4, 5, 31, 130, 515}) {
    for (const std::int64_t misalign : {0, 1}) {
      SCOPED_TRACE(::testing::PrintToString(n) + " misalign " + ::testing::PrintToString(misalign));
      GuardedArray<float> src(n, misalign);
      std::fill_n(src.data(), n, 2.0F);
      const std::array<const void*, 3> sources{src.data(), src.data(), src.data()};
      GuardedArray<double> wide(n, misalign);
      GuardedArray<BFloat16> narrow(n, misalign);
      GuardedArray<float> same(n, misalign);
      const WriteCounter<double> wide_writes(wide.data(), n, -1.0);
      const WriteCounter<BFloat16> narrow_writes(narrow.data(), n, BFloat16(-1.0F));
      const WriteCounter<float> same_writes(same.data(), n, -1.0F);
      EXPECT_TRUE(cast_on_grid({wide.data(), DType::kFloat64, src.data(), DType::kFloat32, n}, wide_writes));
      EXPECT_TRUE(cast_on_grid({narrow.data(), DType::kBFloat16, src.data(), DType::kFloat32, n}, narrow_writes));
      EXPECT_TRUE(bucket_on_grid({same.data(), DType::kFloat32, src.data(), DType::kFloat32, n, false}, same_writes));
      EXPECT_TRUE(bucket_on_grid({same.data(), DType::kFloat32, src.data(), DType::kFloat32, n, true}, same_writes));
      EXPECT_TRUE(
          sum_on_grid({.dst = same.data(), .sources = sources.data(), .num_sources = 3, .n = n}, nullptr, same_writes));
      EXPECT_TRUE(extreme_on_grid({.dst = same.data(), .sources = sources.data(), .num_sources = 3, .n = n}, nullptr,
                                  same_writes));
      EXPECT_TRUE(sgd_on_grid({.param = same.data(), .grad = src.data(), .n = n}, same_writes));
      EXPECT_TRUE(same.guards_intact() && wide.guards_intact() && narrow.guards_intact());
    }
  }
}

TEST(RowsOnGrid, AreThoseOfTheIndices) {
  constexpr std::int64_t kRows = 9;
  const std::vector<std::int64_t> indices{3, 0, 8, 3, -1, 9, 7};
  const auto n = static_cast<std::int64_t>(indices.size());
  for (const std::int64_t dim : {1, 3, 4, 8, 30}) {
    for (const std::int64_t misalign : {0, 1}) {
      for (const std::int64_t threads : {1, 7, 64}) {
        GuardedArray<float> table(kRows * dim, misalign);
        for (std::int64_t i = 0; i < kRows * dim; ++i) table.data()[i] = static_cast<float>(i);
        GuardedArray<float> out(n * dim);
        ScrambledThreads some(threads, kSeed);
        const auto launch = [&](const auto& body, std::int64_t) { some.each(body); };
        ASSERT_TRUE(gather_rows_on_grid(
            {.table = table.data(), .rows = kRows, .dim = dim, .indices = indices.data(), .out = out.data(), .n = n},
            launch));
        EXPECT_TRUE(out.guards_intact());
        for (std::int64_t i = 0; i < n * dim; ++i) {
          const std::int64_t row = indices[static_cast<std::size_t>(i / dim)];
          const float got = out.data()[i];
          if (row < 0 || row >= kRows) {
            EXPECT_TRUE(std::isnan(got)) << i;
          } else {
            EXPECT_EQ(got, static_cast<float>(row * dim + i % dim)) << "dim " << dim << ", element " << i;
          }
        }
      }
    }
  }
}

template <class T>
class SignsOnGrid : public ::testing::Test {};
TYPED_TEST_SUITE(SignsOnGrid, StateTypes);

TYPED_TEST(SignsOnGrid, GiveTheBitsOfTheCpu) {
  using T = TypeParam;
  for (const bool with_momentum : {false, true}) {
    on_small_grids(
        [&](auto& machine, const Range& range) { return sign_message_matches<T, T>(machine, with_momentum, range); });
    if constexpr (std::is_same_v<T, float>) {
      on_small_grids([&](auto& machine, const Range& range) {
        return sign_message_matches<T, BFloat16>(machine, with_momentum, range);
      });
      on_small_grids([&](auto& machine, const Range& range) {
        return sign_message_matches<T, Float16>(machine, with_momentum, range);
      });
    }
  }
  on_small_grids([](auto& machine, const Range& range) { return sign_pack_matches<T>(machine, range); });
  for (const SumError where : {SumError::kNone, SumError::kBeside, SumError::kInPlace}) {
    on_small_grids([&](auto& machine, const Range& range) { return sign_sum_matches<T>(machine, 3, where, range); });
    if (where == SumError::kInPlace) continue;
    // Seven sources in launches of three.
    on_small_grids<3>([&](auto& machine, const Range& range) { return sign_sum_matches<T>(machine, 7, where, range); });
  }
}

TEST(CodesOnGrid, GiveTheBitsOfTheCpu) {
  // Whole warps look for the scale of a block.
  const auto on_warps = [](const auto& check) {
    for (const std::int64_t n : kSizes) {
      for (const std::int64_t misalign : {0, 1}) {
        for (const std::int64_t threads : {32, 96}) {
          const std::uint64_t seed = kSeed + static_cast<std::uint64_t>(n * 7 + misalign + threads / 32);
          GridMachine<kMostSources> machine(threads, seed);
          ASSERT_TRUE(check(machine, Range{n, misalign, seed})) << Range{n, misalign, seed} << " threads " << threads;
        }
      }
    }
  };
  for (const CodeCase& c : code_cases()) {
    on_warps([&](auto& machine, const Range& range) { return quantize_matches<float>(machine, c, range); });
    on_warps([&](auto& machine, const Range& range) { return quantize_matches<BFloat16>(machine, c, range); });
    on_warps([&](auto& machine, const Range& range) { return quantize_matches<Float16>(machine, c, range); });
    on_warps([&](auto& machine, const Range& range) { return dequantize_matches<BFloat16>(machine, c, 1, range); });
    on_warps([&](auto& machine, const Range& range) { return dequantize_matches<float>(machine, c, 3, range); });
  }
  on_small_grids<3>(
      [](auto& machine, const Range& range) { return dequantize_matches<float>(machine, CodeCase{}, 7, range); });
}

template <class T>
class TopkOnGrid : public ::testing::Test {};
using TopkTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(TopkOnGrid, TopkTypes);

TYPED_TEST(TopkOnGrid, HasTheBitsOfTheCpu) {
  for (const TopkCase& c : topk_cases()) {
    SCOPED_TRACE(::testing::PrintToString(c));
    on_small_grids([&](auto& machine, const Range& range) { return topk_matches<TypeParam>(machine, c, range); });
  }
}

TEST(TopkRangeOnGrid, OfMoreBlocksThanAScanHasLanesHasTheBitsOfTheCpu) {
  for (const TopkCase& c : {TopkCase{.per_mille = 50}, TopkCase{.per_mille = 300, .with_error = true, .values = 2}}) {
    GridMachine<kMostSources> machine(5);
    ASSERT_TRUE(topk_matches<float>(machine, c, {kScanLanes * kTopkBlock + 70'003, 1, 1})) << c;
  }
}

TEST(TopkSumOnGrid, HasTheBitsOfTheCpu) {
  for (const int sources : {1, 2, 7}) {
    for (const std::int64_t n : kSizes) {
      for (const std::uint64_t seed : {1U, 2U}) {
        GridMachine<kMostSources> machine(1 + n % 9, seed);
        ASSERT_TRUE(topk_add_matches(machine, sources, {n, 1, seed})) << n << " of " << sources;
      }
    }
  }
}

TEST(LowRankOnGrid, ProductsHaveTheBitsOfTheCpu) {
  for (const LowRankShape& shape : lowrank_shapes()) {
    for (const std::int64_t threads : {1, 3, 50}) {
      for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        GridMachine<kMostSources> machine(threads, seed);
        ASSERT_TRUE(lowrank_matches(machine, shape, static_cast<std::int64_t>(seed % 4), seed))
            << text_of(shape) << " threads " << threads << " seed " << seed;
      }
    }
  }
}

// Every lane of the sum is -0 here, but those to which zeros are added for columns that are missing.
TEST(LowRankOnGrid, ASumOfUnderflowsHasTheSignOfTheCpu) {
  for (const std::int64_t columns : {15, 16, 17, 31, 32, 33}) {
    GuardedArray<float> matrix(columns);
    GuardedArray<float> factor(columns);
    std::fill_n(matrix.data(), columns, 1e-30F);
    std::fill_n(factor.data(), columns, -1e-30F);
    GuardedArray<float> want(1);
    GuardedArray<float> got(1);
    LowRankProductArgs args{.shape = {.rows = 1, .columns = columns, .stride = columns},
                            .matrix = matrix.data(),
                            .factor = factor.data(),
                            .factor_stride = columns,
                            .result = got.data(),
                            .result_stride = 1};
    ASSERT_TRUE(GridMachine<kMostSources>(1).lowrank_product(args));
    args.result = want.data();
    lowrank_product(args, Isa::kScalar);
    EXPECT_TRUE(same_bits(want, got)) << columns;
    EXPECT_EQ(std::signbit(got[0]), columns % kRankLanes == 0) << columns;
  }
}

TEST(LowRankOnGrid, ColumnsAreMadeOrthonormalAndDrawnWithTheBitsOfTheCpu) {
  for (const int rank : {1, 2, 4, 9, 64}) {
    for (const std::int64_t n : {0, 1, 5, 16, 17, 100, 515}) {
      for (const std::int64_t threads : {1, 7, 256}) {
        if (rank == 64 && threads != 7) continue;
        for (const std::uint64_t seed : {1U, 2U, 3U}) {
          GridMachine<kMostSources> machine(threads, seed);
          ASSERT_TRUE(orthonormalize_matches(machine, rank, {n, 1, seed})) << rank << " columns of " << n;
        }
      }
    }
  }
}

TEST(PacksOnGrid, AreUsedWhereEverythingIsAlignedForThem) {
  const auto threads = [](std::int64_t dst_misalign, std::int64_t src_misalign) {
    GuardedArray<float> src(103, src_misalign);
    GuardedArray<BFloat16> dst(103, dst_misalign);
    std::int64_t useful = 0;
    const auto launch = [&](const auto&, std::int64_t count) { useful = count; };
    EXPECT_TRUE(cast_on_grid({dst.data(), DType::kBFloat16, src.data(), DType::kFloat32, 103}, launch));
    return useful;
  };
  EXPECT_EQ(threads(0, 0), 25);
  EXPECT_EQ(threads(4, 4), 25);
  EXPECT_EQ(threads(0, 1), 103);
  EXPECT_EQ(threads(2, 0), 103);
}

/// Launches nothing, or fails.
const auto kNoLaunch = [](const auto&, std::int64_t) { ADD_FAILURE() << "launched"; };

struct NoForm {
  template <class Body>
  void operator()(const Body&, std::int64_t) const {
    ADD_FAILURE() << "launched";
  }
  template <class Body>
  void count(const Body&, std::int64_t) const {}
  template <class Body>
  void scan(const Body&) const {}
  template <class Body>
  void warps(const Body&, std::int64_t) const {}
  template <class Body>
  void lanes(const Body&, std::int64_t) const {
    ADD_FAILURE() << "launched";
  }
  template <class Body>
  void teams(const Body&, std::int64_t) const {
    ADD_FAILURE() << "launched";
  }
};

TEST(RefusedOnGrid, AndNothingIsLaunched) {
  float value = 0;
  const std::array<const void*, 2> sources{&value, &value};
  EXPECT_TRUE(cast_on_grid({&value, DType::kFloat64, &value, DType::kFloat32, 0}, kNoLaunch));
  EXPECT_FALSE(cast_on_grid({&value, DType::kFloat64, &value, DType::kFloat32, -1}, kNoLaunch));
  EXPECT_FALSE(cast_on_grid({&value, DType::kFloat32, &value, DType::kFloat32, 1}, kNoLaunch));
  EXPECT_FALSE(cast_on_grid({&value, DType::kBFloat16, &value, DType::kFloat64, 1}, kNoLaunch));
  EXPECT_FALSE(cast_on_grid({&value, DType::kFloat64, &value, DType::kFloat16, 1}, kNoLaunch));
  EXPECT_FALSE(bucket_on_grid({&value, DType::kFloat32, &value, DType::kFloat32, -1, false}, kNoLaunch));
  EXPECT_TRUE(gather_rows_on_grid({.dim = 1}, kNoLaunch));
  EXPECT_FALSE(gather_rows_on_grid({.dim = 0}, kNoLaunch));
  EXPECT_FALSE(gather_rows_on_grid({.dim = 1, .n = -1}, kNoLaunch));
  EXPECT_FALSE(bucket_on_grid({&value, DType::kFloat32, &value, DType::kFloat64, 1, false}, kNoLaunch));
  EXPECT_FALSE(bucket_on_grid({&value, DType::kBFloat16, &value, DType::kBFloat16, 1, true}, kNoLaunch));
  EXPECT_FALSE(bucket_on_grid({&value, DType::kInt32, &value, DType::kInt32, 1, true}, kNoLaunch));
  EXPECT_FALSE(norm_on_grid(&value, DType::kInt32, 1, nullptr, kNoLaunch));
  EXPECT_FALSE(norm_on_grid(&value, DType::kFloat16, 1, nullptr, kNoLaunch));
  EXPECT_FALSE(norm_on_grid(&value, DType::kFloat32, -1, nullptr, kNoLaunch));
  EXPECT_TRUE(norm_on_grid(&value, DType::kFloat32, 0, nullptr, kNoLaunch));
  EXPECT_FALSE(quantize_on_grid({.n = 1, .block = 24}, kNoLaunch, kNoLaunch));
  EXPECT_FALSE(quantize_on_grid({.src_dtype = DType::kFloat64, .n = 1}, kNoLaunch, kNoLaunch));
  EXPECT_TRUE(quantize_on_grid({}, kNoLaunch, kNoLaunch));
  EXPECT_FALSE(dequantize_on_grid({.n = 1}, kNoLaunch));
  EXPECT_FALSE(dequantize_on_grid<2>({.dst_dtype = DType::kBFloat16, .num_sources = 3, .n = 1}, kNoLaunch));
  std::uint8_t bits = 0;
  const std::array<SignSource, 3> signs{SignSource{&bits, 1.0}, SignSource{&bits, 1.0}, SignSource{&bits, 1.0}};
  EXPECT_TRUE(sign_message_on_grid({.error = &value, .grad = &value}, kNoLaunch));
  EXPECT_FALSE(sign_message_on_grid({.error = &value, .grad = &value, .n = -1}, kNoLaunch));
  EXPECT_FALSE(sign_message_on_grid(
      {.error = &value, .grad = &value, .grad_dtype = DType::kFloat32, .n = 1, .dtype = DType::kFloat64}, kNoLaunch));
  EXPECT_FALSE(sign_message_on_grid({.error = &value, .grad = &value, .n = 1, .dtype = DType::kBFloat16}, kNoLaunch));
  EXPECT_FALSE(sign_pack_on_grid({.error = &value, .bits = &bits, .n = -1}, kNoLaunch));
  EXPECT_FALSE(sign_pack_on_grid({.error = &value, .bits = &bits, .n = 1, .dtype = DType::kInt32}, kNoLaunch));
  EXPECT_FALSE(sign_sum_on_grid({.dst = &value, .sources = signs.data(), .num_sources = 0, .n = 1}, kNoLaunch));
  EXPECT_FALSE(sign_sum_on_grid<2>({.dst = &value, .error = &value, .sources = signs.data(), .num_sources = 3, .n = 1},
                                   kNoLaunch));

  std::array<std::int64_t, 8> work{};
  const NoForm no_form;
  EXPECT_TRUE(topk_on_grid({}, nullptr, no_form));
  EXPECT_FALSE(topk_on_grid({.src = &value, .n = 1}, nullptr, no_form));
  EXPECT_FALSE(topk_on_grid({.src = &value, .n = 1, .k = 2}, work.data(), no_form));
  EXPECT_FALSE(topk_on_grid({.src = &value, .n = 1, .k = -1}, work.data(), no_form));
  EXPECT_FALSE(topk_on_grid({.src = &value, .n = kMostTopkElements + 1}, work.data(), no_form));
  EXPECT_FALSE(topk_on_grid({.src = &value, .src_dtype = DType::kFloat64, .n = 1}, work.data(), no_form));
  EXPECT_TRUE(topk_add_on_grid({.n = 1}, kNoLaunch));
  EXPECT_FALSE(topk_add_on_grid({.n = -1}, kNoLaunch));
  EXPECT_FALSE(topk_outside_on_grid({.num_sources = -1}, kNoLaunch));
  EXPECT_TRUE(lowrank_product_on_grid({}, no_form));
  EXPECT_FALSE(lowrank_product_on_grid({.shape = {.rows = 1, .columns = 2, .stride = 1}}, no_form));
  EXPECT_FALSE(lowrank_product_on_grid({.shape = {.rank = 0}}, no_form));
  EXPECT_FALSE(lowrank_transposed_on_grid({.shape = {.rows = -1}}, no_form));
  EXPECT_FALSE(lowrank_restore_on_grid({.shape = {.rank = kMostRank + 1}}, no_form));
  EXPECT_FALSE(lowrank_orthonormalize_on_grid({.rows = 2, .stride = 1}, no_form));
  EXPECT_FALSE(lowrank_draw_missing_on_grid({.n = -1}, no_form));

  EXPECT_FALSE(lamb_measure_on_grid({.param = &value, .n = 1}, kNoLaunch));
  EXPECT_FALSE(lamb_measure_on_grid({.grad = &value, .n = -1}, kNoLaunch));
  EXPECT_TRUE(lamb_measure_on_grid({}, kNoLaunch));
  EXPECT_FALSE(lamb_apply_on_grid({.n = 1, .dtype = DType::kBFloat16}, kNoLaunch));
  EXPECT_TRUE(lamb_apply_on_grid({}, kNoLaunch));
  EXPECT_FALSE(lion_on_grid({.param = &value, .exp_avg = &value, .grad = &value, .n = -1}, kNoLaunch));
  EXPECT_FALSE(lion_on_grid({.n = 1, .dtype = DType::kBFloat16}, kNoLaunch));
  EXPECT_TRUE(lion_on_grid({}, kNoLaunch));
  const auto refuses_sgd = [&](auto change) {
    SgdArgs args{.param = &value, .grad = &value, .n = 1};
    change(args);
    EXPECT_FALSE(sgd_on_grid(args, kNoLaunch));
  };
  std::int16_t low = 0;
  refuses_sgd([](SgdArgs& args) { args.n = -1; });
  refuses_sgd([](SgdArgs& args) { args.dtype = DType::kBFloat16; });
  refuses_sgd([](SgdArgs& args) { args.hyper.momentum = 0.9; });
  refuses_sgd([&](SgdArgs& args) { args.dtype = DType::kFloat64, args.low = &low; });
  EXPECT_TRUE(sgd_on_grid({.hyper = {.momentum = 0.9}}, kNoLaunch));

  const auto refuses_sum = [&](auto change) {
    SumSourcesArgs args{.dst = &value, .sources = sources.data(), .num_sources = 2, .n = 1};
    change(args);
    EXPECT_FALSE(sum_on_grid(args, nullptr, kNoLaunch));
  };
  refuses_sum([](SumSourcesArgs& args) { args.n = -1; });
  refuses_sum([](SumSourcesArgs& args) { args.num_sources = 0; });
  refuses_sum([](SumSourcesArgs& args) { args.dst_dtype = DType::kFloat64; });
  refuses_sum([](SumSourcesArgs& args) { args.src_dtype = args.dst_dtype = DType::kUInt8; });
  constexpr std::array kWithInt{DType::kFloat32, DType::kInt32};
  constexpr std::array kWithFloat16{DType::kBFloat16, DType::kFloat16};
  refuses_sum([&](SumSourcesArgs& args) { args.src_dtypes = kWithInt.data(); });
  refuses_sum([&](SumSourcesArgs& args) { args.src_dtypes = kWithFloat16.data(); });
  for (const std::vector<int>& groups : {std::vector<int>{1}, {2, 1}, {1, 0, 1}, {-1, 3}, {2, 0}}) {
    refuses_sum([&](SumSourcesArgs& args) {
      args.groups = groups.data();
      args.num_groups = static_cast<int>(groups.size());
    });
  }
  const std::vector<const void*> many(kMostSources + 1, &value);
  SumSourcesArgs without_workspace{.dst = &value, .sources = many.data(), .num_sources = kMostSources + 1, .n = 1};
  EXPECT_FALSE(sum_on_grid(without_workspace, nullptr, kNoLaunch));
  EXPECT_EQ(sum_workspace_bytes<kMostSources>(without_workspace), 2 * 4 * 4);
  --without_workspace.num_sources;
  EXPECT_EQ(sum_workspace_bytes<kMostSources>(without_workspace), 0);

  ExtremeSourcesArgs extreme{.dst = &value, .sources = many.data(), .num_sources = kMostSources + 1, .n = 3};
  EXPECT_FALSE(extreme_on_grid(extreme, nullptr, kNoLaunch));
  EXPECT_EQ(extreme_workspace_bytes<kMostSources>(extreme), 3 * 4);
  extreme.num_sources = 0;
  EXPECT_FALSE(extreme_on_grid(extreme, nullptr, kNoLaunch));
  extreme.num_sources = 1;
  extreme.n = -1;
  EXPECT_FALSE(extreme_on_grid(extreme, nullptr, kNoLaunch));
}

}  // namespace
}  // namespace zeroth::kernels
