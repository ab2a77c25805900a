// What the adapter promises about a user's model: identity, guards, hooks, unusual forwards and backwards,
// errors in the middle. Stages are compared by bits.
#include "test_nets.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

namespace zeroth::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kStages[] = {0, 1, 2, 3};

/// Text of what `body` throws, without torch's backtrace; "" if nothing.
std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// The same training at every stage gives the same bits; returns them.
Values expect_equal_at_all_stages(int world,
                                  const std::function<Values(int stage, const World& seat)>& body) {
  Values expected;
  for (const int stage : kStages) {
    const Values got = values_at_stage(world, [&](const World& seat) { return body(stage, seat); });
    if (stage == 0) expected = got;
    EXPECT_EQ(expected == got, true) << "stage " << stage;
  }
  return expected;
}

/// Plain training, nothing unusual.
Values plain_values(int world, const NetOptions& options, int steps) {
  return expect_equal_at_all_stages(world, [&](int stage, const World& seat) {
    Trainee trainee(options, config_of(stage), seat);
    for (int step = 0; step < steps; ++step) trainee.train(step);
    return trainee.values();
  });
}

TEST(Adapter, KeepsTheUsersTensorsAndGuardsThem) {
  for (const int stage : kStages) {
    test::run_world(2, [&](const World& seat) {
      Net model(NetOptions{});
      std::map<std::string, c10::TensorImpl*> before;
      for (const auto& item : model->named_parameters())
        before[item.key()] = item.value().unsafeGetTensorImpl();
      libtorch::Engine<NetImpl> engine(model, config_of(stage), seat, quiet());
      double inside = 0;
      model->layer(1).probe = [&](LayerImpl& layer, const Tensor&) {
        inside = layer.weight.detach().square().sum().item<double>();
      };
      engine.backward(engine.forward(batch(seat.rank(), 0)));
      test::require(engine.step().committed, "step not committed");
      test::require(inside > 1, "parameters of a unit cannot be read inside its forward");
      std::size_t same = 0;
      for (const auto& item : model->named_parameters()) {
        same += before.at(item.key()) == item.value().unsafeGetTensorImpl() ? 1U : 0U;
        test::require(item.value().numel() > 0 && item.value().requires_grad(),
                      "shape or requires_grad is gone");
      }
      test::require(same == before.size(), "a parameter is not the user's tensor any more");

      const torch::NoGradGuard no_grad;
      const Tensor weight = model->layer(1).weight;
      const std::vector<std::function<void()>> touches{[&] { static_cast<void>(weight.sum()); },
                                                       [&] { weight.zero_(); },
                                                       [&] { weight[0][0].fill_(1.0); },
                                                       [&] { static_cast<void>(weight.clone()); },
                                                       [&] { static_cast<void>(weight.data_ptr()); }};
      for (std::size_t touch = 0; touch < touches.size(); ++touch) {
        const std::string text = stage == 3 || touch == 0 ? thrown_by(touches[touch]) : "";
        const bool named = text.find("'layer1.weight' is not gathered") != std::string::npos;
        test::require(named == (stage == 3),
                      "stage " + std::to_string(stage) + " access " + std::to_string(touch) + ": " + text);
      }
    });
  }
}

TEST(Adapter, AddressesAreStable) {
  for (const int stage : kStages) {
    test::run_world(2, [&](const World& seat) {
      Trainee trainee(NetOptions{.layers = 5}, config_of(stage), seat);
      std::vector<std::vector<const void*>> seen(5);
      for (std::size_t layer = 0; layer < 5; ++layer) {
        trainee.model->layer(layer).probe = [&seen, layer](LayerImpl& of, const Tensor&) {
          seen[layer].push_back(of.weight.const_data_ptr());
        };
      }
      for (int step = 0; step < 4; ++step) trainee.train(step);
      for (const auto& addresses : seen) {
        test::require(std::ranges::count(addresses, addresses[0]) == 4, "the storage of a slot moved");
        test::require(reinterpret_cast<std::uintptr_t>(addresses[0]) % 4096 == 0, "a slot is not at a page");
      }
      // Two ring slots: layers 0, 2, 4 share one.
      test::require(stage < 3 || (seen[0][0] == seen[2][0] && seen[0][0] != seen[1][0]),
                    "units do not share the ring");
    });
  }
}

