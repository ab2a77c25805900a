// The CUDA kernels on a device: every bit is that of the CPU kernels. (AdamW: adamw_device_test.cpp.)
#include "cuda/device_test_support.h"
#include "unit/kernels/on_grid_cases.h"

#include <kernels/bucket/bucket_cuda.h>
#include <kernels/cast/cast_cuda.h>
#include <kernels/lamb/lamb_cuda.h>
#include <kernels/lion/lion_cuda.h>
#include <kernels/lowrank/lowrank_cuda.h>
#include <kernels/norm/norm_cuda.h>
#include <kernels/quant/quant_cuda.h>
#include <kernels/reduce/reduce_cuda.h>
#include <kernels/rows/rows_cuda.h>
#include <kernels/sgd/sgd_cuda.h>
#include <kernels/signs/signs_cuda.h>
#include <kernels/topk/topk_cuda.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

struct Entries {
  template <class Entry>
  static Entry* load(const char* name) {
    return load_entry<Entry>(name);
  }
  decltype(zeroth_cuda_sgd)* sgd = load<decltype(zeroth_cuda_sgd)>("zeroth_cuda_sgd");
  decltype(zeroth_cuda_lion)* lion = load<decltype(zeroth_cuda_lion)>("zeroth_cuda_lion");
  decltype(zeroth_cuda_lamb_measure)* lamb_measure =
      load<decltype(zeroth_cuda_lamb_measure)>("zeroth_cuda_lamb_measure");
  decltype(zeroth_cuda_lamb_apply)* lamb_apply = load<decltype(zeroth_cuda_lamb_apply)>("zeroth_cuda_lamb_apply");
  decltype(zeroth_cuda_cast)* cast = load<decltype(zeroth_cuda_cast)>("zeroth_cuda_cast");
  decltype(zeroth_cuda_bucket)* bucket = load<decltype(zeroth_cuda_bucket)>("zeroth_cuda_bucket");
  decltype(zeroth_cuda_fill_zero)* fill_zero = load<decltype(zeroth_cuda_fill_zero)>("zeroth_cuda_fill_zero");
  decltype(zeroth_cuda_sum_sources)* sum = load<decltype(zeroth_cuda_sum_sources)>("zeroth_cuda_sum_sources");
  decltype(zeroth_cuda_sum_sources_workspace)* sum_workspace =
      load<decltype(zeroth_cuda_sum_sources_workspace)>("zeroth_cuda_sum_sources_workspace");
  decltype(zeroth_cuda_extreme_sources)* extreme =
      load<decltype(zeroth_cuda_extreme_sources)>("zeroth_cuda_extreme_sources");
  decltype(zeroth_cuda_extreme_sources_workspace)* extreme_workspace =
      load<decltype(zeroth_cuda_extreme_sources_workspace)>("zeroth_cuda_extreme_sources_workspace");
  decltype(zeroth_cuda_gather_rows)* gather_rows = load<decltype(zeroth_cuda_gather_rows)>("zeroth_cuda_gather_rows");
  decltype(zeroth_cuda_sign_message)* sign_message =
      load<decltype(zeroth_cuda_sign_message)>("zeroth_cuda_sign_message");
  decltype(zeroth_cuda_quantize)* quantize = load<decltype(zeroth_cuda_quantize)>("zeroth_cuda_quantize");
  decltype(zeroth_cuda_dequantize)* dequantize = load<decltype(zeroth_cuda_dequantize)>("zeroth_cuda_dequantize");
  decltype(zeroth_cuda_sign_pack)* sign_pack = load<decltype(zeroth_cuda_sign_pack)>("zeroth_cuda_sign_pack");
  decltype(zeroth_cuda_sign_sum)* sign_sum = load<decltype(zeroth_cuda_sign_sum)>("zeroth_cuda_sign_sum");
  decltype(zeroth_cuda_topk_workspace)* topk_workspace =
      load<decltype(zeroth_cuda_topk_workspace)>("zeroth_cuda_topk_workspace");
  decltype(zeroth_cuda_topk)* topk = load<decltype(zeroth_cuda_topk)>("zeroth_cuda_topk");
  decltype(zeroth_cuda_topk_outside)* topk_outside =
      load<decltype(zeroth_cuda_topk_outside)>("zeroth_cuda_topk_outside");
  decltype(zeroth_cuda_topk_add)* topk_add = load<decltype(zeroth_cuda_topk_add)>("zeroth_cuda_topk_add");
  decltype(zeroth_cuda_lowrank_product)* lowrank_product =
      load<decltype(zeroth_cuda_lowrank_product)>("zeroth_cuda_lowrank_product");
  decltype(zeroth_cuda_lowrank_transposed_product)* lowrank_transposed_product =
      load<decltype(zeroth_cuda_lowrank_transposed_product)>("zeroth_cuda_lowrank_transposed_product");
  decltype(zeroth_cuda_lowrank_restore)* lowrank_restore =
      load<decltype(zeroth_cuda_lowrank_restore)>("zeroth_cuda_lowrank_restore");
  decltype(zeroth_cuda_lowrank_orthonormalize)* lowrank_orthonormalize =
      load<decltype(zeroth_cuda_lowrank_orthonormalize)>("zeroth_cuda_lowrank_orthonormalize");
  decltype(zeroth_cuda_lowrank_draw_missing)* lowrank_draw_missing =
      load<decltype(zeroth_cuda_lowrank_draw_missing)>("zeroth_cuda_lowrank_draw_missing");
  decltype(zeroth_cuda_norm_blocks)* norm = load<decltype(zeroth_cuda_norm_blocks)>("zeroth_cuda_norm_blocks");
};

