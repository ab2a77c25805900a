// What a user may do with graphs: keep them, run them twice or late, evaluate in between, change outputs in
// place, throw in the middle. Stages are compared by bits.
#include "adapter_checks.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

namespace zeroth::test {
namespace {

TEST(Autograd, OutstandingGraphsHoldNoParameterMemory) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.train(0);
      const MemorySnapshot before = trainee.engine.memory_report().live;
      std::vector<Tensor> graphs;
      for (int step = 1; step < 10; ++step) {
        graphs.push_back(trainee.loss(step));
        trainee.train(step);
      }
      const MemoryReport after = trainee.engine.memory_report();
      require(after.live == before, "saved views hold memory");
      require(after.measured_peak == after.planned, to_text(after));
      trainee.engine.core().barrier();
    });
  }
}

TEST(Autograd, AStaleGraphIsAnErrorAtEveryStage) {
  expect_equal_at_all_stages(2, [&](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    const Tensor stale = trainee.loss(0);
    trainee.train(1);
    const std::string text = thrown_by([&] { trainee.engine.backward(stale); });
    require(text.find("modified by an inplace operation") != std::string::npos, "stale graph: " + text);
    const StepResult skipped = trainee.engine.step();
    require(!skipped.committed && skipped.reason == "backward failed on rank 0", skipped.reason);
    require(trainee.train(2).committed, "the step after it is not committed");
    return trainee.values();
  });
}

TEST(Autograd, SeveralForwardsAndBackwardsInOneStep) {
  const auto together = expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    for (int step = 0; step < 3; ++step) {
      const Tensor one = trainee.loss(2 * step);
      const Tensor two = trainee.loss(2 * step + 1);
      trainee.engine.backward(one + two);
      trainee.engine.step();
    }
    return trainee.values();
  });
  const auto one_by_one = expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
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

TEST(Autograd, CallsOfAllRanksServeRanksThatAreStillInBackward) {
  // Layers share two buckets: a rank cannot go on in backward until the others have taken its gradients, and those are
  // in the call, with their backward behind them or before them.
  for (const bool before : {false, true}) {
    (void)expect_equal_at_all_stages(3, [before](int stage, const World& world) {
      Config config = config_of(stage, 2);
      config.runtime.timeout_ms = 10'000;
      Trainee trainee(NetOptions{.layers = 7}, config, world);
      const Tensor own = torch::ones({3}, torch::TensorOptions().dtype(torch::kFloat64).requires_grad(true));
      for (int step = 0; step < 6; ++step) {
        const auto call = [&] {
          if (step % 2 == 0) {
            require(trainee.engine.average(world.rank()) == 1, "the mean of 0, 1, 2");
          } else {
            trainee.engine.core().barrier();
          }
        };
        const bool calls_first = before && world.rank() == 2;
        if (calls_first) call();
        if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        // Rank 0 has no gradients of the model: it is through at once.
        trainee.engine.backward(world.rank() == 0 ? own.sum() : trainee.loss(step));
        if (!calls_first) call();
        (void)trainee.engine.step();
      }
      return trainee.values();
    });
  }
}

TEST(Autograd, DifferentCallsOfAllRanksAreAMismatchAtOnce) {
  for (const int stage : kStages) {
    run_world(3, [&](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.engine.backward(trainee.loss(0));
      const std::string text = thrown_by([&] {
        if (world.rank() == 1) {
          (void)trainee.engine.average(1.0);
        } else {
          (void)trainee.engine.step();
        }
      });
      require(text.find("[MISMATCH] ranks come to different calls") != std::string::npos &&
                  text.find("average() on rank 1") != std::string::npos &&
                  text.find("step() on rank") != std::string::npos,
              "stage " + std::to_string(stage) + ": " + text);
    });
  }
}

TEST(Autograd, BackwardTwiceOverOneGraphDoublesTheGradient) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      const Tensor loss = trainee.loss(0);
      loss.backward({}, /*retain_graph=*/true);
      trainee.engine.backward(loss);
      const StepResult twice = trainee.engine.step();
      Trainee other({}, config_of(stage), world);
      const StepResult once = other.train(0);
      require(twice.grad_norm == 2 * once.grad_norm, "not twice the norm");
    });
  }
}

TEST(Autograd, EvaluationBetweenForwardAndBackwardChangesNothing) {
  const Values expected = plain_values(2, {}, 3);
  const Values got = expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = trainee.loss(step);
      {
        const torch::NoGradGuard no_grad;
        std::optional<c10::InferenceMode> inference;
        if (step == 1) inference.emplace();
        // Ranks evaluate different amounts.
        for (int i = 0; i <= world.rank(); ++i)
          require(!trainee.loss(100 + i).requires_grad(), "a graph under NoGradGuard");
      }
      trainee.engine.backward(loss);
      trainee.engine.step();
    }
    return trainee.values();
  });
  EXPECT_EQ(expected == got, true);
}