TEST(Adapter, OutstandingGraphsHoldNoParameterMemory) {
  for (const int stage : kStages) {
    test::run_world(2, [&](const World& seat) {
      Trainee trainee({}, config_of(stage), seat);
      trainee.train(0);
      const MemorySnapshot before = trainee.engine.memory_report().live;
      std::vector<Tensor> graphs;
      for (int step = 1; step < 10; ++step) {
        graphs.push_back(trainee.loss(step));
        trainee.train(step);
      }
      const MemoryReport after = trainee.engine.memory_report();
      test::require(after.live == before, "saved views hold memory");
      test::require(after.measured_peak == after.planned, to_text(after));
      trainee.engine.core().barrier();
    });
  }
}

TEST(Adapter, AStaleGraphIsAnErrorAtEveryStage) {
  expect_equal_at_all_stages(2, [&](int stage, const World& seat) {
    Trainee trainee({}, config_of(stage), seat);
    const Tensor stale = trainee.loss(0);
    trainee.train(1);
    const std::string text = thrown_by([&] { trainee.engine.backward(stale); });
    test::require(text.find("modified by an inplace operation") != std::string::npos, "stale graph: " + text);
    const StepResult skipped = trainee.engine.step();
    test::require(!skipped.committed && skipped.reason == "backward failed on rank 0", skipped.reason);
    test::require(trainee.train(2).committed, "the step after it is not committed");
    return trainee.values();
  });
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& calls) : calls_(calls) {}
  void operator()(const Tensor& parameter) override { calls_ += parameter.grad().defined() ? 1 : 0; }
  int& calls_;
};

TEST(Adapter, UserHooksFireBeforeDuringAndAfterTheEngine) {
  for (const int stage : {0, 3}) {
    test::run_world(2, [&](const World& seat) {
      Net model(NetOptions{});
      int calls = 0;
      int gradients = 0;
      const Tensor weight = model->layer(0).weight;
      torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountingHook>(calls));
      weight.register_hook([&gradients](const Tensor&) { ++gradients; });
      {
        libtorch::Engine<NetImpl> engine(model, config_of(stage), seat, quiet());
        for (int step = 0; step < 3; ++step) {
          engine.backward(engine.forward(batch(seat.rank(), step)));
          engine.step();
        }
        engine.core().barrier();
      }
      test::require(calls == 3 && gradients == 3,
                    "hooks fired " + std::to_string(calls) + " and " + std::to_string(gradients));
      auto* left = torch::autograd::impl::post_acc_grad_hooks(weight).get();
      test::require(dynamic_cast<CountingHook*>(left) != nullptr, "the user's hook is gone with the engine");
      test::require(!weight.grad().defined(), "a gradient is left behind");
    });
  }
}

TEST(Adapter, SeveralForwardsAndBackwardsInOneStep) {
  const auto together = expect_equal_at_all_stages(2, [](int stage, const World& seat) {
    Trainee trainee({}, config_of(stage), seat);
    for (int step = 0; step < 3; ++step) {
      const Tensor one = trainee.loss(2 * step);
      const Tensor two = trainee.loss(2 * step + 1);
      trainee.engine.backward(one + two);
      trainee.engine.step();
    }
    return trainee.values();
  });
  const auto one_by_one = expect_equal_at_all_stages(2, [](int stage, const World& seat) {
    Trainee trainee({}, config_of(stage), seat);
    for (int step = 0; step < 3; ++step) {
      const Tensor one = trainee.loss(2 * step);
      const Tensor two = trainee.loss(2 * step + 1);
      two.backward();  // plain torch does the same as engine.backward
      trainee.engine.backward(one);
      trainee.engine.step();
    }
    return trainee.values();
  });
  for (const auto& [name, bytes] : together) {
    const auto* a = reinterpret_cast<const double*>(bytes.data());
    const auto* b = reinterpret_cast<const double*>(one_by_one.at(name).data());
    for (std::size_t i = 0; i < bytes.size() / sizeof(double); ++i) ASSERT_NEAR(a[i], b[i], 1e-9) << name;
  }
}

TEST(Adapter, BackwardTwiceOverOneGraphDoublesTheGradient) {
  for (const int stage : kStages) {
    test::run_world(2, [&](const World& seat) {
      Trainee trainee({}, config_of(stage), seat);
      const Tensor loss = trainee.loss(0);
      loss.backward({}, /*retain_graph=*/true);
      trainee.engine.backward(loss);
      const StepResult twice = trainee.engine.step();
      Trainee other({}, config_of(stage), seat);
      const StepResult once = other.train(0);
      test::require(twice.grad_norm == 2 * once.grad_norm, "not twice the norm");
    });
  }
}