/// A device behind the interface of on_grid_cases.h. Calls go to a stream that waits for no other.
class DeviceMachine {
 public:
  template <class T>
  using Array = DeviceArray<T>;

  DeviceMachine() { require_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  DeviceMachine(const DeviceMachine&) = delete;
  DeviceMachine& operator=(const DeviceMachine&) = delete;
  ~DeviceMachine() { cudaStreamDestroy(stream_); }

  bool sgd(const SgdArgs& args) {
    return run([&] { return entries_.sgd(&args, stream_); });
  }
  bool lion(const LionArgs& args) {
    return run([&] { return entries_.lion(&args, stream_); });
  }
  bool lamb_measure(const LambArgs& args) {
    return run([&] { return entries_.lamb_measure(&args, stream_); });
  }
  bool lamb_apply(const LambArgs& args) {
    return run([&] { return entries_.lamb_apply(&args, stream_); });
  }
  bool cast(const detail::CastArgs& args) {
    return run([&] { return entries_.cast(&args, stream_); });
  }
  bool bucket(const detail::BucketArgs& args, std::int64_t* nonfinite) {
    return run([&] { return entries_.bucket(&args, nonfinite, stream_); });
  }
  bool fill_zero(void* dst, std::int64_t bytes) {
    return run([&] { return entries_.fill_zero(dst, bytes, stream_); });
  }
  bool sum(const SumSourcesArgs& args) {
    const DeviceArray<std::uint8_t> workspace(GuardedArray<std::uint8_t>(entries_.sum_workspace(&args)), 0);
    return run([&] { return entries_.sum(&args, workspace.data(), stream_); });
  }
  bool extreme(const ExtremeSourcesArgs& args) {
    const DeviceArray<std::uint8_t> workspace(GuardedArray<std::uint8_t>(entries_.extreme_workspace(&args)), 0);
    return run([&] { return entries_.extreme(&args, workspace.data(), stream_); });
  }
  bool norm(const void* src, DType dtype, std::int64_t n, double* sums) {
    return run([&] { return entries_.norm(src, dtype, n, sums, stream_); });
  }
  bool quantize(const QuantizeArgs& args) {
    return run([&] { return entries_.quantize(&args, stream_); });
  }
  bool dequantize(const DequantizeArgs& args) {
    return run([&] { return entries_.dequantize(&args, stream_); });
  }
  bool sign_message(const SignMessageArgs& args) {
    return run([&] { return entries_.sign_message(&args, stream_); });
  }
  bool sign_pack(const SignPackArgs& args) {
    return run([&] { return entries_.sign_pack(&args, stream_); });
  }
  bool sign_sum(const SignSumArgs& args) {
    return run([&] { return entries_.sign_sum(&args, stream_); });
  }
  bool topk(const TopkArgs& args) {
    const DeviceArray<std::uint8_t> workspace(GuardedArray<std::uint8_t>(entries_.topk_workspace(args.n)), 0);
    return run([&] { return entries_.topk(&args, workspace.data(), stream_); });
  }
  bool topk_outside(const TopkAddArgs& args, std::int64_t* outside) {
    return run([&] { return entries_.topk_outside(&args, outside, stream_); });
  }
  bool topk_add(const TopkAddArgs& args) {
    return run([&] { return entries_.topk_add(&args, stream_); });
  }
  bool lowrank_product(const LowRankProductArgs& args) {
    return run([&] { return entries_.lowrank_product(&args, stream_); });
  }
  bool lowrank_transposed_product(const LowRankProductArgs& args) {
    return run([&] { return entries_.lowrank_transposed_product(&args, stream_); });
  }
  bool lowrank_restore(const LowRankRestoreArgs& args) {
    return run([&] { return entries_.lowrank_restore(&args, stream_); });
  }
  bool lowrank_orthonormalize(const OrthonormalizeArgs& args) {
    return run([&] { return entries_.lowrank_orthonormalize(&args, stream_); });
  }
  bool lowrank_draw_missing(const LowRankDrawArgs& args) {
    return run([&] { return entries_.lowrank_draw_missing(&args, stream_); });
  }

 private:
  template <class Call>
  bool run(const Call& call) {
    require_ok(cudaDeviceSynchronize(), "copies to the device");
    const int status = call();
    if (status == cudaErrorInvalidValue) return false;
    require_ok(status, "the launch");
    require_ok(cudaStreamSynchronize(stream_), "the kernel");
    return true;
  }

  Entries entries_;
  cudaStream_t stream_ = nullptr;
};

/// More packs of four than the largest grid has threads, so that threads go round again, and a tail.
constexpr std::int64_t kLongerThanTheGrid = std::int64_t{16384} * 256 * 4 + 12'347;

template <class T>
class KernelsOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_no_device();
    if (!reason.empty()) GTEST_SKIP() << "no CUDA device: " << reason;
    machine_.emplace();
  }

  /// check(machine, range) at every size and misalignment, with edges and with ordinary numbers.
  template <class Check>
  void on_ranges(const Check& check) {
    for (const std::int64_t n : {0, 1, 2, 3, 4, 5, 31, 32, 33, 130, 1023, 1024, 1025, 4099, 100'003}) {
      for (const std::int64_t misalign : {0, 1, 3}) {
        const Range range{n, misalign, kSeed + static_cast<std::uint64_t>(n + misalign)};
        ASSERT_TRUE(check(*machine_, range)) << range;
      }
    }
  }

  std::optional<DeviceMachine> machine_;
};

