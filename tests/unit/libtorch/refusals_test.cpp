// Bad input: a clear error at once, on every rank, with the name of what is wrong.
#include "adapter_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <limits>
#include <sstream>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// One parameter that may be anything, beside one that is in order.
struct OddImpl : torch::nn::Module {
  OddImpl(Tensor odd, bool trainable) {
    good = register_parameter("good", torch::ones({4}));
    parameter = register_parameter("odd", std::move(odd), trainable);
  }
  Tensor forward(const Tensor& x) { return (x * good).sum(); }
  Tensor good{}, parameter{};
};
TORCH_MODULE(Odd);

TEST(Refusals, ParametersThatCannotBePartitionedAreNamed) {
  struct Case {
    const char* what;
    std::function<Tensor()> make;
    bool trainable;
    const char* says;
    ErrorCode code = ErrorCode::kModel;
  };
  const std::vector<Case> cases{
      {"meta", [] { return torch::empty({3, 3}, torch::device(torch::kMeta)); }, true, "meta tensor"},
      {"sparse", [] { return torch::eye(3).to_sparse(); }, true, "sparse"},
      {"compressed", [] { return torch::eye(4).to_sparse_csr(); }, true, "not strided"},
      {"complex128", [] { return torch::ones({3}, torch::kComplexDouble); }, false, "ComplexDouble"},
      {"half", [] { return torch::ones({3}, torch::kHalf); }, true, "no loss scale", ErrorCode::kConfig},
      {"expanded", [] { return torch::ones({1, 4}).expand({3, 4}); }, true, "strides [0, 1] with gaps or overlap"},
      {"with gaps", [] { return torch::ones({4, 6}).slice(1, 0, 4); }, true, "strides [6, 1] with gaps or overlap"},
  };
  for (const Case& odd : cases) {
    const std::string text = refusal(2, odd.code, [&](const World& world) {
      Odd model(odd.make(), odd.trainable);
      libtorch::Engine<OddImpl> engine(model, config_of(3), world, quiet());
    });
    EXPECT_THAT(text, AllOf(HasSubstr("which: odd"), HasSubstr(odd.says))) << odd.what;
  }
}

TEST(Refusals, NothingToTrain) {
  const std::string text = refusal(2, ErrorCode::kUsage, [](const World& world) {
    Trainee trainee(NetOptions{.layers = 2, .frozen = {0, 1}, .freeze_ends = true}, config_of(2), world);
    EXPECT_TRUE(trainee.loss(0).isfinite().item<bool>());
    (void)trainee.engine.step();
  });
  EXPECT_THAT(text, HasSubstr("no trainable parameter"));
}

