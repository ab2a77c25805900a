// Rows to slots and back, and the gradients, against plain sums in double and with the same bits at all widths.
#include "kernel_test_support.h"

#include <kernels/moe/permute.h>

#include <numeric>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
using Weight = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
double unit_of() {
  return std::is_same_v<T, double>    ? 0x1p-52
         : std::is_same_v<T, float>   ? 0x1p-23
         : std::is_same_v<T, Float16> ? 0x1p-10
                                      : 0x1p-7;
}

template <class T>
GuardedArray<T> numbers_of(std::int64_t n, std::uint64_t seed) {
  GuardedArray<Weight<T>> from(n);
  fill_moderate(from, 1.0, seed);
  GuardedArray<T> array(n, 1);
  for (std::int64_t i = 0; i < n; ++i) array[i] = static_cast<T>(from[i]);
  return array;
}

/// Each entry in four has no slot; slots are shuffled.
struct Places {
  std::vector<std::int32_t> slot_of, source_of;
  Places(std::int64_t entries, std::uint64_t seed) : slot_of(static_cast<std::size_t>(entries), -1) {
    std::mt19937_64 engine(seed);
    for (std::int64_t i = 0; i < entries; ++i) {
      if (engine() % 4 != 0) source_of.push_back(static_cast<std::int32_t>(i));
    }
    for (std::size_t i = source_of.size(); i > 1; --i) std::swap(source_of[i - 1], source_of[engine() % i]);
    for (std::size_t slot = 0; slot < source_of.size(); ++slot)
      slot_of[static_cast<std::size_t>(source_of[slot])] = static_cast<std::int32_t>(slot);
  }
};

template <class T>
void require_rows(std::int64_t tokens, std::int64_t k, std::int64_t width, bool with_weights) {
  using W = Weight<T>;
  const Places places(tokens * k, kSeed + static_cast<std::uint64_t>(width));
  const auto slots = static_cast<std::int64_t>(places.source_of.size());
  const GuardedArray<T> in = numbers_of<T>(tokens * width, 1);
  const GuardedArray<T> rows = numbers_of<T>(slots * width, 2);
  const GuardedArray<W> weights = numbers_of<W>(tokens * k, 3);
  const W* const given = with_weights ? weights.data() : nullptr;
  const auto weight = [&](std::int64_t entry) { return with_weights ? to_double(weights[entry]) : 1.0; };
  GuardedArray<T> first(slots * width), first_sum(tokens * width);
  GuardedArray<W> first_product(tokens * k);
  for (const Isa isa : supported_isas()) {
    SCOPED_TRACE(::testing::Message() << name_of(isa) << " tokens " << tokens << " k " << k << " width " << width);
    GuardedArray<T> out(slots * width, 1), sum(tokens * width, 1);
    GuardedArray<W> product(tokens * k, 1);
    const std::int64_t half = isa == Isa::kScalar ? 0 : slots / 3;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, half}, std::pair{half, slots}}) {
      permute({.out = out.data() + begin * width,
               .in = in.data(),
               .dtype = DTypeOf<T>::value,
               .width = width,
               .tokens = tokens,
               .k = k,
               .slots = end - begin,
               .source_of = places.source_of.data() + begin,
               .weights = given},
              isa);
    }
    const std::int64_t cut = isa == Isa::kScalar ? 0 : tokens / 2;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, std::pair{cut, tokens}}) {
      UnpermuteArgs args{.out = sum.data() + begin * width,
                         .in = rows.data(),
                         .dtype = DTypeOf<T>::value,
                         .width = width,
                         .tokens = end - begin,
                         .k = k,
                         .slots = slots,
                         .slot_of = places.slot_of.data() + begin * k,
                         .weights = with_weights ? given + begin * k : nullptr};
      unpermute(args, isa);
      args.out = product.data() + begin * k;
      args.d_out = in.data() + begin * width;
      unpermute_weights(args, isa);
    }
    if (isa == Isa::kScalar) {
      std::copy_n(out.data(), out.size(), first.data());
      std::copy_n(sum.data(), sum.size(), first_sum.data());
      std::copy_n(product.data(), product.size(), first_product.data());
    }
    ASSERT_TRUE(same_bits(first, out));
    ASSERT_TRUE(same_bits(first_sum, sum));
    ASSERT_TRUE(same_bits(first_product, product));
  }
  const double unit = unit_of<T>();
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t entry = places.source_of[static_cast<std::size_t>(slot)];
    for (std::int64_t c = 0; c < width; ++c) {
      const double want = to_double(in[entry / k * width + c]) * weight(entry);
      ASSERT_NEAR(to_double(first[slot * width + c]), want, with_weights ? unit : 0.0) << "slot " << slot;
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t c = 0; c < width; ++c) {
      double want = 0.0;
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int64_t slot = places.slot_of[static_cast<std::size_t>(t * k + j)];
        if (slot >= 0) want += weight(t * k + j) * to_double(rows[slot * width + c]);
      }
      ASSERT_NEAR(to_double(first_sum[t * width + c]), want, 4 * static_cast<double>(k) * unit) << "token " << t;
    }
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t slot = places.slot_of[static_cast<std::size_t>(t * k + j)];
      double want = 0.0;
      for (std::int64_t c = 0; slot >= 0 && c < width; ++c)
        want += to_double(in[t * width + c]) * to_double(rows[slot * width + c]);
      ASSERT_NEAR(to_double(first_product[t * k + j]), want, static_cast<double>(width + 1) * unit_of<W>());
    }
  }
}