template <class T>
using CastOnDevice = KernelsOnDevice<T>;
TYPED_TEST_SUITE(CastOnDevice, CastPairs);

TYPED_TEST(CastOnDevice, GivesTheBitsOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  this->on_ranges([](auto& machine, const Range& range) { return cast_matches<In, Out>(machine, range); });
  ASSERT_TRUE((cast_matches<In, Out>(*this->machine_, {kLongerThanTheGrid, 0, 2})));
}

template <class T>
using SgdOnDevice = KernelsOnDevice<T>;
using StateTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(SgdOnDevice, StateTypes);

TYPED_TEST(SgdOnDevice, GivesTheBitsOfTheCpu) {
  for (const SgdHyper& hyper : sgd_forms()) {
    for (const Storage storage : kStorages) {
      this->on_ranges(
          [&](auto& machine, const Range& range) { return sgd_matches<TypeParam>(machine, hyper, storage, range); });
    }
  }
  ASSERT_TRUE(
      sgd_matches<TypeParam>(*this->machine_, sgd_forms().back(), Storage::kInHalves, {kLongerThanTheGrid, 0, 2}));
}

template <class T>
using BucketOnDevice = KernelsOnDevice<T>;
using Buckets =
    ::testing::Types<Pair<float, float>, Pair<BFloat16, float>, Pair<BFloat16, BFloat16>, Pair<double, double>>;
TYPED_TEST_SUITE(BucketOnDevice, Buckets);

TYPED_TEST(BucketOnDevice, GivesTheBitsAndTheCountOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  for (const bool add : {false, true}) {
    if (add && std::is_same_v<Out, BFloat16>) continue;
    this->on_ranges([&](auto& machine, const Range& range) { return bucket_matches<In, Out>(machine, add, range); });
    ASSERT_TRUE((bucket_matches<In, Out>(*this->machine_, add, {kLongerThanTheGrid, 0, 2})));
  }
}

using FillOnDevice = KernelsOnDevice<void>;

