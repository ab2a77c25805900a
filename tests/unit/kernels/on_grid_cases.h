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
#include <kernels/lamb/lamb.h>
#include <kernels/lion/lion.h>
#include <kernels/lowrank/lowrank.h>
#include <kernels/norm/norm.h>
#include <kernels/norm/norm_variants.h>
#include <kernels/quant/quant.h>
#include <kernels/reduce/extreme.h>
#include <kernels/reduce/reduce.h>
#include <kernels/sgd/sgd.h>
#include <kernels/signs/signs.h>
#include <kernels/topk/topk.h>

#include <memory>
#include <optional>
#include <string>
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
::testing::AssertionResult adamw_matches(Machine& machine, const AdamWHyper& hyper, Storage storage, const Range& range,
                                         bool frozen = false) {
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
                 .grad = frozen ? nullptr : given.data(),
                 .n = range.n,
                 .dtype = DTypeOf<T>::value,
                 .coefficients = adamw_coefficients(hyper)};
  param.give_to_machine(args);
  if (!machine.adamw(args)) return refused("adamw");
  param.give_to_cpu(args);
  args.exp_avg = exp_avg.data();
  args.exp_avg_sq = exp_avg_sq.data();
  args.grad = frozen ? nullptr : grad.data();
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

template <class T, class Machine>
::testing::AssertionResult lion_matches(Machine& machine, const LionHyper& hyper, Storage storage, const Range& range) {
  using Array = typename Machine::template Array<T>;
  Inputs inputs(range.seed);
  Parameters<T, Machine> param(inputs.next<T>(range.n), storage, range.misalign);
  GuardedArray<T> exp_avg = inputs.next<T>(range.n);
  GuardedArray<T> grad = inputs.next<T>(range.n);
  for (std::int64_t i = 0; i < range.n; i += 5) exp_avg[i] = grad[i] = T{0};
  const Array got_avg(exp_avg, range.misalign);
  const Array given(grad, range.misalign);
  LionArgs args{
      .exp_avg = got_avg.data(), .grad = given.data(), .n = range.n, .dtype = DTypeOf<T>::value, .hyper = hyper};
  param.give_to_machine(args);
  if (!machine.lion(args)) return refused("lion");
  param.give_to_cpu(args);
  args.exp_avg = exp_avg.data();
  args.grad = grad.data();
  lion_step(args, Isa::kScalar);
  if (auto result = param.matches(); !result) return result;
  if (auto result = got_avg.has_bits_of(exp_avg); !result) return result << " in exp_avg";
  return given.has_bits_of(grad) << " in grad, which is only read";
}

