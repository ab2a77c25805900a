// Kernels for CUDA against the CPU kernels, bit by bit. The cases are written once for two machines: a grid
// whose threads run one after the other on the host (cuda_grid_test.cpp) and a device
// (tests/cuda/kernels_device_test.cpp).
//
// A Machine has Array<T>{from, misalign} with data() and has_bits_of(want), both of memory that its kernels
// reach, and a bool for each op: false where it refuses the arguments.
#pragma once

#include "kernel_test_support.h"

#include <kernels/adamw/adamw.h>
#include <kernels/bucket/bucket.h>
#include <kernels/bucket/bucket_variants.h>
#include <kernels/cast/cast.h>
#include <kernels/cast/cast_variants.h>
#include <kernels/norm/norm.h>
#include <kernels/norm/norm_variants.h>
#include <kernels/reduce/extreme.h>
#include <kernels/reduce/reduce.h>
#include <kernels/sgd/sgd.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

namespace zeroth::kernels::test {

/// How many elements, how far from where an array would be aligned, and what is in them.
struct Range {
  std::int64_t n = 0;
  std::int64_t misalign = 0;
  std::uint64_t seed = kSeed;
};

inline std::ostream& operator<<(std::ostream& out, const Range& range) {
  return out << "n " << range.n << " misalign " << range.misalign << " seed " << range.seed;
}

/// Odd seeds give ordinary numbers, which take part in every rounding; even ones patterns that are mostly
/// edges.
class Inputs {
 public:
  explicit Inputs(std::uint64_t seed) : ordinary_(seed % 2 == 1), random_(seed) {}

  template <class T>
  GuardedArray<T> next(std::int64_t n) {
    GuardedArray<T> array(n);
    random_.fill(array);
    if constexpr (!std::numeric_limits<T>::is_integer) {
      for (std::int64_t i = 0; ordinary_ && i < n; ++i) {
        const auto centred = static_cast<double>(random_.next<std::int32_t>());
        array[i] = static_cast<T>(static_cast<std::conditional_t<sizeof(T) == 8, double, float>>(centred * 0x1p-27));
      }
    }
    return array;
  }

 private:
  bool ordinary_;
  RandomPatterns random_;
};

inline ::testing::AssertionResult refused(const char* op) {
  return ::testing::AssertionFailure() << op << " refused its arguments";
}

template <class In, class Out, class Machine>
::testing::AssertionResult cast_matches(Machine& machine, const Range& range) {
  using Sources = typename Machine::template Array<In>;
  using Results = typename Machine::template Array<Out>;
  Inputs inputs(range.seed);
  const GuardedArray<In> src = inputs.next<In>(range.n);
  GuardedArray<Out> want = inputs.next<Out>(range.n);
  const Sources given(src, range.misalign);
  const Results got(want, range.misalign);
  detail::CastArgs args{got.data(), DTypeOf<Out>::value, given.data(), DTypeOf<In>::value, range.n};
  if (!machine.cast(args)) return refused("cast");
  cast_range(want.data(), args.dst_dtype, src.data(), args.src_dtype, range.n, Isa::kScalar);
  if (auto result = given.has_bits_of(src); !result) return result << " in src, which is only read";
  return got.has_bits_of(want);
}

/// How a kernel is given its parameters.
enum class Storage { kWhole, kInHalves, kBesideMasters };
inline constexpr Storage kStorages[] = {Storage::kWhole, Storage::kInHalves, Storage::kBesideMasters};

/// Parameters as a kernel is given them. Doubles are whole.
template <class T, class Machine>
struct Parameters {
  template <class Element>
  using Array = typename Machine::template Array<Element>;

