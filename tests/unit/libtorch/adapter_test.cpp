// What the adapter promises about a user's model: its tensors stay the user's, guards, hooks, frozen and
// empty parameters, buffers, several engines. Stages are compared by bits.
#include "adapter_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

TEST(Adapter, KeepsTheUsersTensorsAndGuardsThem) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Net model(NetOptions{});
      std::map<std::string, c10::TensorImpl*> before;
      for (const auto& item : model->named_parameters()) before[item.key()] = item.value().unsafeGetTensorImpl();
      libtorch::Engine<NetImpl> engine(model, config_of(stage), world, quiet());
      double inside = 0;
      model->layer(1).probe = [&](LayerImpl& layer, const Tensor&) {
        inside = layer.weight.detach().square().sum().item<double>();
      };
      engine.backward(engine.forward(batch(world.rank(), 0)));
      require(engine.step().committed, "step not committed");
      require(inside > 1, "parameters of a unit cannot be read inside its forward");
      std::size_t same = 0;
      for (const auto& item : model->named_parameters()) {
        same += before.at(item.key()) == item.value().unsafeGetTensorImpl() ? 1U : 0U;
        require(item.value().numel() > 0 && item.value().requires_grad(), "shape or requires_grad is gone");
      }
      require(same == before.size(), "a parameter is not the user's tensor any more");

      const torch::NoGradGuard no_grad;
      const Tensor weight = model->layer(1).weight;
      const std::vector<std::function<void()>> touches{
          [&] { static_cast<void>(weight.sum()); }, [&] { weight.zero_(); }, [&] { weight[0][0].fill_(1.0); },
          [&] { static_cast<void>(weight.clone()); }, [&] { static_cast<void>(weight.data_ptr()); }};
      for (std::size_t touch = 0; touch < touches.size(); ++touch) {
        const std::string text = stage == 3 || touch == 0 ? thrown_by(touches[touch]) : "";
        const bool named = text.find("'layer1.weight' is not gathered") != std::string::npos;
        require(named == (stage == 3),
                "stage " + std::to_string(stage) + " access " + std::to_string(touch) + ": " + text);
      }
    });
  }
}

TEST(Adapter, AddressesAreStable) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Trainee trainee(NetOptions{.layers = 5}, config_of(stage), world);
      std::vector<std::vector<const void*>> seen(5);
      for (std::size_t layer = 0; layer < 5; ++layer) {
        trainee.model->layer(layer).probe = [&seen, layer](LayerImpl& of, const Tensor&) {
          seen[layer].push_back(of.weight.const_data_ptr());
        };
      }
      for (int step = 0; step < 4; ++step) trainee.train(step);
      for (const auto& addresses : seen) {
        require(std::ranges::count(addresses, addresses[0]) == 4, "the storage of a slot moved");
        require(reinterpret_cast<std::uintptr_t>(addresses[0]) % 64 == 0, "a parameter is not aligned");
      }
      // Nothing is gathered ahead: all layers share one slot of the ring.
      require(stage < 3 || std::ranges::all_of(
                               seen, [&](const auto& addresses) { return addresses[0] == seen[0][0]; }),
              "units do not share the ring");
    });
  }
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& calls) : calls_(calls) {}
  void operator()(const Tensor& parameter) override { calls_ += parameter.grad().defined() ? 1 : 0; }
  int& calls_;
};