TEST(Adapter, ConsumesTheSameRandomNumbersAtEveryStage) {
  const auto state_after = [](int stage) {
    Tensor state;
    Values values;
    test::run_world(1, [&](const World& seat) {
      torch::manual_seed(11);
      Trainee trainee(NetOptions{.dropout = 0.3}, config_of(stage), seat);
      for (int step = 0; step < 3; ++step) trainee.train(step);
      values = trainee.values();
      state = at::detail::getDefaultCPUGenerator().get_state();
    });
    return std::pair(state, values);
  };
  Tensor plain;
  {
    torch::manual_seed(11);
    Net model(NetOptions{.dropout = 0.3});
    for (int step = 0; step < 3; ++step) static_cast<void>(model->forward(batch(0, step)));
    plain = at::detail::getDefaultCPUGenerator().get_state();
  }
  const auto [expected_state, expected] = state_after(0);
  EXPECT_TRUE(torch::equal(plain, expected_state)) << "the engine draws random numbers";
  for (const int stage : kStages) {
    const auto [state, values] = state_after(stage);
    EXPECT_TRUE(torch::equal(state, expected_state)) << "stage " << stage;
    EXPECT_EQ(values == expected, true) << "stage " << stage;
  }
}

TEST(Adapter, EvaluationBetweenForwardAndBackwardChangesNothing) {
  const Values expected = plain_values(2, {}, 3);
  const Values got = expect_equal_at_all_stages(2, [](int stage, const World& seat) {
    Trainee trainee({}, config_of(stage), seat);
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = trainee.loss(step);
      {
        const torch::NoGradGuard no_grad;
        std::optional<c10::InferenceMode> inference;
        if (step == 1) inference.emplace();
        // Ranks evaluate different amounts.
        for (int i = 0; i <= seat.rank(); ++i)
          test::require(!trainee.loss(100 + i).requires_grad(), "a graph under NoGradGuard");
      }
      trainee.engine.backward(loss);
      trainee.engine.step();
    }
    return trainee.values();
  });
  EXPECT_EQ(expected == got, true);
}

TEST(Adapter, GoesOnAfterAnExceptionInForward) {
  const Values expected = plain_values(2, {}, 3);
  const Values got = expect_equal_at_all_stages(2, [](int stage, const World& seat) {
    Trainee trainee({}, config_of(stage), seat);
    for (int step = 0; step < 3; ++step) {
      if (step == 1 && seat.rank() == 1) {
        trainee.model->layer(1).probe = [](LayerImpl&, const Tensor&) {
          throw std::runtime_error("user error");
        };
        for (int attempt = 0; attempt < 2; ++attempt) {
          const std::string text = thrown_by([&] { static_cast<void>(trainee.loss(step)); });
          test::require(text == "user error", "got " + text);
        }
        trainee.model->layer(1).probe = {};
      }
      test::require(trainee.train(step).committed, "not committed");
    }
    return trainee.values();
  });
  EXPECT_EQ(expected == got, true);
}

TEST(Adapter, AnExceptionInBackwardSkipsTheStepOnAllRanks) {
  for (const bool plain : {false, true}) {
    expect_equal_at_all_stages(2, [plain](int stage, const World& seat) {
      Trainee trainee({}, config_of(stage), seat);
      trainee.train(0);
      const Values before = trainee.values();
      if (seat.rank() == 1) {
        trainee.model->layer(1).probe = [](LayerImpl&, const Tensor& y) {
          y.register_hook([](const Tensor& grad) -> Tensor {
            if (grad.defined()) throw std::runtime_error("user error");
            return grad;
          });
        };
      }
      const Tensor loss = trainee.loss(1);
      const std::string text = thrown_by([&] { plain ? loss.backward() : trainee.engine.backward(loss); });
      test::require(text.find("user error") != std::string::npos ? seat.rank() == 1 : seat.rank() == 0,
                    "got " + text);
      trainee.model->layer(1).probe = {};
      const StepResult result = trainee.engine.step();
      test::require(!result.committed && result.reason == "backward failed on rank 1",
                    "reason: " + result.reason);
      test::require(trainee.values() == before, "a skipped step changed parameters");
      test::require(trainee.train(2).committed && trainee.train(3).committed, "training does not go on");
      test::require(trainee.engine.core().committed_steps() == 3, "steps are counted wrongly");
      return trainee.values();
    });
  }
}

