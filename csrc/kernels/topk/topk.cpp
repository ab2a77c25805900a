#include <kernels/common/fp_environment.h>
#include <kernels/topk/topk.h>
#include <kernels/topk/topk_math.h>
#include <kernels/topk/topk_variants.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

namespace zeroth::kernels {
namespace {

void check_range(std::int64_t n, DType dtype, const char* op, const char* where, Isa isa) {
  ZR_CHECK(n >= 0 && n <= kMostTopkElements, ErrorCode::kUsage, "no such element count",
           ErrorContext{.where = where, .expected = "0 to 2^31 - 1", .got = std::to_string(n)});
  ZR_CHECK(has_topk(dtype), ErrorCode::kUsage, "the greatest are found of float32, bfloat16 or float16",
           ErrorContext{.where = where, .got = std::string(name_of(dtype))});
  detail::require_supported(isa, op);
}

/// A sample is lines of 64 bytes of float32, spread evenly over the range.
constexpr std::int64_t kSampleLine = 16;
constexpr std::int64_t kMostSampled = 4096;
constexpr std::int64_t kSampledPart = 8;  // at most one element of so many

std::int64_t sampled_of(std::int64_t n) {
  return std::min(kMostSampled, n / kSampledPart) / kSampleLine * kSampleLine;
}

/// How many of the sample are as great as the guess: so many more than its share of k that fewer than k elements of the
/// range are as great in one of about a thousand cases.
std::int64_t guessed_rank(std::int64_t n, std::int64_t k) {
  const double share = static_cast<double>(k) * static_cast<double>(sampled_of(n)) / static_cast<double>(n);
  return static_cast<std::int64_t>(share + 3.0 * std::sqrt(share)) + 8;
}

/// The messages of a sample; returns their number.
std::int64_t take_sample(const TopkArgs& args, std::array<float, kMostSampled>& sample) {
  const std::int64_t count = sampled_of(args.n);
  const std::int64_t stride = args.n / (count / kSampleLine);
  const auto fill = [&](const auto* src) {
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t i = j / kSampleLine * stride + j % kSampleLine;
      auto message = Lane<float>::load(src + i);
      if (args.error != nullptr) message = message + Lane<float>::load(args.error + i);
      topk_message(message).store(sample.data() + j);
    }
  };
  args.src_dtype == DType::kBFloat16  ? fill(static_cast<const BFloat16*>(args.src))
  : args.src_dtype == DType::kFloat16 ? fill(static_cast<const Float16*>(args.src))
                                      : fill(static_cast<const float*>(args.src));
  return count;
}

/// The k-th greatest magnitude of n numbers, its first `levels` digits.
TopkCut cut_of(const float* message, std::int64_t n, std::int64_t k, int levels, Isa isa) {
  TopkCut cut = topk_start(k);
  while (cut.level < levels) {
    std::array<std::int64_t, kTopkBins> counts{};
    topk_count({.src = message, .n = n, .cut = cut, .counts = counts.data()}, isa);
    cut = topk_next(cut, counts);
  }
  return cut;
}

/// Of the elements of `found` those above the cut, and its ties from the first on, in their places.
void keep_greatest(const TopkArgs& args, std::int64_t found, const TopkCut& cut) {
  std::int64_t kept = 0;
  std::int64_t ties = cut.left;
  for (std::int64_t j = 0; j < found; ++j) {
    const std::int32_t place = args.places[j];
    const Lane<float> message{args.values[j]};
    const std::uint32_t key = key_of(message);
    const bool is_tie = key == cut.prefix;
    const bool keeps = key > cut.prefix || (is_tie && ties > 0);
    ties -= is_tie ? 1 : 0;
    args.places[kept] = place;
    args.values[kept] = message.v;
    if (args.error != nullptr) args.error[place] = keeps ? 0.0F : message.v;
    kept += keeps ? 1 : 0;
  }
}

/// topk() in one pass. False if the sample has misled: then `error` is the message, and nothing else was done.
bool topk_by_sample(const TopkArgs& args, Isa isa) {
  std::array<float, kMostSampled> sample;  // filled as far as it is read
  const std::int64_t sampled = take_sample(args, sample);
  constexpr int kGuessed = 2;  // digits
  const TopkCut guess = cut_of(sample.data(), sampled, guessed_rank(args.n, args.k), kGuessed, isa);
  const auto collect =
      detail::select(isa, detail::topk_collect_scalar, detail::topk_collect_avx2, detail::topk_collect_avx512);
  const std::int64_t found = collect({.src = args.src,
                                      .src_dtype = args.src_dtype,
                                      .error = args.error,
                                      .n = args.n,
                                      .least = guess.prefix,
                                      .places = args.places,
                                      .values = args.values,
                                      .capacity = args.room});
  if (found < args.k || found > args.room) return false;
  keep_greatest(args, found, cut_of(args.values, found, args.k, kTopkLevels, isa));
  return true;
}

}  // namespace

TopkCut topk_start(std::int64_t k) {
  ZR_CHECK(k >= 0, ErrorCode::kUsage, "negative number of elements", ErrorContext{.where = "kernels.topk"});
  // No magnitude has all bits, as every NaN is the quiet one.
  if (k == 0) return {.prefix = 0x7fffffffU, .level = kTopkLevels, .left = 0};
  return {.prefix = 0, .level = 0, .left = k};
}