TEST_F(FillOnDevice, ZerosTheRangeAndNothingElse) {
  for (const std::int64_t bytes : {0, 1, 3, 130, 1'000'001}) {
    GuardedArray<std::uint8_t> array(bytes);
    std::fill_n(array.data(), bytes, std::uint8_t{1});
    const DeviceArray<std::uint8_t> filled(array, 1);
    ASSERT_TRUE(machine_->fill_zero(filled.data(), bytes));
    std::fill_n(array.data(), bytes, std::uint8_t{0});
    EXPECT_TRUE(filled.has_bits_of(array)) << bytes;
  }
}

template <class T>
using SumOnDevice = KernelsOnDevice<T>;
TYPED_TEST_SUITE(SumOnDevice, SumPairs);

TYPED_TEST(SumOnDevice, GivesTheBitsOfTheCpu) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  std::vector<SumCase> cases{{.num_sources = 1},   {.num_sources = 6, .accumulate = true},
                             {.num_sources = 17},  {.num_sources = 14, .groups = {6, 3, 5}, .accumulate = true},
                             {.num_sources = 300}, {.num_sources = 261, .groups = {200, 60, 1}, .accumulate = true}};
  if (std::is_same_v<In, float>) {
    cases.push_back({.num_sources = 7, .groups = {4, 3}, .mixed = true});
    cases.push_back({.num_sources = 130, .accumulate = true, .mixed = true});
  }
  if (std::is_same_v<In, Out>) {
    cases.push_back({.num_sources = 8, .groups = {5, 3}, .in_place_of = 6});
    cases.push_back({.num_sources = 200, .in_place_of = 150});
  }
  for (const SumCase& c : cases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    this->on_ranges([&](auto& machine, const Range& range) {
      return c.num_sources > 100 && range.n > 5000 ? ::testing::AssertionSuccess()
                                                   : sum_matches<In, Out>(machine, c, range);
    });
  }
  ASSERT_TRUE((sum_matches<In, Out>(*this->machine_, {.num_sources = 3}, {kLongerThanTheGrid, 0, 1})));
}

template <class T>
using ExtremeOnDevice = KernelsOnDevice<T>;
using Extremes = ::testing::Types<double, float, BFloat16, Float16, std::int64_t, std::int32_t, std::uint8_t>;
TYPED_TEST_SUITE(ExtremeOnDevice, Extremes);

TYPED_TEST(ExtremeOnDevice, GivesTheBitsOfTheCpu) {
  for (const int num_sources : {1, 2, 7, 300}) {
    for (const bool greatest : {false, true}) {
      for (const int in_place_of : {-1, num_sources - 1}) {
        this->on_ranges([&](auto& machine, const Range& range) {
          return num_sources > 100 && range.n > 5000
                     ? ::testing::AssertionSuccess()
                     : extreme_matches<TypeParam>(machine, num_sources, greatest, in_place_of, range);
        });
      }
    }
  }
  ASSERT_TRUE(extreme_matches<TypeParam>(*this->machine_, 2, true, -1, {kLongerThanTheGrid, 0, 2}));
}

template <class T>
using NormOnDevice = KernelsOnDevice<T>;
using NormTypes = ::testing::Types<float, double, BFloat16>;
TYPED_TEST_SUITE(NormOnDevice, NormTypes);

