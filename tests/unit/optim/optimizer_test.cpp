// The table of optimizers, that any split of a parameter gives the same bits, and small runs against a double
// oracle. The kernels behind them are tested in tests/unit/kernels.
#include "optim/optimizer_table.h"
#include "optim/zero_one_schedule.h"
#include "support/error_of.h"
#include "support/host_machine.h"

#include <zeroth/base/error.h>
#include <zeroth/optim/optimizer.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {
namespace {

const std::vector<OptimizerOptions> kOptions{
    {.type = "AdamW"}, {.type = "Adam"}, {.type = "SGD"}, {.type = "SGD", .momentum = true}, {.type = "Lion"}};

/// One parameter with its states, in T.
template <class T>
struct Trial {
  std::vector<T> param;
  std::vector<std::vector<T>> states;
  std::vector<T> grad;
  bool operator==(const Trial& other) const {
    const auto same = [](const std::vector<T>& a, const std::vector<T>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
    };
    return same(param, other.param) && std::ranges::equal(states, other.states, same);
  }
};

template <class T>
Trial<T> make_run(const Optimizer& optimizer, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Trial<T> run;
  for (std::size_t at = 0; at < n; ++at) {
    run.param.push_back(static_cast<T>(normal(random)));
    run.grad.push_back(static_cast<T>(normal(random)));
  }
  run.states.assign(optimizer.states().size(), std::vector<T>(n, T{0}));
  return run;
}

template <class T>
void step(const Optimizer& optimizer, Trial<T>& run, std::size_t begin, std::size_t end, std::int64_t number,
          const GroupHyper& hyper, double factor, kernels::Isa isa) {
  test::HostMachine machine(isa);
  std::vector<std::byte*> states;
  for (auto& state : run.states) states.push_back(reinterpret_cast<std::byte*>(state.data() + begin));
  optimizer.step({.param = reinterpret_cast<std::byte*>(run.param.data() + begin),
                  .states = states,
                  .grad = reinterpret_cast<const std::byte*>(run.grad.data() + begin),
                  .n = static_cast<std::int64_t>(end - begin),
                  .dtype = DTypeOf<T>::value,
                  .factor = factor,
                  .step = number,
                  .hyper = hyper},
                 *machine.kernels, machine.stream);
}

constexpr GroupHyper kHyper{
    .lr = 0.03, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.25};

TEST(OptimizerTable, NamesAreWhatIsBuilt) {
  EXPECT_EQ(optimizer_names(), (std::vector<std::string>{"AdamW", "Adam", "SGD", "Lion", "Lamb", "OneBitAdam",
                                                         "OneBitLamb", "ZeroOneAdam"}));
  for (const std::string& name : optimizer_names()) {
    EXPECT_EQ(make_optimizer({.type = name})->name(), name);
  }
}

TEST(OptimizerTable, UnknownNamesAreErrorsWithTheNearest) {
  const std::vector<std::pair<std::string, std::string>> table{
      {"Adamw", "did you mean AdamW?"}, {"SDG", ""}, {"SGDM", "did you mean SGD?"}, {"", ""}, {"Muon", ""}};
  for (const auto& [name, hint] : table) {
    try {
      (void)make_optimizer({.type = name});
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_EQ(error.context().hint, hint) << name;
      EXPECT_EQ(error.context().got, name);
      EXPECT_EQ(error.context().expected, "one of AdamW, Adam, SGD, Lion, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam");
    }
  }
}

class ManyStates final : public Optimizer {
 public:
  explicit ManyStates(std::vector<StateDeclaration> states) : states_(std::move(states)) {}
  std::string_view name() const override { return "ManyStates"; }
  std::vector<StateDeclaration> states() const override { return states_; }
  void step(const StepBlock&, Kernels&, const Stream&) const override {}