void topk_count(const TopkCountArgs& args, Isa isa) {
  check_range(args.n, args.src_dtype, "topk", "kernels.topk_count", isa);
  ZR_CHECK(args.cut.level >= 0 && args.cut.level < kTopkLevels && (args.cut.level == 0 || args.error == nullptr),
           ErrorCode::kUsage, "a digit is counted at another level",
           ErrorContext{.where = "kernels.topk_count",
                        .expected = "a level from 0 to 2, with an error at level 0 only",
                        .got = "level " + std::to_string(args.cut.level)});
  const detail::FpEnvironment environment;
  detail::select(isa, detail::topk_count_scalar, detail::topk_count_avx2, detail::topk_count_avx512)(args);
}

TopkCut topk_next(const TopkCut& cut, std::span<const std::int64_t> counts) {
  TopkCut next = cut;
  next.level += 1;
  for (std::uint32_t digit = topk_digits(cut.level); digit-- > 0;) {
    const std::int64_t here = counts[digit];
    if (here >= next.left) {
      next.prefix |= digit << topk_shift(cut.level);
      return next;
    }
    next.left -= here;
  }
  ZR_CHECK(false, ErrorCode::kUsage, "more elements are taken than there are",
           ErrorContext{.where = "kernels.topk_next", .expected = std::to_string(next.left) + " more"});
  return next;
}

std::int64_t topk_take(const TopkTakeArgs& args, Isa isa) {
  check_range(args.n, args.dtype, "topk", "kernels.topk_take", isa);
  ZR_CHECK(args.cut.level == kTopkLevels && (args.error == nullptr || args.error == args.message), ErrorCode::kUsage,
           "elements are taken before all digits are known, or with an error that is not the message",
           ErrorContext{.where = "kernels.topk_take", .got = "level " + std::to_string(args.cut.level)});
  const detail::FpEnvironment environment;
  return detail::select(isa, detail::topk_take_scalar, detail::topk_take_avx2, detail::topk_take_avx512)(args);
}

std::int64_t topk_room(std::int64_t n, std::int64_t k) noexcept {
  constexpr std::int64_t kSpare = 4096;
  return std::max(k, std::min(n, 3 * k + kSpare));
}

void topk(const TopkArgs& args, Isa isa) {
  check_range(args.n, args.src_dtype, "topk", "kernels.topk", isa);
  ZR_CHECK(args.k >= 0 && args.k <= args.n, ErrorCode::kUsage, "no such number of elements",
           ErrorContext{
               .where = "kernels.topk", .expected = "0 to " + std::to_string(args.n), .got = std::to_string(args.k)});
  TopkCut cut = topk_start(args.k);
  TopkCountArgs count{
      .src = args.src, .src_dtype = args.src_dtype, .error = args.error, .n = args.n, .cut = {.left = args.k}};
  // A sample of fewer elements says little, and of a large part of the range all digits are counted as fast.
  constexpr std::int64_t kLeastSampled = 1024;
  if (args.k > 0 && args.k <= args.n / 8 && args.room >= topk_room(args.n, args.k) &&
      sampled_of(args.n) >= kLeastSampled) {
    const detail::FpEnvironment environment;
    if (topk_by_sample(args, isa)) return;
    if (args.error != nullptr) {
      count.src = args.error;
      count.src_dtype = DType::kFloat32;
      count.error = nullptr;
    }
  }
  for (int level = 0; level < kTopkLevels; ++level) {
    // The first pass also makes the message: it is there for k = 0, too.
    if (level >= cut.level || (level == 0 && count.error != nullptr)) {
      std::array<std::int64_t, kTopkBins> counts{};
      count.counts = counts.data();
      topk_count(count, isa);
      if (level >= cut.level) cut = topk_next(cut, counts);
      count.cut = cut;
    }
    if (args.error != nullptr) {
      count.src = args.error;
      count.src_dtype = DType::kFloat32;
      count.error = nullptr;
    }
  }
  topk_take({.message = count.src,
             .dtype = count.src_dtype,
             .error = args.error,
             .n = args.n,
             .cut = cut,
             .places = args.places,
             .values = args.values,
             .capacity = args.k},
            isa);
}

void topk_add(const TopkAddArgs& args) {
  check_range(args.n, DType::kFloat32, "topk", "kernels.topk_add", Isa::kScalar);
  for (int source = 0; source < args.num_sources; ++source) {
    for (std::int64_t j = 0; j < args.sources[source].k; ++j) {
      const std::int32_t place = args.sources[source].places[j];
      ZR_CHECK(place >= 0 && place < args.n, ErrorCode::kUsage, "a sum has no such place",
               ErrorContext{.where = "kernels.topk_add",
                            .which = "source " + std::to_string(source),
                            .expected = "0 to " + std::to_string(args.n - 1),
                            .got = std::to_string(place)});
    }
  }
  const detail::FpEnvironment environment;
  detail::topk_add_scalar(args);
}

}  // namespace zeroth::kernels