  Parameters(GuardedArray<T> values, Storage storage, std::int64_t misalign) : want(std::move(values)) {
    if constexpr (std::is_same_v<T, float>) {
      if (storage == Storage::kInHalves) {
        halves.emplace(want);
        high.emplace(halves->high, misalign);
        low.emplace(halves->low, misalign);
        return;
      }
      if (storage == Storage::kBesideMasters) {
        rounded.emplace(want.size());
        for (std::int64_t i = 0; i < want.size(); ++i) (*rounded)[i] = Float16(want[i]);
        narrow.emplace(*rounded, misalign);
      }
    }
    whole.emplace(want, misalign);
  }
  template <class Args>
  void give_to_machine(Args& args) {
    args.param = narrow ? static_cast<void*>(narrow->data()) : whole ? static_cast<void*>(whole->data()) : high->data();
    args.low = low ? low->data() : nullptr;
    if constexpr (std::is_same_v<T, float>) args.master = narrow ? whole->data() : nullptr;
  }
  template <class Args>
  void give_to_cpu(Args& args) {
    args.param = rounded ? static_cast<void*>(rounded->data())
                 : whole ? static_cast<void*>(want.data())
                         : halves->high.data();
    args.low = halves ? halves->low.data() : nullptr;
    if constexpr (std::is_same_v<T, float>) args.master = rounded ? want.data() : nullptr;
  }
  ::testing::AssertionResult matches() const {
    if (rounded) {
      if (auto result = narrow->has_bits_of(*rounded); !result) return result << " in the 16-bit parameters";
    }
    if (whole) return whole->has_bits_of(want) << " in param";
    if (auto result = high->has_bits_of(halves->high); !result) return result << " in the upper halves";
    return low->has_bits_of(halves->low) << " in the lower halves";
  }