TEST(Autograd, GoesOnAfterAnExceptionInForward) {
  const Values expected = plain_values(2, {}, 3);
  const Values got = expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    for (int step = 0; step < 3; ++step) {
      if (step == 1 && world.rank() == 1) {
        trainee.model->layer(1).probe = [](LayerImpl&, const Tensor&) { throw std::runtime_error("user error"); };
        for (int attempt = 0; attempt < 2; ++attempt) {
          const std::string text = thrown_by([&] { static_cast<void>(trainee.loss(step)); });
          require(text == "user error", "got " + text);
        }
        trainee.model->layer(1).probe = {};
      }
      require(trainee.train(step).committed, "not committed");
    }
    return trainee.values();
  });
  EXPECT_EQ(expected == got, true);
}

TEST(Autograd, AnExceptionInBackwardSkipsTheStepOnAllRanks) {
  for (const bool plain : {false, true}) {
    expect_equal_at_all_stages(2, [plain](int stage, const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.train(0);
      const Values before = trainee.values();
      if (world.rank() == 1) {
        trainee.model->layer(1).probe = [](LayerImpl&, const Tensor& y) {
          y.register_hook([](const Tensor& grad) -> Tensor {
            if (grad.defined()) throw std::runtime_error("user error");
            return grad;
          });
        };
      }
      const Tensor loss = trainee.loss(1);
      const std::string text = thrown_by([&] { plain ? loss.backward() : trainee.engine.backward(loss); });
      require(text.find("user error") != std::string::npos ? world.rank() == 1 : world.rank() == 0, "got " + text);
      trainee.model->layer(1).probe = {};
      const StepResult result = trainee.engine.step();
      require(!result.committed && result.reason == "backward failed on rank 1", "reason: " + result.reason);
      require(trainee.values() == before, "a skipped step changed parameters");
      require(trainee.train(2).committed && trainee.train(3).committed, "training does not go on");
      require(trainee.engine.core().committed_steps() == 3, "steps are counted wrongly");
      return trainee.values();
    });
  }
}

TEST(Autograd, OutputsAndInputsChangedInPlace) {
  // Views and slices of a unit's output that the user changes, and an input that a unit changes.
  using Between = std::function<Tensor(Tensor)>;
  for (const Between& between : {Between([](Tensor h) { return h.mul_(0.5); }), Between([](Tensor h) {
                                   h.narrow(1, 0, 7).mul_(2.0);
                                   return h;
                                 }),
                                 Between([](Tensor h) { return h.view({-1, kWidth}).add_(1.0); })}) {
    expect_equal_at_all_stages(2, [&](int stage, const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.model->between = between;
      for (int step = 0; step < 2; ++step) trainee.train(step);
      return trainee.values();
    });
  }
}

TEST(Autograd, ABackwardOfABackwardGathersAgain) {
  expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    for (int step = 0; step < 3; ++step) {
      const Tensor x = batch(world.rank(), step).requires_grad_(true);
      const Tensor loss = trainee.engine.forward(x);
      const Tensor slope = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      trainee.engine.backward(loss + slope.square().sum());
      test::require(trainee.engine.step().committed, "not committed");
    }
    return trainee.values();
  });
}

TEST(Autograd, ALossOnWhatLeftAUnitBesideItsOutput) {
  for (const bool alone : {false, true}) {
    expect_equal_at_all_stages(2, [alone](int stage, const World& world) {
      Trainee trainee({}, config_of(stage), world);
      Tensor kept;
      trainee.model->layer(1).probe = [&kept](LayerImpl&, const Tensor& y) { kept = y; };
      for (int step = 0; step < 3; ++step) {
        const Tensor loss = trainee.loss(step);
        trainee.engine.backward(alone ? kept.square().mean() : loss + kept.square().mean());
        test::require(trainee.engine.step().committed, "not committed");
      }
      return trainee.values();
    });
  }
}