TYPED_TEST(NormOnDevice, GivesTheSumsAndTheWordsOfTheCpu) {
  this->on_ranges([](auto& machine, const Range& range) { return norm_matches<TypeParam>(machine, range); });
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    ASSERT_TRUE(norm_matches<TypeParam>(*this->machine_, {5'000'003, 1, seed})) << seed;
  }
  if (sizeof(TypeParam) == 2) {  // more blocks than the largest grid has warps
    ASSERT_TRUE(norm_matches<TypeParam>(*this->machine_, {std::int64_t{16384} * 8 * kNormBlock + 5'000, 0, 1}));
  }
}

/// The table is page-locked memory of the host, which the device reads.
TEST(RowsOnDevice, ComeFromMemoryOfTheHost) {
  if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << "no CUDA device: " << why;
  constexpr std::int64_t kRows = 1'000;
  constexpr std::int64_t kDim = 36;
  constexpr std::int64_t kCount = 5'000;
  void* pinned = nullptr;
  require_ok(cudaHostAlloc(&pinned, kRows * kDim * sizeof(float), cudaHostAllocPortable), "cudaHostAlloc");
  auto* const table = static_cast<float*>(pinned);
  for (std::int64_t i = 0; i < kRows * kDim; ++i) table[i] = static_cast<float>(i);
  GuardedArray<std::int64_t> indices(kCount);
  GuardedArray<float> want(kCount * kDim);
  for (std::int64_t i = 0; i < kCount; ++i) {
    indices[i] = i * 7'919 % kRows;
    for (std::int64_t k = 0; k < kDim; ++k) want[i * kDim + k] = static_cast<float>(indices[i] * kDim + k);
  }
  const DeviceArray<std::int64_t> there(indices, 0);
  const DeviceArray<float> out(GuardedArray<float>(kCount * kDim), 0);
  const GatherRowsArgs args{
      .table = table, .rows = kRows, .dim = kDim, .indices = there.data(), .out = out.data(), .n = kCount};
  require_ok(Entries().gather_rows(&args, nullptr), "zeroth_cuda_gather_rows");
  require_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  EXPECT_TRUE(out.has_bits_of(want));
  cudaFreeHost(pinned);
}

TYPED_TEST(SgdOnDevice, OfLambGivesTheBitsOfTheCpu) {
  for (const LambForm form : kLambForms) {
    for (const Storage storage : kStorages)
      this->on_ranges(
          [&](auto& machine, const Range& range) { return lamb_matches<TypeParam>(machine, form, storage, range); });
  }
}

TYPED_TEST(SgdOnDevice, OfLionGivesTheBitsOfTheCpu) {
  for (const Storage storage : kStorages) {
    const LionHyper hyper{.lr = 0.03, .weight_decay = 0.1, .factor = 1.0 / 6.0};
    this->on_ranges(
        [&](auto& machine, const Range& range) { return lion_matches<TypeParam>(machine, hyper, storage, range); });
  }
}

template <class T>
using SignsOnDevice = KernelsOnDevice<T>;
TYPED_TEST_SUITE(SignsOnDevice, StateTypes);

TYPED_TEST(SignsOnDevice, GiveTheBitsOfTheCpu) {
  using T = TypeParam;
  for (const bool with_momentum : {false, true}) {
    this->on_ranges(
        [&](auto& machine, const Range& range) { return sign_message_matches<T, T>(machine, with_momentum, range); });
  }
  this->on_ranges([](auto& machine, const Range& range) { return sign_pack_matches<T>(machine, range); });
  for (const SumError where : {SumError::kNone, SumError::kBeside, SumError::kInPlace}) {
    this->on_ranges([&](auto& machine, const Range& range) { return sign_sum_matches<T>(machine, 3, where, range); });
  }
  this->on_ranges(
      [](auto& machine, const Range& range) { return sign_sum_matches<T>(machine, 131, SumError::kBeside, range); });
}

using CodesOnDevice = KernelsOnDevice<float>;

TEST_F(CodesOnDevice, GiveTheBitsOfTheCpu) {
  for (const CodeCase& c : code_cases()) {
    on_ranges([&](auto& machine, const Range& range) { return quantize_matches<float>(machine, c, range); });
    on_ranges([&](auto& machine, const Range& range) { return quantize_matches<BFloat16>(machine, c, range); });
    on_ranges([&](auto& machine, const Range& range) { return dequantize_matches<Float16>(machine, c, 1, range); });
    on_ranges([&](auto& machine, const Range& range) { return dequantize_matches<float>(machine, c, 131, range); });
  }
}

template <class T>
using TopkOnDevice = KernelsOnDevice<T>;
using TopkTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(TopkOnDevice, TopkTypes);

TYPED_TEST(TopkOnDevice, HasTheBitsOfTheCpu) {
  for (const TopkCase& c : topk_cases()) {
    SCOPED_TRACE(::testing::PrintToString(c));
    this->on_ranges([&](auto& machine, const Range& range) { return topk_matches<TypeParam>(machine, c, range); });
    ASSERT_TRUE(topk_matches<TypeParam>(*this->machine_, c, {3'000'017, 1, 2}));
    ASSERT_TRUE(topk_matches<TypeParam>(*this->machine_, c, {3'000'017, 0, 1}));
  }
}

using SumsOnDevice = KernelsOnDevice<float>;

TEST_F(SumsOnDevice, OfTheGreatestElementsHaveTheBitsOfTheCpu) {
  for (const int sources : {1, 2, 7}) {
    on_ranges([&](auto& machine, const Range& range) { return topk_add_matches(machine, sources, range); });
  }
}

TEST_F(SumsOnDevice, OfThinProductsHaveTheBitsOfTheCpu) {
  std::vector<LowRankShape> shapes = lowrank_shapes();
  shapes.push_back({1'000, 3'001, 3'003, 5});
  shapes.push_back({3'001, 40, 40, 64});
  for (const LowRankShape& shape : shapes) {
    for (std::uint64_t seed = 1; seed <= 6; ++seed)
      ASSERT_TRUE(lowrank_matches(*machine_, shape, static_cast<std::int64_t>(seed % 4), seed)) << text_of(shape);
  }
  for (const int rank : {1, 2, 4, 9, 64}) {
    on_ranges([&](auto& machine, const Range& range) {
      return range.n > 5000 && rank > 9 ? ::testing::AssertionSuccess() : orthonormalize_matches(machine, rank, range);
    });
  }
}

// Needs no device: nothing is launched.
TEST(KernelsModule, LoadsAndRefusesWhatItCannotDo) {
  const Entries entries;
  std::int64_t count = 0;
  float value = 0;
  const std::vector<const void*> sources(129, &value);
  EXPECT_EQ(entries.sgd(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lion(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lamb_measure(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lamb_apply(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.cast(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.gather_rows(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.bucket(nullptr, &count, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.sum(nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.extreme(nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.sign_message(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.sign_pack(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.quantize(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.dequantize(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.sign_sum(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.topk(nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.topk_outside(nullptr, &count, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.topk_add(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lowrank_product(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lowrank_transposed_product(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lowrank_restore(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lowrank_orthonormalize(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.lowrank_draw_missing(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.sum_workspace(nullptr), 0);
  EXPECT_EQ(entries.extreme_workspace(nullptr), 0);

  const SgdArgs without_buffer{.n = 1, .hyper = {.momentum = 0.9}};
  EXPECT_EQ(entries.sgd(&without_buffer, nullptr), cudaErrorInvalidValue);
  const detail::CastArgs same_types{&value, DType::kFloat32, &value, DType::kFloat32, 1};
  EXPECT_EQ(entries.cast(&same_types, nullptr), cudaErrorInvalidValue);
  const detail::BucketArgs store{&value, DType::kFloat32, &value, DType::kFloat32, 1, false};
  EXPECT_EQ(entries.bucket(&store, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.fill_zero(&value, -1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.norm(&value, DType::kInt32, 1, nullptr, nullptr), cudaErrorInvalidValue);
  SumSourcesArgs sum{.dst = &value, .sources = sources.data(), .num_sources = 129, .n = 5};
  EXPECT_EQ(entries.sum(&sum, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.sum_workspace(&sum), 2 * 8 * 4);
  ExtremeSourcesArgs extreme{.dst = &value, .sources = sources.data(), .num_sources = 129, .n = 5};
  EXPECT_EQ(entries.extreme(&extreme, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.extreme_workspace(&extreme), 5 * 4);

  const TopkArgs without_workspace{.src = &value, .n = 1};
  EXPECT_EQ(entries.topk(&without_workspace, nullptr, nullptr), cudaErrorInvalidValue);
  const TopkAddArgs no_sources{.dst = &value, .n = 1};
  EXPECT_EQ(entries.topk_outside(&no_sources, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(entries.topk_add(&no_sources, nullptr), cudaSuccess);
  const LowRankProductArgs no_rank{.shape = {.rank = 0}};
  EXPECT_EQ(entries.lowrank_product(&no_rank, nullptr), cudaErrorInvalidValue);
  const SgdArgs no_sgd{};
  EXPECT_EQ(entries.sgd(&no_sgd, nullptr), cudaSuccess);
  const detail::CastArgs no_cast{nullptr, DType::kFloat64, nullptr, DType::kFloat32, 0};
  EXPECT_EQ(entries.cast(&no_cast, nullptr), cudaSuccess);
  const detail::BucketArgs no_store{nullptr, DType::kFloat32, nullptr, DType::kFloat32, 0, false};
  EXPECT_EQ(entries.bucket(&no_store, &count, nullptr), cudaSuccess);
  EXPECT_EQ(entries.fill_zero(nullptr, 0, nullptr), cudaSuccess);
  EXPECT_EQ(entries.norm(nullptr, DType::kFloat32, 0, nullptr, nullptr), cudaSuccess);
  sum.n = 0;
  EXPECT_EQ(entries.sum(&sum, nullptr, nullptr), cudaSuccess);
  extreme.n = 0;
  EXPECT_EQ(entries.extreme(&extreme, nullptr, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace zeroth::kernels