  GuardedArray<T> want;
  std::optional<Halves> halves;
  std::optional<Array<T>> whole;
  std::optional<Array<BFloat16>> high;
  std::optional<Array<std::int16_t>> low;
  std::optional<GuardedArray<Float16>> rounded;
  std::optional<Array<Float16>> narrow;
};

template <class T, class Machine>
::testing::AssertionResult adamw_matches(Machine& machine, const AdamWHyper& hyper, Storage storage,
                                         const Range& range) {
  using Array = typename Machine::template Array<T>;
  Inputs inputs(range.seed);
  Parameters<T, Machine> param(inputs.next<T>(range.n), storage, range.misalign);
  GuardedArray<T> exp_avg = inputs.next<T>(range.n);
  GuardedArray<T> exp_avg_sq = inputs.next<T>(range.n);
  const GuardedArray<T> grad = inputs.next<T>(range.n);
  const Array got_avg(exp_avg, range.misalign);
  const Array got_avg_sq(exp_avg_sq, range.misalign);
  const Array given(grad, range.misalign);
  AdamWArgs args{.exp_avg = got_avg.data(),
                 .exp_avg_sq = got_avg_sq.data(),
                 .grad = given.data(),
                 .n = range.n,
                 .dtype = DTypeOf<T>::value,
                 .coefficients = adamw_coefficients(hyper)};
  param.give_to_machine(args);
  if (!machine.adamw(args)) return refused("adamw");
  param.give_to_cpu(args);
  args.exp_avg = exp_avg.data();
  args.exp_avg_sq = exp_avg_sq.data();
  args.grad = grad.data();
  adamw_step(args, Isa::kScalar);
  if (auto result = param.matches(); !result) return result;
  if (auto result = got_avg.has_bits_of(exp_avg); !result) return result << " in exp_avg";
  if (auto result = got_avg_sq.has_bits_of(exp_avg_sq); !result) return result << " in exp_avg_sq";
  return given.has_bits_of(grad) << " in grad, which is only read";
}

template <class T, class Machine>
::testing::AssertionResult sgd_matches(Machine& machine, const SgdHyper& hyper, Storage storage, const Range& range) {
  using Array = typename Machine::template Array<T>;
  Inputs inputs(range.seed);
  Parameters<T, Machine> param(inputs.next<T>(range.n), storage, range.misalign);
  GuardedArray<T> momentum = inputs.next<T>(range.n);
  const GuardedArray<T> grad = inputs.next<T>(range.n);
  const Array got_momentum(momentum, range.misalign);
  const Array given(grad, range.misalign);
  SgdArgs args{.momentum = hyper.momentum != 0.0 ? got_momentum.data() : nullptr,
               .grad = given.data(),
               .n = range.n,
               .dtype = DTypeOf<T>::value,
               .hyper = hyper};
  param.give_to_machine(args);
  if (!machine.sgd(args)) return refused("sgd");
  param.give_to_cpu(args);
  args.momentum = hyper.momentum != 0.0 ? momentum.data() : nullptr;
  args.grad = grad.data();
  sgd_step(args, Isa::kScalar);
  if (auto result = param.matches(); !result) return result;
  if (auto result = got_momentum.has_bits_of(momentum); !result) return result << " in momentum";
  return given.has_bits_of(grad) << " in grad, which is only read";
}

/// Every form that sgd_math.h has.
inline std::vector<SgdHyper> sgd_forms() {
  std::vector<SgdHyper> forms;
  for (const double decay : {0.0, 0.1}) {
    const SgdHyper plain{.lr = 0.03, .weight_decay = decay, .factor = 1.0 / 6.0};
    forms.push_back(plain);
    for (const bool nesterov : {false, true}) {
      for (const bool first_step : {false, true}) {
        SgdHyper hyper = plain;
        hyper.momentum = 0.9;
        hyper.dampening = nesterov ? 0.0 : 0.2;
        hyper.nesterov = nesterov;
        hyper.first_step = first_step;
        forms.push_back(hyper);
      }
    }
  }
  return forms;
}

template <class In, class Out, class Machine>
::testing::AssertionResult bucket_matches(Machine& machine, bool add, const Range& range) {
  Inputs inputs(range.seed);
  const GuardedArray<In> src = inputs.next<In>(range.n);
  GuardedArray<Out> want = inputs.next<Out>(range.n);
  GuardedArray<std::int64_t> count(1);
  count[0] = 7;  // is added to
  const typename Machine::template Array<In> given(src, range.misalign);
  const typename Machine::template Array<Out> got(want, range.misalign);
  const typename Machine::template Array<std::int64_t> got_count(count, 0);
  const detail::BucketArgs args{got.data(), DTypeOf<Out>::value, given.data(), DTypeOf<In>::value, range.n, add};
  if (!machine.bucket(args, got_count.data())) return refused("bucket");
  count[0] += add ? bucket_add(want.data(), src.data(), args.src_dtype, range.n, Isa::kScalar)
                  : bucket_store(want.data(), args.dst_dtype, src.data(), args.src_dtype, range.n, Isa::kScalar);
  if (auto result = got_count.has_bits_of(count); !result) return result << " in the count of non-finite elements";
  if (auto result = given.has_bits_of(src); !result) return result << " in src, which is only read";
  return got.has_bits_of(want);
}

struct SumCase {
  int num_sources = 1;
  std::vector<int> groups{};
  bool accumulate = false;
  bool mixed = false;    ///< of fp32 sources every second one is bf16
  int in_place_of = -1;  ///< the source that dst is
};

inline std::ostream& operator<<(std::ostream& out, const SumCase& c) {
  return out << "sources " << c.num_sources << " groups " << ::testing::PrintToString(c.groups) << " accumulate "
             << c.accumulate << " mixed " << c.mixed << " in place of " << c.in_place_of;
}

template <class In, class Out, class Machine>
::testing::AssertionResult sum_matches(Machine& machine, const SumCase& c, const Range& range) {
  using Sources = typename Machine::template Array<In>;
  using Halves16 = typename Machine::template Array<BFloat16>;
  using Results = typename Machine::template Array<Out>;
  Inputs inputs(range.seed);
  std::vector<GuardedArray<In>> sources;
  std::vector<GuardedArray<BFloat16>> narrow;
  std::vector<std::unique_ptr<Sources>> given;
  std::vector<std::unique_ptr<Halves16>> given_narrow;
  std::vector<const void*> on_machine;
  std::vector<const void*> on_cpu;
  std::vector<DType> dtypes;
  sources.reserve(static_cast<std::size_t>(c.num_sources));
  narrow.reserve(static_cast<std::size_t>(c.num_sources));
  for (int k = 0; k < c.num_sources; ++k) {
    if (c.mixed && k % 2 == 1) {
      narrow.push_back(inputs.next<BFloat16>(range.n));
      given_narrow.push_back(std::make_unique<Halves16>(narrow.back(), range.misalign));
      on_machine.push_back(given_narrow.back()->data());
      on_cpu.push_back(narrow.back().data());
      dtypes.push_back(DType::kBFloat16);
    } else {
      sources.push_back(inputs.next<In>(range.n));
      given.push_back(std::make_unique<Sources>(sources.back(), range.misalign));
      on_machine.push_back(given.back()->data());
      on_cpu.push_back(sources.back().data());
      dtypes.push_back(DTypeOf<In>::value);
    }
  }
  GuardedArray<Out> want = inputs.next<Out>(range.n);
  const Results separate(want, range.misalign);
  SumSourcesArgs args{.dst = separate.data(),
                      .dst_dtype = DTypeOf<Out>::value,
                      .accumulate = c.accumulate,
                      .sources = on_machine.data(),
                      .num_sources = c.num_sources,
                      .src_dtype = DTypeOf<In>::value,
                      .src_dtypes = c.mixed ? dtypes.data() : nullptr,
                      .groups = c.groups.empty() ? nullptr : c.groups.data(),
                      .num_groups = static_cast<int>(c.groups.size()),
                      .n = range.n};
  const Results* got = &separate;
  if constexpr (std::is_same_v<In, Out>) {
    if (c.in_place_of >= 0) {
      got = given[static_cast<std::size_t>(c.in_place_of)].get();
      args.dst = got->data();
      want = sources[static_cast<std::size_t>(c.in_place_of)];
    }
  }
  if (!machine.sum(args)) return refused("sum_sources");
  args.dst = want.data();
  args.sources = on_cpu.data();
  sum_sources(args, Isa::kScalar);
  for (std::size_t k = 0; k < given.size(); ++k) {
    if (static_cast<int>(k) == c.in_place_of) continue;
    if (auto result = given[k]->has_bits_of(sources[k]); !result) return result << " in a source";
  }
  return got->has_bits_of(want);
}

template <class T, class Machine>
::testing::AssertionResult extreme_matches(Machine& machine, int num_sources, bool greatest, int in_place_of,
                                           const Range& range) {
  using Array = typename Machine::template Array<T>;
  Inputs inputs(range.seed);
  std::vector<GuardedArray<T>> sources;
  std::vector<std::unique_ptr<Array>> given;
  std::vector<const void*> on_machine;
  std::vector<const void*> on_cpu;
  sources.reserve(static_cast<std::size_t>(num_sources));
  for (int k = 0; k < num_sources; ++k) {
    sources.push_back(inputs.next<T>(range.n));
    for (std::int64_t i = 0; i < range.n; i += 3) {  // equal values, zeros of both signs among them
      sources.back()[i] = static_cast<T>((i + k) % 2 == 0 ? 0.0F : (i % 2 == 0 ? -0.0F : 1.0F));
    }
    given.push_back(std::make_unique<Array>(sources.back(), range.misalign));
    on_machine.push_back(given.back()->data());
    on_cpu.push_back(sources.back().data());
  }
  GuardedArray<T> want = inputs.next<T>(range.n);
  const Array separate(want, range.misalign);
  const Array& got = in_place_of < 0 ? separate : *given[static_cast<std::size_t>(in_place_of)];
  ExtremeSourcesArgs args{.dst = got.data(),
                          .sources = on_machine.data(),
                          .num_sources = num_sources,
                          .dtype = DTypeOf<T>::value,
                          .greatest = greatest,
                          .n = range.n};
  if (!machine.extreme(args)) return refused("extreme_sources");
  args.dst = want.data();
  args.sources = on_cpu.data();
  extreme_sources(args);
  return got.has_bits_of(want);
}

/// The sums of blocks, and the words that NormAccumulator makes of them.
template <class T, class Machine>
::testing::AssertionResult norm_matches(Machine& machine, const Range& range) {
  Inputs inputs(range.seed);
  const GuardedArray<T> src = inputs.next<T>(range.n);
  const std::int64_t blocks = (range.n + kNormBlock - 1) / kNormBlock;
  GuardedArray<double> want(blocks);
  const typename Machine::template Array<T> given(src, range.misalign);
  typename Machine::template Array<double> sums(want, 0);
  if (!machine.norm(given.data(), DTypeOf<T>::value, range.n, sums.data())) return refused("norm");
  detail::norm_blocks_scalar(src.data(), DTypeOf<T>::value, range.n, want.data());
  const std::vector<double> got = sums.to_host();
  for (std::int64_t block = 0; block < blocks; ++block) {  // which NaN or infinity it is, is not said
    if (!std::isfinite(want[block]) && !std::isfinite(got[static_cast<std::size_t>(block)])) {
      want[block] = got[static_cast<std::size_t>(block)];
    }
  }
  NormAccumulator by_blocks;
  by_blocks.add_blocks(got);
  NormAccumulator whole;
  whole.add(src.data(), DTypeOf<T>::value, range.n, Isa::kScalar);
  if (!std::equal(whole.words().begin(), whole.words().end(), by_blocks.words().begin())) {
    return ::testing::AssertionFailure() << "other words of the accumulator";
  }
  if (auto result = given.has_bits_of(src); !result) return result << " in src, which is only read";
  return sums.has_bits_of(want);
}

}  // namespace zeroth::kernels::test