TEST(Adapter, UserHooksFireBeforeDuringAndAfterTheEngine) {
  for (const int stage : {0, 3}) {
    run_world(2, [&](const World& world) {
      Net model(NetOptions{});
      int calls = 0;
      int gradients = 0;
      const Tensor weight = model->layer(0).weight;
      torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountingHook>(calls));
      weight.register_hook([&gradients](const Tensor&) { ++gradients; });
      {
        libtorch::Engine<NetImpl> engine(model, config_of(stage), world, quiet());
        for (int step = 0; step < 3; ++step) {
          engine.backward(engine.forward(batch(world.rank(), step)));
          engine.step();
        }
        engine.core().barrier();
      }
      require(calls == 3 && gradients == 3,
              "hooks fired " + std::to_string(calls) + " and " + std::to_string(gradients));
      auto* left = torch::autograd::impl::post_acc_grad_hooks(weight).get();
      require(dynamic_cast<CountingHook*>(left) != nullptr, "the user's hook is gone with the engine");
      require(!weight.grad().defined(), "a gradient is left behind");
    });
  }
}

TEST(Adapter, ConsumesTheSameRandomNumbersAtEveryStage) {
  const auto state_after = [](int stage) {
    Tensor state;
    Values values;
    run_world(1, [&](const World& world) {
      torch::manual_seed(11);
      Trainee trainee(NetOptions{.dropout = 0.3}, config_of(stage), world);
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

TEST(Adapter, FrozenUnitsAndEndsStayAsTheyAre) {
  // Only frozen units, trainable ones behind and before frozen ones, and frozen root parameters around
  // trainable units.
  for (const NetOptions& options :
       {NetOptions{.layers = 4, .frozen = {1, 2}}, NetOptions{.layers = 4, .frozen = {0, 1}},
        NetOptions{.layers = 4, .frozen = {0, 2, 3}, .freeze_ends = true},
        NetOptions{.layers = 4, .freeze_ends = true}}) {
    const Values start = plain_values(2, options, 0);
    const Values trained = plain_values(2, options, 3);
    for (const auto& [name, value] : trained) {
      const bool frozen_layer = name.starts_with("layer") && std::ranges::count(options.frozen, name[5] - '0') > 0;
      const bool frozen_end = options.freeze_ends && !name.starts_with("layer");
      EXPECT_EQ(value == start.at(name), frozen_layer || frozen_end) << name;
    }
  }
}

TEST(Adapter, AFrozenParameterIsThereUntilTheUnitsBackwardEnds) {
  // The root's head has its gradient long before the root's frozen matrix is used for that of a leaf input.
  expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee(NetOptions{.layers = 3, .frozen = {0}, .freeze_first = true}, config_of(stage), world);
    for (int step = 0; step < 2; ++step) {
      const Tensor prompt = batch(world.rank(), step).requires_grad_();
      trainee.engine.backward(trainee.engine.forward(prompt));
      require(prompt.grad().defined() && prompt.grad().isfinite().all().item<bool>(), "no gradient for the input");
      trainee.engine.step();
    }
    return trainee.values();
  });
}

TEST(Adapter, ParametersWithoutElements) {
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{0}, std::vector<std::int64_t>{3, 0, 2}}) {
    plain_values(3, NetOptions{.extra = shape}, 2);
  }
}

TEST(Adapter, TwoEnginesInOneProcessAlternate) {
  for (const int stage : {0, 3}) {
    const NetOptions small{.layers = 2, .seed = 5};
    const NetOptions large{.layers = 5, .seed = 6};
    const auto alone = [&](const NetOptions& options) {
      return values_at_stage(2, [&](const World& world) {
        Trainee trainee(options, config_of(stage), world);
        for (int step = 0; step < 3; ++step) trainee.train(step);
        return trainee.values();
      });
    };
    Values first, second;
    run_world(2, [&](const World& world) {
      Trainee one(small, config_of(stage), world);
      Trainee two(large, config_of(3 - stage), world);
      for (int step = 0; step < 3; ++step) {
        const Tensor loss = one.loss(step);
        two.train(step);
        one.engine.backward(loss);
        one.engine.step();
      }
      Values values_one = one.values();
      Values values_two = two.values();
      if (world.rank() == 0) {
        first = std::move(values_one);
        second = std::move(values_two);
      }
    });
    EXPECT_EQ(first == alone(small), true);
    EXPECT_EQ(second == alone(large), true);
  }
}