TEST(MoePermute, MovesAndSumsLikeAPlainOneInParts) {
  for (const std::int64_t width : {0, 1, 7, 16, 33, 100, 515}) {
    for (const bool with_weights : {false, true}) {
      for (const auto& [tokens, k] : {std::pair{0, 1}, std::pair{1, 1}, std::pair{13, 3}, std::pair{6, 8}}) {
        ASSERT_NO_FATAL_FAILURE(require_rows<float>(tokens, k, width, with_weights));
        ASSERT_NO_FATAL_FAILURE(require_rows<double>(tokens, k, width, with_weights));
        ASSERT_NO_FATAL_FAILURE(require_rows<BFloat16>(tokens, k, width, with_weights));
        ASSERT_NO_FATAL_FAILURE(require_rows<Float16>(tokens, k, width, with_weights));
      }
    }
  }
}

/// So many bytes that rows are written past the caches, at any alignment.
TEST(MoePermute, MovesManyRows) {
  constexpr std::int64_t kTokens = 150;
  for (const std::int64_t width : {std::int64_t{1031}, std::int64_t{1024}}) {
    for (const std::int64_t misalign : {0, 1, 3}) {
      RandomPatterns random(kSeed);
      GuardedArray<float> in(kTokens * width, misalign);
      random.fill(in);
      const Places places(kTokens * 2, kSeed);
      const auto slots = static_cast<std::int64_t>(places.source_of.size());
      GuardedArray<float> want(slots * width);
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        std::memcpy(want.data() + slot * width,
                    in.data() + places.source_of[static_cast<std::size_t>(slot)] / 2 * width,
                    static_cast<std::size_t>(width) * sizeof(float));
      }
      for (const Isa isa : supported_isas()) {
        GuardedArray<float> out(slots * width, misalign);
        permute({.out = out.data(),
                 .in = in.data(),
                 .width = width,
                 .tokens = kTokens,
                 .k = 2,
                 .slots = slots,
                 .source_of = places.source_of.data()},
                isa);
        ASSERT_TRUE(same_bits(want, out)) << name_of(isa) << " misalign " << misalign;
      }
    }
  }
}

TEST(MoePermute, OfAnyPatternsHasTheSameBits) {
  constexpr std::int64_t kWidth = 99;
  RandomPatterns random(kSeed);
  GuardedArray<BFloat16> rows(8 * kWidth);
  GuardedArray<float> weights(8);
  random.fill(rows);
  random.fill(weights);
  const std::vector<std::int32_t> slots{3, 1, -1, 0, 2, 7, 5, 6};
  GuardedArray<BFloat16> want(2 * kWidth);
  GuardedArray<float> products(8);
  for (const Isa isa : supported_isas()) {
    GuardedArray<BFloat16> out(2 * kWidth);
    GuardedArray<float> product(8);
    UnpermuteArgs args{.out = isa == Isa::kScalar ? want.data() : out.data(),
                       .in = rows.data(),
                       .dtype = DType::kBFloat16,
                       .width = kWidth,
                       .tokens = 2,
                       .k = 4,
                       .slots = 8,
                       .slot_of = slots.data(),
                       .weights = weights.data(),
                       .d_out = rows.data()};
    unpermute(args, isa);
    args.out = isa == Isa::kScalar ? products.data() : product.data();
    unpermute_weights(args, isa);
    if (isa == Isa::kScalar) continue;
    EXPECT_TRUE(same_bits(want, out));
    EXPECT_TRUE(same_bits(products, product));
  }
}

TEST(MoePermute, ThatCannotBeIsRefused) {
  const Isa isa = best_isa();
  const std::vector<std::int32_t> places{0, 4};
  const auto permuted = [&](const PermuteArgs& args) { return code_of([&] { permute(args, isa); }); };
  EXPECT_EQ(permuted({.tokens = 2, .k = 2, .slots = 2, .source_of = places.data()}), ErrorCode::kUsage);
  EXPECT_EQ(permuted({.width = -1}), ErrorCode::kUsage);
  EXPECT_EQ(permuted({.k = 0}), ErrorCode::kUsage);
  EXPECT_EQ(permuted({.slots = -1}), ErrorCode::kUsage);
  EXPECT_EQ(permuted({.dtype = DType::kInt32}), ErrorCode::kUsage);
  const std::vector<std::int32_t> negative{-1};
  EXPECT_EQ(permuted({.tokens = 2, .slots = 1, .source_of = negative.data()}), ErrorCode::kUsage);
  const UnpermuteArgs outside{.tokens = 2, .slots = 4, .slot_of = places.data()};
  EXPECT_EQ(code_of([&] { unpermute(outside, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { unpermute_weights(outside, isa); }), ErrorCode::kUsage);
}

}  // namespace
}  // namespace zeroth::kernels