 private:
  std::vector<StateDeclaration> states_;
};

TEST(OptimizerTable, TakesAnyNumberOfStatesWithDifferentNames) {
  using Made = std::unique_ptr<Optimizer>;
  constexpr OptimizerEntry kTable[] = {
      {"Five",
       [](const OptimizerOptions&) -> Made {
         return std::make_unique<ManyStates>(std::vector<StateDeclaration>{{"a"}, {"b"}, {"c"}, {"d"}, {"e"}});
       }},
      {"Same",
       [](const OptimizerOptions&) -> Made {
         return std::make_unique<ManyStates>(std::vector<StateDeclaration>{{"a"}, {"b"}, {"a"}});
       }},
  };
  EXPECT_EQ(make_optimizer({.type = "Five"}, kTable)->states().size(), 5U);
  const std::string text = test::error_of(ErrorCode::kUsage, [&] { (void)make_optimizer({.type = "Same"}, kTable); });
  EXPECT_EQ(text,
            "[USAGE] an optimizer declares two states of one name; where: optim; which: ManyStates; expected: a name "
            "for each state, by which reports and checkpoints know it; got: a, b, a");
}

TEST(Optimizer, DeclaresItsStates) {
  const auto names = [](const OptimizerOptions& options) {
    std::vector<std::string> result;
    for (const StateDeclaration& state : make_optimizer(options)->states()) result.push_back(state.name);
    return result;
  };
  EXPECT_EQ(names({.type = "AdamW"}), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(names({.type = "Adam", .momentum = true}), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(names({.type = "SGD"}), (std::vector<std::string>{}));
  EXPECT_EQ(names({.type = "Lion"}), (std::vector<std::string>{"exp_avg"}));
  EXPECT_EQ(names({.type = "SGD", .momentum = true}), (std::vector<std::string>{"momentum_buffer"}));
}

TEST(ZeroOneSchedule, IsTheListOfThePaper) {
  // Variances: every step, after 3 of them every other, after 3 further every fourth.
  const ZeroOneOptions options{
      .var_freeze_step = 20, .var_update_scaler = 3, .local_step_scaler = 4, .local_step_clipper = 4};
  const std::vector<std::int64_t> variances{1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32};
  std::vector<std::int64_t> got;
  for (std::int64_t step = 1; step <= 32; ++step) {
    if (updates_variance(options, step)) got.push_back(step);
    EXPECT_EQ(variance_updates(options, step), static_cast<std::int64_t>(got.size())) << step;
  }
  EXPECT_EQ(got, variances);
  // Synchronisations after step 20: every step, after 4 of them every other, after 4 further every fourth, no longer.
  const std::vector<std::int64_t> synchronisations{21, 22, 23, 24, 26, 28, 32, 36, 40};
  got.clear();
  for (std::int64_t step = 21; step <= 40; ++step) {
    if (synchronises(options, step)) got.push_back(step);
  }
  EXPECT_EQ(got, synchronisations);
  const ZeroOneOptions defaults;
  EXPECT_TRUE(synchronises(defaults, 100'001 + 32'677));
  EXPECT_FALSE(synchronises(defaults, 100'001 + 32'678));
}

template <class T>
void check_split() {
  const auto options = *rc::gen::elementOf(kOptions);
  const auto n = *rc::gen::inRange<std::size_t>(1, 400);
  const auto seed = *rc::gen::arbitrary<unsigned>();
  auto cuts = *rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, n + 1));
  cuts.push_back(0);
  cuts.push_back(n);
  std::sort(cuts.begin(), cuts.end());
  const auto optimizer = make_optimizer(options);
  Trial<T> whole = make_run<T>(*optimizer, n, seed);
  Trial<T> parts = whole;
  const kernels::Isa isa = kernels::best_isa();
  for (std::int64_t number = 1; number <= 3; ++number) {
    step(*optimizer, whole, 0, n, number, kHyper, 0.5, isa);
    for (std::size_t cut = 1; cut < cuts.size(); ++cut) {
      // Parts by the scalar kernel, the whole by the widest: neither may show.
      step(*optimizer, parts, cuts[cut - 1], cuts[cut], number, kHyper, 0.5,
           cut % 2 == 0 ? isa : kernels::Isa::kScalar);
    }
  }
  RC_ASSERT(whole == parts);
}

RC_GTEST_PROP(OptimizerProperty, AnySplitGivesTheSameBitsInFloat32, ()) {
  check_split<float>();
}
RC_GTEST_PROP(OptimizerProperty, AnySplitGivesTheSameBitsInFloat64, ()) {
  check_split<double>();
}

/// Ref: Loshchilov, Hutter, arXiv 1711.05101 (AdamW); Kingma, Ba, arXiv 1412.6980 (Adam); torch.optim.SGD; Chen et
/// al., arXiv 2302.06675, algorithm 2 (Lion).
void oracle_step(const OptimizerOptions& options, const GroupHyper& h, double factor, std::int64_t number,
                 Trial<double>& run) {
  const auto t = static_cast<double>(number);
  for (std::size_t at = 0; at < run.param.size(); ++at) {
    double& w = run.param[at];
    double g = run.grad[at] * factor;
    if (options.type == "Lion") {
      double& m = run.states[0][at];
      const double mix = h.beta1 * m + (1 - h.beta1) * g;
      w -= h.lr * ((mix > 0 ? 1.0 : mix < 0 ? -1.0 : 0.0) + h.weight_decay * w);
      m = h.beta2 * m + (1 - h.beta2) * g;
      continue;
    }
    if (options.type != "AdamW") g += h.weight_decay * w;
    if (options.type == "SGD") {
      if (options.momentum) {
        double& v = run.states[0][at];
        v = number == 1 ? g : h.momentum * v + (1 - h.dampening) * g;
        g = h.nesterov ? g + h.momentum * v : v;
      }
      w -= h.lr * g;
      continue;
    }
    if (options.type == "AdamW") w *= 1 - h.lr * h.weight_decay;
    double& m = run.states[0][at];
    double& v = run.states[1][at];
    m = h.beta1 * m + (1 - h.beta1) * g;
    v = h.beta2 * v + (1 - h.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(h.beta1, t));
    const double v_hat = v / (1 - std::pow(h.beta2, t));
    w -= h.lr * m_hat / (std::sqrt(v_hat) + h.eps);
  }
}

TEST(Optimizer, FollowsTheFormulasInFloat64AndFloat32) {
  for (const OptimizerOptions& options : kOptions) {
    for (const bool nesterov : {false, true}) {
      GroupHyper hyper = kHyper;
      hyper.nesterov = nesterov;
      if (nesterov) hyper.dampening = 0;
      const auto optimizer = make_optimizer(options);
      Trial<float> f32 = make_run<float>(*optimizer, 37, 5);
      Trial<double> oracle = make_run<double>(*optimizer, 37, 5);
      for (std::size_t at = 0; at < 37; ++at) {  // start from the rounded values
        oracle.param[at] = static_cast<double>(f32.param[at]);
        oracle.grad[at] = static_cast<double>(f32.grad[at]);
      }
      Trial<double> f64 = oracle;
      for (std::int64_t number = 1; number <= 20; ++number) {
        step(*optimizer, f64, 0, 37, number, hyper, 0.125, kernels::best_isa());
        step(*optimizer, f32, 0, 37, number, hyper, 0.125, kernels::best_isa());
        oracle_step(options, hyper, 0.125, number, oracle);
      }
      for (std::size_t at = 0; at < 37; ++at) {
        const double scale = 1 + std::fabs(oracle.param[at]);
        EXPECT_NEAR(f64.param[at], oracle.param[at], 1e-14 * scale) << options.type << " element " << at;
        // 20 steps of a handful of roundings of 2^-24 each.
        EXPECT_NEAR(f32.param[at], oracle.param[at], 1e-5 * scale) << options.type << " element " << at;
      }
    }
  }
}

/// Masters in two halves give the bits of whole ones, whatever ranges they are updated in.
TEST(Optimizer, HalvesOfMastersFollowWholeOnes) {
  constexpr std::size_t kN = 20'011;
  test::HostMachine machine;
  for (const OptimizerOptions& options : kOptions) {
    const auto optimizer = make_optimizer(options);
    Trial<float> whole = make_run<float>(*optimizer, kN, 7);
    std::vector<BFloat16> high;
    std::vector<std::int16_t> low(kN, 0);
    for (float& value : whole.param) {
      high.emplace_back(value);
      value = static_cast<float>(high.back());
    }
    Trial<float> split = whole;
    for (std::int64_t number = 1; number <= 5; ++number) {
      step(*optimizer, whole, 0, kN, number, kHyper, 0.5, kernels::Isa::kScalar);
      // Two ranges, the first of which is not a whole number of vectors.
      for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, 9'001}, {9'001, kN}}) {
        std::vector<std::byte*> states;
        for (auto& state : split.states) states.push_back(reinterpret_cast<std::byte*>(state.data() + begin));
        optimizer->step({.param = reinterpret_cast<std::byte*>(high.data() + begin),
                         .low = low.data() + begin,
                         .states = states,
                         .grad = reinterpret_cast<const std::byte*>(split.grad.data() + begin),
                         .n = static_cast<std::int64_t>(end - begin),
                         .factor = 0.5,
                         .step = number,
                         .hyper = kHyper},
                        *machine.kernels, machine.stream);
      }
    }
    for (std::size_t at = 0; at < kN; ++at) split.param[at] = join_master(high[at], low[at]);
    EXPECT_TRUE(whole == split) << options.type;
    for (std::size_t at = 0; at < kN; ++at) {
      const float parameter = static_cast<float>(high[at]);
      ASSERT_LE(std::fabs(parameter - whole.param[at]), std::fabs(whole.param[at]) * 0x1p-8F)
          << options.type << " element " << at;
    }
    // What a parameter cannot show counts: with parameters alone small updates would be lost.
    EXPECT_GT(std::ranges::count_if(low, [](std::int16_t bits) { return bits != 0; }),
              static_cast<std::ptrdiff_t>(kN / 2));
  }
}