/// Both passes. kForms: of a gradient, with copies of the moments, without a gradient.
enum class LambForm { kPlain, kKept, kFresh };
inline constexpr LambForm kLambForms[] = {LambForm::kPlain, LambForm::kKept, LambForm::kFresh};
template <class T, class Machine>
::testing::AssertionResult lamb_matches(Machine& machine, LambForm form, Storage storage, const Range& range) {
  using Array = typename Machine::template Array<T>;
  Inputs inputs(range.seed);
  Parameters<T, Machine> param(inputs.next<T>(range.n), storage, range.misalign);
  std::vector<GuardedArray<T>> states;
  std::vector<std::unique_ptr<Array>> got;
  for (int state = 0; state < 5; ++state) {  // m, v, last, fresh, gradient
    states.push_back(inputs.next<T>(range.n));
    for (std::int64_t i = 0; i < range.n; i += 7) states.back()[i] = T{0};
    got.push_back(std::make_unique<Array>(states.back(), range.misalign));
  }
  const std::int64_t blocks = (range.n + kNormBlock - 1) / kNormBlock;
  GuardedArray<double> of_param(blocks);
  GuardedArray<double> of_update(blocks);
  const typename Machine::template Array<double> got_param(of_param, 0);
  const typename Machine::template Array<double> got_update(of_update, 0);
  LambArgs args{.n = range.n,
                .dtype = DTypeOf<T>::value,
                .coefficients = lamb_coefficients(
                    {.beta2 = 0.95, .weight_decay = 0.1, .factor = 1.0 / 6.0, .step = 7, .variance_step = 5}),
                .param_squares = got_param.data(),
                .update_measure = got_update.data()};
  args.coefficients.adam.step_size = 0.03;
  const auto give = [&](const auto& at) {
    args.exp_avg = at(0);
    args.exp_avg_sq = at(1);
    args.last = form == LambForm::kPlain ? nullptr : at(2);
    args.fresh = form == LambForm::kPlain ? nullptr : at(3);
    args.grad = form == LambForm::kFresh ? nullptr : at(4);
  };
  param.give_to_machine(args);
  give([&](std::size_t state) { return got[state]->data(); });
  if (!machine.lamb_measure(args) || !machine.lamb_apply(args)) return refused("lamb");
  param.give_to_cpu(args);
  give([&](std::size_t state) { return states[state].data(); });
  args.param_squares = of_param.data();
  args.update_measure = of_update.data();
  lamb_measure(args, Isa::kScalar);
  lamb_apply(args, Isa::kScalar);
  if (auto result = param.matches(); !result) return result;
  for (std::size_t state = 0; state < states.size(); ++state) {
    if (auto result = got[state]->has_bits_of(states[state]); !result) return result << " in state " << state;
  }
  for (auto& [want, array] :
       {std::pair<GuardedArray<double>&, const typename Machine::template Array<double>&>{of_param, got_param},
        {of_update, got_update}}) {
    const std::vector<double> values = array.to_host();
    for (std::int64_t block = 0; block < blocks; ++block) {  // which NaN or infinity it is, is not said
      const double value = values[static_cast<std::size_t>(block)];
      if (!std::isfinite(want[block]) && !std::isfinite(value)) want[block] = value;
    }
    if (auto result = array.has_bits_of(want); !result) return result << " in measures";
  }
  return ::testing::AssertionSuccess();
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

/// T: of errors; In: of gradients.
template <class T, class In, class Machine>
::testing::AssertionResult sign_message_matches(Machine& machine, bool with_momentum, const Range& range) {
  Inputs inputs(range.seed);
  GuardedArray<T> error = inputs.next<T>(range.n);
  const GuardedArray<T> momentum = inputs.next<T>(range.n);
  const GuardedArray<In> grad = inputs.next<In>(range.n);
  const typename Machine::template Array<T> got(error, range.misalign);
  const typename Machine::template Array<T> given_momentum(momentum, range.misalign);
  const typename Machine::template Array<In> given(grad, range.misalign);
  SignMessageArgs args{.error = got.data(),
                       .momentum = with_momentum ? given_momentum.data() : nullptr,
                       .grad = given.data(),
                       .grad_dtype = DTypeOf<In>::value,
                       .n = range.n,
                       .dtype = DTypeOf<T>::value,
                       .momentum_factor = 0.9,
                       .grad_factor = 0.1 / 3.0};
  if (!machine.sign_message(args)) return refused("sign_message");
  args.error = error.data();
  args.momentum = with_momentum ? momentum.data() : nullptr;
  args.grad = grad.data();
  sign_message(args, Isa::kScalar);
  if (auto result = given.has_bits_of(grad); !result) return result << " in grad, which is only read";
  return got.has_bits_of(error);
}

template <class T, class Machine>
::testing::AssertionResult sign_pack_matches(Machine& machine, const Range& range) {
  Inputs inputs(range.seed);
  GuardedArray<T> error = inputs.next<T>(range.n);
  GuardedArray<std::uint8_t> bits = inputs.next<std::uint8_t>(sign_bytes(range.n));
  const typename Machine::template Array<T> got(error, range.misalign);
  const typename Machine::template Array<std::uint8_t> got_bits(bits, range.misalign);
  SignPackArgs args{
      .error = got.data(), .bits = got_bits.data(), .n = range.n, .dtype = DTypeOf<T>::value, .scale = 1.0 / 3.0};
  if (!machine.sign_pack(args)) return refused("sign_pack");
  args.error = error.data();
  args.bits = bits.data();
  sign_pack(args, Isa::kScalar);
  if (auto result = got_bits.has_bits_of(bits); !result) return result << " in the signs";
  return got.has_bits_of(error);
}

/// How codes are made.
struct CodeCase {
  CodeFormat format = CodeFormat::kInt8;
  std::int64_t block = 32;
  bool with_error = false;
  Stochastic stochastic{};
};

inline std::vector<CodeCase> code_cases() {
  return {{},
          {.format = CodeFormat::kInt4, .block = 16},
          {.block = 256, .with_error = true},
          {.format = CodeFormat::kInt4, .block = 64, .with_error = true},
          {.block = 48, .stochastic = {.enabled = true, .seed = 7, .first = 13}},
          {.format = CodeFormat::kInt4, .with_error = true, .stochastic = {.enabled = true, .seed = 3}},
          {.format = CodeFormat::kE4M3, .with_error = true},
          {.format = CodeFormat::kE3M0, .block = 48},
          {.format = CodeFormat::kE4M3, .stochastic = {.enabled = true, .seed = 5}},
          {.format = CodeFormat::kE3M0, .with_error = true, .stochastic = {.enabled = true, .seed = 9}}};
}

template <class In, class Machine>
::testing::AssertionResult quantize_matches(Machine& machine, const CodeCase& c, const Range& range) {
  Inputs inputs(range.seed);
  const GuardedArray<In> src = inputs.next<In>(range.n);
  GuardedArray<float> error = inputs.next<float>(range.n);
  GuardedArray<std::uint8_t> codes = inputs.next<std::uint8_t>(code_bytes(range.n, c.format));
  GuardedArray<float> scales = inputs.next<float>(code_blocks(range.n, c.block));
  const typename Machine::template Array<In> given(src, range.misalign);
  const typename Machine::template Array<float> got_error(error, range.misalign);
  const typename Machine::template Array<std::uint8_t> got_codes(codes, range.misalign);
  const typename Machine::template Array<float> got_scales(scales, range.misalign);
  QuantizeArgs args{.codes = got_codes.data(),
                    .scales = got_scales.data(),
                    .src = given.data(),
                    .src_dtype = DTypeOf<In>::value,
                    .error = c.with_error ? got_error.data() : nullptr,
                    .n = range.n,
                    .block = c.block,
                    .format = c.format,
                    .stochastic = c.stochastic};
  if (!machine.quantize(args)) return refused("quantize");
  args.codes = codes.data();
  args.scales = scales.data();
  args.src = src.data();
  args.error = c.with_error ? error.data() : nullptr;
  quantize(args, Isa::kScalar);
  if (auto result = got_scales.has_bits_of(scales); !result) return result << " in the scales";
  if (auto result = got_codes.has_bits_of(codes); !result) return result << " in the codes";
  return got_error.has_bits_of(error) << " in the error";
}

template <class Out, class Machine>
::testing::AssertionResult dequantize_matches(Machine& machine, const CodeCase& c, int num_sources,
                                              const Range& range) {
  using Codes = typename Machine::template Array<std::uint8_t>;
  using Scales = typename Machine::template Array<float>;
  Inputs inputs(range.seed);
  std::vector<GuardedArray<std::uint8_t>> codes;
  std::vector<GuardedArray<float>> scales;
  std::vector<std::unique_ptr<Codes>> given_codes;
  std::vector<std::unique_ptr<Scales>> given_scales;
  std::vector<QuantSource> on_machine;
  std::vector<QuantSource> on_cpu;
  codes.reserve(static_cast<std::size_t>(num_sources));
  scales.reserve(static_cast<std::size_t>(num_sources));
  for (int k = 0; k < num_sources; ++k) {
    codes.push_back(inputs.next<std::uint8_t>(code_bytes(range.n, c.format)));
    scales.push_back(inputs.next<float>(code_blocks(range.n, c.block)));
    given_codes.push_back(std::make_unique<Codes>(codes.back(), range.misalign));
    given_scales.push_back(std::make_unique<Scales>(scales.back(), range.misalign));
    on_machine.push_back({given_codes.back()->data(), given_scales.back()->data()});
    on_cpu.push_back({codes.back().data(), scales.back().data()});
  }
  GuardedArray<Out> want = inputs.next<Out>(range.n);
  const typename Machine::template Array<Out> got(want, range.misalign);
  DequantizeArgs args{.dst = got.data(),
                      .dst_dtype = DTypeOf<Out>::value,
                      .sources = on_machine.data(),
                      .num_sources = num_sources,
                      .n = range.n,
                      .block = c.block,
                      .format = c.format,
                      .factor = 1.0F / static_cast<float>(num_sources)};
  if (!machine.dequantize(args)) return refused("dequantize");
  args.dst = want.data();
  args.sources = on_cpu.data();
  dequantize(args, Isa::kScalar);
  return got.has_bits_of(want);
}

enum class SumError { kNone, kBeside, kInPlace };

template <class T, class Machine>
::testing::AssertionResult sign_sum_matches(Machine& machine, int num_sources, SumError where, const Range& range) {
  using Signs = typename Machine::template Array<std::uint8_t>;
  Inputs inputs(range.seed);
  std::vector<GuardedArray<std::uint8_t>> bits;
  std::vector<std::unique_ptr<Signs>> given;
  std::vector<SignSource> on_machine;
  std::vector<SignSource> on_cpu;
  bits.reserve(static_cast<std::size_t>(num_sources));
  for (int k = 0; k < num_sources; ++k) {
    bits.push_back(inputs.next<std::uint8_t>(sign_bytes(range.n)));
    given.push_back(std::make_unique<Signs>(bits.back(), range.misalign));
    const double scale = 1.0 / (3.0 + k);
    on_machine.push_back({given.back()->data(), scale});
    on_cpu.push_back({bits.back().data(), scale});
  }
  GuardedArray<T> error = inputs.next<T>(range.n);
  GuardedArray<T> want = where == SumError::kInPlace ? error : inputs.next<T>(range.n);
  const typename Machine::template Array<T> given_error(error, range.misalign);
  const typename Machine::template Array<T> got(want, range.misalign);
  SignSumArgs args{.dst = got.data(),
                   .error = where == SumError::kNone      ? nullptr
                            : where == SumError::kInPlace ? got.data()
                                                          : given_error.data(),
                   .sources = on_machine.data(),
                   .num_sources = num_sources,
                   .n = range.n,
                   .dtype = DTypeOf<T>::value,
                   .factor = 1.0 / num_sources};
  if (!machine.sign_sum(args)) return refused("sign_sum");
  args.dst = want.data();
  args.error = where == SumError::kNone ? nullptr : where == SumError::kInPlace ? want.data() : error.data();
  args.sources = on_cpu.data();
  sign_sum(args, Isa::kScalar);
  return got.has_bits_of(want);
}

/// How the greatest are taken: k of 1000 elements, and from what.
struct TopkCase {
  int per_mille = 10;
  bool with_error = false;
  int values = 0;  ///< elements have one of so many magnitudes; 0: any
};

inline std::ostream& operator<<(std::ostream& out, const TopkCase& c) {
  return out << c.per_mille << " per mille, error " << c.with_error << ", values " << c.values;
}

inline std::vector<TopkCase> topk_cases() {
  std::vector<TopkCase> cases;
  for (const bool with_error : {false, true}) {
    for (const int per_mille : {0, 10, 400, 1000}) cases.push_back({per_mille, with_error, 0});
    for (const int values : {1, 3}) cases.push_back({250, with_error, values});
  }
  return cases;
}

template <class In, class Machine>
::testing::AssertionResult topk_matches(Machine& machine, const TopkCase& c, const Range& range) {
  Inputs inputs(range.seed);
  GuardedArray<In> src = inputs.next<In>(range.n);
  GuardedArray<float> error = inputs.next<float>(range.n);
  for (std::int64_t i = 0; c.values > 0 && i < range.n; ++i) {
    const auto any = inputs.next<std::int32_t>(1)[0];
    src[i] = static_cast<In>(static_cast<float>(any % c.values) + 1.0F);
    error[i] = any % 2 == 0 ? 0.0F : -2.0F * static_cast<float>(src[i]);
  }
  const std::int64_t k = (range.n * c.per_mille + 999) / 1000;
  GuardedArray<std::int32_t> places(k);
  GuardedArray<float> values(k);
  const typename Machine::template Array<In> given(src, range.misalign);
  const typename Machine::template Array<float> got_error(error, range.misalign);
  const typename Machine::template Array<std::int32_t> got_places(places, range.misalign);
  const typename Machine::template Array<float> got_values(values, range.misalign);
  TopkArgs args{.places = got_places.data(),
                .values = got_values.data(),
                .src = given.data(),
                .src_dtype = DTypeOf<In>::value,
                .error = c.with_error ? got_error.data() : nullptr,
                .n = range.n,
                .k = k};
  if (!machine.topk(args)) return refused("topk");
  args.places = places.data();
  args.values = values.data();
  args.src = src.data();
  args.error = c.with_error ? error.data() : nullptr;
  topk(args, Isa::kScalar);
  if (auto result = got_places.has_bits_of(places); !result) return result << " in the places";
  if (auto result = got_values.has_bits_of(values); !result) return result << " in the values";
  if (auto result = given.has_bits_of(src); !result) return result << " in src, which is only read";
  return got_error.has_bits_of(error) << " in the error";
}

/// The sum of what several sources have, some of them at the same places; then one with places that no sum has.
template <class Machine>
::testing::AssertionResult topk_add_matches(Machine& machine, int num_sources, const Range& range) {
  using Places = typename Machine::template Array<std::int32_t>;
  using Values = typename Machine::template Array<float>;
  Inputs inputs(range.seed);
  std::vector<GuardedArray<std::int32_t>> places;
  std::vector<GuardedArray<float>> values;
  std::vector<std::unique_ptr<Places>> given_places;
  std::vector<std::unique_ptr<Values>> given_values;
  std::vector<TopkSource> on_machine;
  std::vector<TopkSource> on_cpu;
  places.reserve(static_cast<std::size_t>(num_sources));
  values.reserve(static_cast<std::size_t>(num_sources));
  for (int source = 0; source < num_sources; ++source) {
    const std::int64_t step = 1 + source % 3;
    const std::int64_t k = source == 1 ? 0 : range.n / step;
    places.emplace_back(k);
    for (std::int64_t j = 0; j < k; ++j) places.back()[j] = static_cast<std::int32_t>(j * step);
    values.push_back(inputs.next<float>(k));
    given_places.push_back(std::make_unique<Places>(places.back(), range.misalign));
    given_values.push_back(std::make_unique<Values>(values.back(), range.misalign));
    on_machine.push_back({given_places.back()->data(), given_values.back()->data(), k});
    on_cpu.push_back({places.back().data(), values.back().data(), k});
  }
  GuardedArray<float> want = inputs.next<float>(range.n);
  const Values got(want, range.misalign);
  TopkAddArgs args{
      .dst = got.data(), .sources = on_machine.data(), .num_sources = num_sources, .n = range.n, .factor = 1.0F / 3.0F};
  GuardedArray<std::int64_t> outside(1);
  outside[0] = 5;  // is added to
  const typename Machine::template Array<std::int64_t> got_outside(outside, 0);
  if (!machine.topk_outside(args, got_outside.data()) || !machine.topk_add(args)) return refused("topk_add");
  if (auto result = got_outside.has_bits_of(outside); !result) return result << " in the count of places outside";
  args.dst = want.data();
  args.sources = on_cpu.data();
  topk_add(args);
  if (auto result = got.has_bits_of(want); !result) return result;
  GuardedArray<std::int32_t> wrong(3);
  wrong[0] = -1;
  wrong[1] = static_cast<std::int32_t>(range.n);
  wrong[2] = std::numeric_limits<std::int32_t>::max();
  const Places given_wrong(wrong, 0);
  const std::vector<TopkSource> with_wrong{on_machine.front(), {given_wrong.data(), nullptr, 3}};
  args.sources = with_wrong.data();
  args.num_sources = 2;
  if (!machine.topk_outside(args, got_outside.data())) return refused("topk_outside");
  outside[0] += 3;
  return got_outside.has_bits_of(outside) << " in the count of places outside";
}

inline std::string text_of(const LowRankShape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + " of rank " + std::to_string(shape.rank);
}

inline std::vector<LowRankShape> lowrank_shapes() {
  std::vector<LowRankShape> shapes;
  for (const std::int64_t rows : {0, 1, 5, 33}) {
    for (const std::int64_t columns : {0, 1, 15, 16, 47, 130}) {
      for (const int rank : {1, 3, 4, 7}) shapes.push_back({rows, columns, columns + rows % 3, rank});
    }
  }
  shapes.push_back({70, 65, 65, 64});
  return shapes;
}

/// Both products of a matrix, what the product of factors restores, and the error that it leaves.
template <class Machine>
::testing::AssertionResult lowrank_matches(Machine& machine, const LowRankShape& shape, std::int64_t misalign,
                                           std::uint64_t seed) {
  using Array = typename Machine::template Array<float>;
  Inputs inputs(seed);
  const std::int64_t rank = shape.rank;
  const std::int64_t p_stride = shape.rows + 2;
  const std::int64_t q_stride = shape.columns + 1;
  const GuardedArray<float> matrix = inputs.next<float>(shape.rows * shape.stride);
  const GuardedArray<float> p = inputs.next<float>(rank * p_stride);
  const GuardedArray<float> q = inputs.next<float>(rank * q_stride);
  GuardedArray<float> want_p = inputs.next<float>(rank * p_stride);
  GuardedArray<float> want_q = inputs.next<float>(rank * q_stride);
  GuardedArray<float> want = inputs.next<float>(matrix.size());
  GuardedArray<float> want_error = inputs.next<float>(matrix.size());
  const Array given(matrix, misalign);
  const Array given_p(p, misalign);
  const Array given_q(q, misalign);
  const Array got_p(want_p, misalign);
  const Array got_q(want_q, misalign);
  const Array got(want, misalign);
  const Array got_error(want_error, misalign);
  LowRankProductArgs product{.shape = shape,
                             .matrix = given.data(),
                             .factor = given_q.data(),
                             .factor_stride = q_stride,
                             .result = got_p.data(),
                             .result_stride = p_stride};
  LowRankProductArgs transposed{.shape = shape,
                                .matrix = given.data(),
                                .factor = given_p.data(),
                                .factor_stride = p_stride,
                                .result = got_q.data(),
                                .result_stride = q_stride};
  LowRankRestoreArgs restore{.shape = shape,
                             .p = given_p.data(),
                             .p_stride = p_stride,
                             .q = given_q.data(),
                             .q_stride = q_stride,
                             .result = seed % 3 == 0 ? nullptr : got.data(),
                             .error = seed % 3 == 1 ? nullptr : got_error.data()};
  if (!machine.lowrank_product(product)) return refused("lowrank_product");
  if (!machine.lowrank_transposed_product(transposed)) return refused("lowrank_transposed_product");
  if (!machine.lowrank_restore(restore)) return refused("lowrank_restore");
  product.matrix = transposed.matrix = matrix.data();
  product.factor = restore.q = q.data();
  transposed.factor = restore.p = p.data();
  product.result = want_p.data();
  transposed.result = want_q.data();
  if (restore.result != nullptr) restore.result = want.data();
  if (restore.error != nullptr) restore.error = want_error.data();
  lowrank_product(product, Isa::kScalar);
  lowrank_transposed_product(transposed, Isa::kScalar);
  lowrank_restore(restore, Isa::kScalar);
  if (auto result = got_p.has_bits_of(want_p); !result) return result << " in P";
  if (auto result = got_q.has_bits_of(want_q); !result) return result << " in Q";
  if (auto result = got.has_bits_of(want); !result) return result << " in the product of P and Q";
  return got_error.has_bits_of(want_error) << " in the error";
}

/// Of columns that are made orthonormal. Some are in the span of others, or zeros, which are then drawn anew.
template <class Machine>
::testing::AssertionResult orthonormalize_matches(Machine& machine, int rank, const Range& range) {
  using Array = typename Machine::template Array<float>;
  Inputs inputs(range.seed);
  const std::int64_t stride = range.n + 3;
  GuardedArray<float> want = inputs.next<float>(rank * stride);
  const auto column = [&](int j) { return want.data() + j * stride; };
  for (int j = 2; j < rank; j += 3) {
    for (std::int64_t i = 0; i < range.n; ++i) column(j)[i] = j % 2 == 0 ? 0.5F * column(j - 1)[i] : -0.0F;
  }
  const Array got(want, range.misalign);
  OrthonormalizeArgs args{.columns = got.data(), .rows = range.n, .stride = stride, .rank = rank};
  LowRankDrawArgs draw{.columns = got.data(), .n = range.n, .stride = stride, .rank = rank, .seed = 77};
  if (!machine.lowrank_orthonormalize(args)) return refused("lowrank_orthonormalize");
  args.columns = want.data();
  (void)lowrank_orthonormalize(args, Isa::kScalar);
  if (auto result = got.has_bits_of(want); !result) return result << " in orthonormal columns";
  if (!machine.lowrank_draw_missing(draw)) return refused("lowrank_draw_missing");
  draw.columns = want.data();
  lowrank_draw_missing(draw);
  return got.has_bits_of(want) << " in drawn columns";
}

}  // namespace zeroth::kernels::test