TEST(Refusals, ModelsThatDifferBetweenRanks) {
  struct Case {
    NetOptions other;
    const char* says;
  };
  for (const Case& different : {Case{{.layers = 4}, "layer3"}, Case{{.frozen = {1}}, "layer1.weight"},
                                Case{{.dtype = torch::kFloat32}, "first"}, Case{{.extra = {2}}, "layer0.extra"}}) {
    const std::string text = refusal(3, ErrorCode::kMismatch, [&](const World& world) {
      Trainee trainee(world.rank() == 2 ? different.other : NetOptions{}, config_of(3), world);
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 2/3"), HasSubstr(different.says)));
  }
  const std::string text = refusal(2, ErrorCode::kMismatch, [&](const World& world) {
    Config config = config_of(3);
    if (world.rank() == 1) config.optimizer.lr = 0.5;
    Trainee trainee({}, config, world);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1/2"), HasSubstr("lr")));
}

TEST(Refusals, BuffersThatDifferBetweenRanks) {
  const std::string text = refusal(2, ErrorCode::kMismatch, [](const World& world) {
    Odd model(torch::ones({2}), true);
    model->register_buffer("table", torch::ones({3 + world.rank()}));
    libtorch::Engine<OddImpl> engine(model, config_of(3), world, quiet());
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1/2"), HasSubstr("which: table")));
}

TEST(Refusals, ArchivesAndPointersOfParametersThatAreNotGathered) {
  for (const int stage : {0, 2, 3}) {
    run_world(2, [stage](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.train(0);
      const Tensor weight = trainee.model->layer(1).weight;
      const auto archive = [](const auto& what) {
        return [what] {
          std::ostringstream out;
          torch::save(what, out);
        };
      };
      const std::vector<std::pair<std::string, std::function<void()>>> ways{
          {"a module", archive(trainee.model)},
          {"a tensor", archive(weight)},
          {"several", archive(std::vector{weight, trainee.model->head})},
          {"a pickle", [&] { (void)torch::pickle_save(weight); }},
          {"a pointer", [&] { (void)weight.data_ptr(); }},
      };
      for (const auto& [what, use] : ways) {
        const std::string text = thrown_by(use);
        const bool refused =
            text.find("is not gathered now") != std::string::npos &&
            (text.find("which: layer") != std::string::npos || text.find("which: first") != std::string::npos) &&
            text.find("release_parameters()") != std::string::npos && text.find("close()") == std::string::npos &&
            text.find("units=") == std::string::npos;
        require(stage == 3 ? refused : text.empty(), what + " at stage " + std::to_string(stage) + ": " + text);
      }
    });
  }
}

TEST(Refusals, AModelWhoseEngineIsGoneHasNoValuesUnlessTheyWereGivenBack) {
  for (const int stage : {0, 2, 3}) {
    run_world(2, [stage](const World& world) {
      for (const bool gives_back : {false, true}) {
        Net model{NetOptions()};
        {
          libtorch::Engine<NetImpl> engine(model, config_of(stage), world, quiet());
          if (gives_back) engine.release_parameters();
        }
        const std::string text = thrown_by([&] { (void)model->head.sum(); });
        const bool refused = text.find("parameter 'head' has no values any more") != std::string::npos &&
                             text.find("release_parameters() gives values back") != std::string::npos;
        require(gives_back ? text.empty() : refused, text);
      }
    });
  }
}

TEST(Refusals, LossWithoutGradient) {
  for (const int stage : {0, 3}) {
    const std::string text = refusal(2, ErrorCode::kModel, [stage](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.train(0);
      const torch::NoGradGuard no_grad;
      trainee.engine.backward(trainee.loss(1));
    });
    EXPECT_THAT(text, HasSubstr("no gradient can flow"));
    EXPECT_THAT(refusal(2, ErrorCode::kModel,
                        [stage](const World& world) {
                          Trainee trainee({}, config_of(stage), world);
                          trainee.engine.backward(trainee.loss(0).detach());
                        }),
                HasSubstr("requires_grad is false"));
    EXPECT_THAT(refusal(2, ErrorCode::kModel,
                        [stage](const World& world) {
                          Trainee trainee({}, config_of(stage), world);
                          trainee.engine.backward(Tensor());
                        }),
                HasSubstr("undefined"));
  }
}

TEST(Refusals, StepWithoutBackward) {
  for (const int stage : {0, 3}) {
    const std::string text = refusal(2, ErrorCode::kUsage, [stage](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      trainee.train(0);
      trainee.engine.step();
    });
    EXPECT_THAT(text, HasSubstr("step() without a backward"));
  }
}

TEST(Refusals, ASparseGradientTrainsAsADenseOne) {
  struct TableImpl : torch::nn::Module {
    TableImpl() { table = register_parameter("table", torch::ones({6, 4})); }
    Tensor forward(const Tensor& x) {
      return torch::embedding(table, x, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false, /*sparse=*/true).sum();
    }
    Tensor table{};
  };
  run_world(2, [](const World& world) {
    torch::nn::ModuleHolder<TableImpl> model(std::make_shared<TableImpl>());
    libtorch::Engine<TableImpl> engine(model, config_of(0), world, quiet());
    engine.backward(engine.forward(torch::tensor({1, 2})));
    const Tensor grad = engine.full("table", "grad");
    require(grad[1].sum().item<float>() == 4 && grad[0].sum().item<float>() == 0, "the gradient of a sparse embedding");
    require(engine.step().committed, "a step with a sparse gradient");
  });
}

/// Makes the gradient of layer1.bias non-finite in `count` elements whenever `when` says so.
void poison(Net& model, std::int64_t count, std::function<bool()> when, double value) {
  model->layer(1).bias.register_hook([count, when = std::move(when), value](const Tensor& grad) {
    if (!when()) return grad;
    Tensor changed = grad.clone();
    changed.narrow(0, 4, count).fill_(value);
    return changed;
  });
}

TEST(NonFinite, IsSkippedOnAllRanksAndTheFirstOffenderIsNamed) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const int stage : {0, 1, 2, 3}) {
    for (const double value : {std::nan(""), kInfinity, -kInfinity}) {
      run_world(3, [&](const World& world) {
        Trainee trainee({}, config_of(stage, /*micro_steps=*/3), world);
        int step = 0;
        int micro = 0;
        poison(trainee.model, 3, [&] { return step == 1 && world.rank() >= 1 && micro >= world.rank(); }, value);
        for (; step < 3; ++step) {
          const Values before = trainee.values();
          StepResult result;
          for (micro = 0; micro < 3; ++micro) result = trainee.train(step * 8 + micro);
          require(result.boundary && result.committed == (step != 1), "committed");
          require((trainee.values() == before) == (step == 1), "parameters of a skipped step");
          if (step != 1) continue;
          require(result.first_offender.has_value(), "no offender");
          const FirstOffender& offender = *result.first_offender;
          require(
              offender.param == "layer1.bias" && offender.rank == 1 && offender.micro_step == 1 && offender.count == 3,
              result.reason);
          require(result.reason.find("layer1.bias, rank 1, micro-step 1, 3 elements") != std::string::npos,
                  result.reason);
        }
      });
    }
  }
}

TEST(NonFinite, ASumThatOverflowsIsFoundThoughEveryPartIsFinite) {
  for (const int stage : {0, 3}) {
    run_world(2, [&](const World& world) {
      Trainee trainee({}, config_of(stage), world);
      bool on = true;
      poison(trainee.model, 2, [&] { return on; }, 1.5e308);
      const StepResult result = trainee.train(0);
      require(!result.committed && !result.first_offender, "reason " + result.reason);
      require(result.reason.find("each of them is") != std::string::npos, result.reason);
      on = false;
      require(trainee.train(1).committed, "training does not go on");
    });
  }
}

TEST(NonFinite, TenInARowEndTheTraining) {
  const std::string text = refusal(2, ErrorCode::kNonFinite, [](const World& world) {
    Trainee trainee({}, config_of(3), world);
    int step = 0;
    // Five bad ones, a good one, then only bad ones.
    poison(trainee.model, 1, [&] { return world.rank() == 1 && step != 5; }, std::nan(""));
    for (; step < 15; ++step) require(trainee.train(step).committed == (step == 5), "step " + std::to_string(step));
    trainee.train(step);
    require(false, "not reached");
  });
  EXPECT_THAT(text, AllOf(HasSubstr("10 steps in a row"), HasSubstr("which: layer1.bias"), HasSubstr("rank 1")));
}

}  // namespace
}  // namespace zeroth::test