TEST(Autograd, ParametersAreGatheredForCodeOutsideOfTheirUnits) {
  expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    for (int step = 0; step < 3; ++step) {
      Tensor loss = trainee.loss(step);
      {
        const Tensor& weight = trainee.model->layer(1).weight;
        auto weights = trainee.engine.gathered({weight, trainee.model->layer(1).bias, trainee.model->layer(2).weight});
        loss = loss + 0.1 * weight.square().sum() + trainee.model->layer(2).weight.abs().sum();
        weights.finish();
      }
      trainee.engine.backward(loss);
      test::require(trainee.engine.step().committed, "not committed");
    }
    const std::string text = thrown_by([&] { (void)trainee.engine.gathered({torch::ones({2})}); });
    test::require(text.find("[USAGE] a tensor is no parameter of the engine's model") == 0, text);
    return trainee.values();
  });
}

TEST(Autograd, AnAliasOfAParameterIsAnErrorWhileItHasNoMemory) {
  test::run_world(2, [&](const World& world) {
    Trainee trainee({}, config_of(3), world);
    std::vector<Tensor> aliases;
    trainee.model->layer(1).probe = [&aliases](LayerImpl& layer, const Tensor&) {
      aliases = {layer.weight.detach(), layer.weight.t(), layer.weight.variable_data(), layer.weight.narrow(0, 1, 2)};
    };
    (void)trainee.train(0);
    for (const Tensor& alias : aliases) {
      for (const std::function<void()>& use :
           {std::function<void()>([&] { (void)alias.sum(); }), std::function<void()>([&] { (void)alias.clone(); }),
            std::function<void()>([&] { (void)alias.const_data_ptr(); }),
            std::function<void()>([&] { (void)alias.mutable_data_ptr(); }), std::function<void()>([&] {
              (void)torch::linear(torch::ones({1, alias.size(1)}, torch::kFloat64), alias);
            }),
            std::function<void()>([&] { alias.detach().zero_(); })}) {
        const std::string text = thrown_by(use);
        test::require(text.find("parameter 'layer1.weight' is not gathered now") != std::string::npos, "got " + text);
      }
    }
    // With the unit, the memory behind them is there again.
    trainee.model->layer(1).probe = [&aliases](LayerImpl& layer, const Tensor&) {
      test::require(torch::equal(aliases[1], layer.weight.t()), "an alias sees other values");
    };
    (void)trainee.train(1);
  });
}

TEST(Autograd, AForwardReadsParametersOfAnotherUnitAndWritesNone) {
  std::vector<double> sums;  // of rank 0
  for (const int stage : {0, 3}) {
    test::run_world(2, [&](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      const Tensor& weight = trainee.model->layer(0).weight;
      const Tensor view = weight.t();  // over the guard, before anything is gathered
      double sum = 0;
      trainee.model->layer(1).probe = [&](LayerImpl&, const Tensor&) {
        sum = weight.square().sum().item<double>() + torch::stack({view, view}).sum().item<double>();
        if (stage == 3) {
          const std::string text = thrown_by([&] { trainee.model->layer(2).weight.detach().zero_(); });
          test::require(text.find("parameter 'layer2.weight' is not gathered now") != std::string::npos, text);
        }
      };
      (void)trainee.train(0);
      test::require(sum != 0, "nothing was read");
      if (stage == 3) {
        const std::string text = thrown_by([&] { (void)weight.sum(); });
        test::require(text.find("parameter 'layer0.weight' is not gathered now") != std::string::npos, text);
      }
      if (world.rank() == 0) sums.push_back(sum);
    });
  }
  EXPECT_EQ(sums.at(0), sums.at(1));
}

TEST(Autograd, AGuardSaysItsNameToEveryReaderButOneThatOnlyLooksAtItsPointer) {
  test::run_world(2, [&](const World& world) {
    Trainee trainee({}, config_of(3), world);
    const Tensor& weight = trainee.model->layer(1).weight;
    for (const std::function<void()>& use :
         {std::function<void()>([&] { (void)weight.sum(); }), std::function<void()>([&] { (void)weight.t().clone(); }),
          std::function<void()>([&] { (void)weight.mutable_data_ptr(); }),
          std::function<void()>([&] { (void)weight.mutable_data_ptr(); }),  // the second time as well
          std::function<void()>([&] { (void)torch::linear(torch::ones({1, kWidth}, torch::kFloat64), weight); }),
          std::function<void()>([&] { (void)torch::stack({torch::zeros_like(weight), weight}); }),
          std::function<void()>([&] { weight.detach().zero_(); })}) {
      const std::string text = thrown_by(use);
      test::require(text.find("[USAGE] parameter 'layer1.weight' is not gathered now") == 0, "got " + text);
    }
    test::require(weight.storage().data() == nullptr, "torch's profiler looks at this");
    test::require(torch::zeros_like(weight).sum().item<double>() == 0 && weight.t().size(0) == kWidth, "shapes work");
    trainee.engine.core().barrier();
  });
}

}  // namespace
}  // namespace zeroth::test