TEST(StepBlock, ElementsAreReadAndWrittenWhateverTheyLieIn) {
  std::vector<double> wide{1.5, -2.5};
  const StepBlock whole{.param = reinterpret_cast<std::byte*>(wide.data()), .n = 2, .dtype = DType::kFloat64};
  whole.set_value(1, whole.value<double>(0) + 0x1p-50);
  EXPECT_EQ(wide[1], 1.5 + 0x1p-50);
  std::vector<BFloat16> high{BFloat16(1.5F), BFloat16(-2.5F)};
  std::vector<std::int16_t> low(2, 0);
  const StepBlock halves{.param = reinterpret_cast<std::byte*>(high.data()), .low = low.data(), .n = 2};
  halves.set_value(1, halves.value<float>(0) + 0x1p-20F);
  EXPECT_EQ(halves.value<float>(1), 1.5F + 0x1p-20F);
  EXPECT_EQ(high[1], BFloat16(1.5F));
}

TEST(Optimizer, SgdWithoutABufferIgnoresMomentum) {
  const auto optimizer = make_optimizer({.type = "SGD"});
  GroupHyper plain = kHyper;
  plain.momentum = 0;
  plain.dampening = 0;
  GroupHyper with = plain;
  with.momentum = 0.9;
  Trial<double> a = make_run<double>(*optimizer, 9, 1);
  Trial<double> b = a;
  for (std::int64_t number = 1; number <= 3; ++number) {
    step(*optimizer, a, 0, 9, number, plain, 1.0, kernels::Isa::kScalar);
    step(*optimizer, b, 0, 9, number, with, 1.0, kernels::Isa::kScalar);
  }
  EXPECT_TRUE(a == b);
}

TEST(Optimizer, NothingIsDoneForNoElements) {
  for (const OptimizerOptions& options : kOptions) {
    const auto optimizer = make_optimizer(options);
    Trial<float> run = make_run<float>(*optimizer, 4, 1);
    const Trial<float> before = run;
    step(*optimizer, run, 2, 2, 1, kHyper, 1.0, kernels::best_isa());
    EXPECT_TRUE(run == before);
  }
}

}  // namespace
}  // namespace zeroth