TEST(Adapter, FrozenUnitsAndEndsStayAsTheyAre) {
  // Only frozen units, trainable ones behind and before frozen ones, and frozen root parameters around
  // trainable units.
  for (const NetOptions& options : {NetOptions{.layers = 4, .frozen = {1, 2}},
                                    NetOptions{.layers = 4, .frozen = {0, 1}},
                                    NetOptions{.layers = 4, .frozen = {0, 2, 3}, .freeze_ends = true},
                                    NetOptions{.layers = 4, .freeze_ends = true}}) {
    const Values start = plain_values(2, options, 0);
    const Values trained = plain_values(2, options, 3);
    for (const auto& [name, value] : trained) {
      const bool frozen_layer =
          name.starts_with("layer") && std::ranges::count(options.frozen, name[5] - '0') > 0;
      const bool frozen_end = options.freeze_ends && !name.starts_with("layer");
      EXPECT_EQ(value == start.at(name), frozen_layer || frozen_end) << name;
    }
  }
}

TEST(Adapter, AFrozenParameterIsThereUntilTheUnitsBackwardEnds) {
  // The root's head has its gradient long before the root's frozen matrix is used for that of a leaf input.
  expect_equal_at_all_stages(2, [](int stage, const World& seat) {
    Trainee trainee(NetOptions{.layers = 3, .frozen = {0}, .freeze_first = true}, config_of(stage), seat);
    for (int step = 0; step < 2; ++step) {
      const Tensor prompt = batch(seat.rank(), step).requires_grad_();
      trainee.engine.backward(trainee.engine.forward(prompt));
      test::require(prompt.grad().defined() && prompt.grad().isfinite().all().item<bool>(),
                    "no gradient for the input");
      trainee.engine.step();
    }
    return trainee.values();
  });
}

TEST(Adapter, ParametersWithoutElements) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{0}, std::vector<std::int64_t>{3, 0, 2}}) {
    plain_values(3, NetOptions{.extra = shape}, 2);
  }
}

TEST(Adapter, OutputsAndInputsChangedInPlace) {
  // Views and slices of a unit's output that the user changes, and an input that a unit changes.
  using Between = std::function<Tensor(Tensor)>;
  for (const Between& between : {Between([](Tensor h) { return h.mul_(0.5); }),
                                 Between([](Tensor h) {
                                   h.narrow(1, 0, 7).mul_(2.0);
                                   return h;
                                 }),
                                 Between([](Tensor h) {
                                   return h.view({-1, kWidth}).add_(1.0);
                                 })}) {
    expect_equal_at_all_stages(2, [&](int stage, const World& seat) {
      Trainee trainee({}, config_of(stage), seat);
      trainee.model->between = between;
      for (int step = 0; step < 2; ++step) trainee.train(step);
      return trainee.values();
    });
  }
}

TEST(Adapter, TwoEnginesInOneProcessAlternate) {
  for (const int stage : {0, 3}) {
    const NetOptions small{.layers = 2, .seed = 5};
    const NetOptions large{.layers = 5, .seed = 6};
    const auto alone = [&](const NetOptions& options) {
      return values_at_stage(2, [&](const World& seat) {
        Trainee trainee(options, config_of(stage), seat);
        for (int step = 0; step < 3; ++step) trainee.train(step);
        return trainee.values();
      });
    };
    Values first, second;
    test::run_world(2, [&](const World& seat) {
      Trainee one(small, config_of(stage), seat);
      Trainee two(large, config_of(3 - stage), seat);
      for (int step = 0; step < 3; ++step) {
        const Tensor loss = one.loss(step);
        two.train(step);
        one.engine.backward(loss);
        one.engine.step();
      }
      Values values_one = one.values();
      Values values_two = two.values();
      if (seat.rank() == 0) {
        first = std::move(values_one);
        second = std::move(values_two);
      }
    });
    EXPECT_EQ(first == alone(small), true);
    EXPECT_EQ(second == alone(large), true);
  }
}