TEST(Adapter, InputsAreCastWhereItIsAskedFor) {
  struct PairImpl : torch::nn::Module {
    PairImpl() { weight = register_parameter("weight", torch::ones({2, 5})); }
    Tensor forward(const Tensor& x, const std::vector<Tensor>& more, const Tensor& index) {
      require(index.scalar_type() == torch::kLong, "integers stay");
      return torch::linear(x, weight) + torch::linear(more.at(0), weight) + index;
    }
    Tensor weight{};
  };
  TORCH_MODULE(Pair);
  for (const int stage : {0, 3}) {
    for (const bool half : {false, true}) {
      run_world(1, [&](const World& world) {
        Config config = config_of(stage);
        config.bf16 = !half;
        config.bf16_auto_cast = true;
        config.fp16 = {.enabled = half};
        config.fp16_auto_cast = true;
        Pair pair;
        libtorch::Engine engine(pair, config, world, {.log_level = LogLevel::kOff});
        const Tensor x = torch::ones({3, 5});
        const Tensor y = engine.forward(x, std::vector<Tensor>{x}, torch::ones({3, 2}, torch::kLong));
        require(y.scalar_type() == (half ? torch::kHalf : torch::kBFloat16), "float32 inputs are cast");
        require(x.scalar_type() == torch::kFloat, "the caller's tensor stays as it is");
      });
    }
  }
}

TEST(Adapter, InitialValuesAreThoseOfRankZeroAndThatIsSaidOnce) {
  const Values expected = plain_values(2, {}, 1);
  ::testing::internal::CaptureStderr();
  const Values got = values_at_stage(2, [](const World& world) {
    Trainee trainee(NetOptions{.seed = world.rank() == 0 ? 3U : 4U}, config_of(3), world,
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
  run_world(3, [&](const World& world) {
    torch::nn::ModuleHolder<TableImpl> model(std::make_shared<TableImpl>(1.0 + world.rank()));
    const void* address = model->table.data_ptr();
    libtorch::Engine<TableImpl> engine(model, config_of(1), world, {.log_level = LogLevel::kWarning});
    require(model->table.eq(1.0).all().item<bool>() && model->count.item<std::int64_t>() == 1, "not rank 0's buffers");
    require(model->table.data_ptr() == address, "another buffer than the user's");
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
    run_world(2, [&](const World& world) {
      torch::nn::ModuleHolder<TwiceImpl> model(std::make_shared<TwiceImpl>());
      libtorch::Engine<TwiceImpl> engine(model, config_of(stage), world, quiet());
      const ModelLayout& layout = engine.core().layout();
      require(layout.units.size() == 2 && layout.units[1].params.size() == 2, "parameters went to the root");
      require(layout.params[0].aliases == std::vector<std::string>{"again.weight"}, "the other name is lost");
      for (int step = 0; step < 2; ++step) {
        engine.backward(engine.forward(torch::ones({2, kWidth}, torch::kFloat64)));
        require(engine.step().committed, "not committed");
      }
      engine.core().barrier();
    });
  }
}

TEST(Adapter, NothingOfAnEngineThatIsGoneCanBeTouched) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Net model(NetOptions{});
      Tensor loss;
      {
        libtorch::Engine<NetImpl> engine(model, config_of(stage), world, quiet());
        engine.backward(engine.forward(batch(world.rank(), 0)));
        engine.step();
        loss = engine.forward(batch(world.rank(), 1));
        engine.core().barrier();
      }
      const std::string of_graph = thrown_by([&] { loss.backward(); });
      require(of_graph.find("is gone") != std::string::npos, "graph: " + of_graph);
      const std::string of_model = thrown_by([&] { static_cast<void>(model->forward(batch(0, 0))); });
      require(of_model.find("parameter 'first'") != std::string::npos, "model: " + of_model);
    });
  }
}

}  // namespace
}  // namespace zeroth::test