TEST(Adapter, InitialValuesAreThoseOfRankZeroAndThatIsSaidOnce) {
  const Values expected = plain_values(2, {}, 1);
  ::testing::internal::CaptureStderr();
  const Values got = values_at_stage(2, [](const World& seat) {
    Trainee trainee(NetOptions{.seed = seat.rank() == 0 ? 3U : 4U},
                    config_of(3),
                    seat,
                    {.log_level = LogLevel::kWarning});
    trainee.train(0);
    return trainee.values();
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(expected == got, true);
  const auto found = log.find("initial values differed from rank 0's");
  ASSERT_NE(found, std::string::npos) << log;
  EXPECT_EQ(log.find("initial values", found + 1), std::string::npos) << log;
  EXPECT_THAT(log, HasSubstr("[zeroth 1/2]"));
}

TEST(Adapter, BuffersStartAsThoseOfRankZero) {
  struct TableImpl : torch::nn::Module {
    explicit TableImpl(double value) {
      weight = register_parameter("weight", torch::ones({3, 5}));
      table = register_buffer("table", torch::full({4, 3}, value).t());
      count = register_buffer("count", torch::tensor(static_cast<std::int64_t>(value)));
    }
    Tensor forward(const Tensor& x) { return torch::matmul(torch::linear(x, weight), table).sum(); }
    Tensor weight{}, table{}, count{};
  };
  ::testing::internal::CaptureStderr();
  test::run_world(3, [&](const World& seat) {
    torch::nn::ModuleHolder<TableImpl> model(std::make_shared<TableImpl>(1.0 + seat.rank()));
    const void* address = model->table.data_ptr();
    libtorch::Engine<TableImpl> engine(model, config_of(1), seat, {.log_level = LogLevel::kWarning});
    test::require(model->table.eq(1.0).all().item<bool>() && model->count.item<std::int64_t>() == 1,
                  "not rank 0's buffers");
    test::require(model->table.data_ptr() == address, "another buffer than the user's");
    engine.core().barrier();
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("[zeroth 1/3] warning: buffers differed from rank 0's (first: table)"));
  EXPECT_THAT(log, HasSubstr("[zeroth 2/3]"));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("[zeroth 0/3]")));
}

TEST(Adapter, AUnitRegisteredTwiceIsOneUnit) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{9});
      layer = register_module("layer", libtorch::Unit<Layer>(Layer(NetOptions{}, generator, true)));
      register_module("again", layer);
    }
    Tensor forward(const Tensor& x) { return layer->forward(layer->forward(x)).square().mean(); }
    libtorch::Unit<Layer> layer = nullptr;
  };
  for (const int stage : kStages) {
    test::run_world(2, [&](const World& seat) {
      torch::nn::ModuleHolder<TwiceImpl> model(std::make_shared<TwiceImpl>());
      libtorch::Engine<TwiceImpl> engine(model, config_of(stage), seat, quiet());
      const ModelLayout& layout = engine.core().layout();
      test::require(layout.units.size() == 2 && layout.units[1].params.size() == 2,
                    "parameters went to the root");
      test::require(layout.params[0].aliases == std::vector<std::string>{"again.weight"},
                    "the other name is lost");
      for (int step = 0; step < 2; ++step) {
        engine.backward(engine.forward(torch::ones({2, kWidth}, torch::kFloat64)));
        test::require(engine.step().committed, "not committed");
      }
      engine.core().barrier();
    });
  }
}

TEST(Adapter, CreateGraphIsRefusedWhereParametersAreSharded) {
  for (const int stage : kStages) {
    test::run_world(1, [&](const World& seat) {
      Trainee trainee({}, config_of(stage), seat);
      const Tensor loss = trainee.loss(0);
      const std::string text = thrown_by([&] { loss.backward({}, true, /*create_graph=*/true); });
      test::require((text.find("create_graph does not work") != std::string::npos) == (stage == 3), text);
    });
  }
}

TEST(Adapter, NothingOfAnEngineThatIsGoneCanBeTouched) {
  for (const int stage : kStages) {
    test::run_world(2, [&](const World& seat) {
      Net model(NetOptions{});
      Tensor loss;
      {
        libtorch::Engine<NetImpl> engine(model, config_of(stage), seat, quiet());
        engine.backward(engine.forward(batch(seat.rank(), 0)));
        engine.step();
        loss = engine.forward(batch(seat.rank(), 1));
        engine.core().barrier();
      }
      const std::string of_graph = thrown_by([&] { loss.backward(); });
      test::require(of_graph.find("is gone") != std::string::npos, "graph: " + of_graph);
      const std::string of_model = thrown_by([&] { static_cast<void>(model->forward(batch(0, 0))); });
      test::require(of_model.find("parameter 'first'") != std::string::npos, "model: " + of_model);
    });
  }
}

}  // namespace
}  // namespace zeroth::testing
