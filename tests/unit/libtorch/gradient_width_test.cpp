// Gradients of bf16 parameters: a parameter used once hands on what was computed, one used several times a sum in fp32.
// 256 + 1 is 256 in bf16, so a sum that lost its width is seen.
#include "adapter_checks.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

namespace zeroth::test {
namespace {

/// sum of c * weight over `factors`: the weight's gradient is the sum of the factors.
Tensor uses(const Tensor& weight, const std::vector<double>& factors) {
  Tensor sum = torch::zeros({1}, torch::kFloat32);
  for (const double factor : factors) {
    sum = sum + (weight * torch::full({1}, factor, torch::kBFloat16)).to(torch::kFloat32);
  }
  return sum;
}

struct PartImpl : torch::nn::Module {
  PartImpl() { weight = register_parameter("weight", torch::ones({1}, torch::kBFloat16)); }
  Tensor forward(const std::vector<double>& factors) { return uses(weight, factors); }
  Tensor weight{};
};
TORCH_MODULE(Part);

struct WholeImpl : torch::nn::Module {
  WholeImpl() {
    own = register_parameter("own", torch::ones({1}, torch::kBFloat16));
    part = register_module("part", libtorch::Unit<Part>(Part()));
  }
  /// Each entry is one forward of `part`.
  Tensor forward(const std::vector<double>& own_factors, const std::vector<std::vector<double>>& part_factors) {
    Tensor sum = uses(own, own_factors);
    for (const std::vector<double>& factors : part_factors) sum = sum + part->forward(factors);
    return (at_the_end ? at_the_end(sum) : sum).sum();
  }
  std::function<Tensor(const Tensor&)> at_the_end{};
  Tensor own{};
  libtorch::Unit<Part> part{nullptr};
};
TORCH_MODULE(Whole);

Config config_at(int stage) {
  Config config = config_of(stage);
  config.bf16 = true;
  return config;
}

/// The model in its engine, and the dtypes in which gradients arrive.
struct Wide {
  Wide(int stage, const World& world) : engine(model, config_at(stage), world, quiet()) {
    for (const auto& item : model->named_parameters()) {
      item.value().register_hook([this, own = item.key() == "own"](const Tensor& grad) {
        (own ? own_dtype : part_dtype) = grad.scalar_type();
      });
    }
  }
  /// Norm of the gradients so far, which are the same on all ranks.
  double norm() { return engine.step().grad_norm; }

  Whole model{};
  torch::Dtype own_dtype{};
  torch::Dtype part_dtype{};
  libtorch::Engine<WholeImpl> engine;
};

void expect_norm(double got, double expected, int stage, const std::string& what) {
  require(got == expected, what + " at stage " + std::to_string(stage) + ": norm " + std::to_string(got));
}

template <class Body>
void at_every_stage(Body body) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) { body(stage, world); });
  }
}

TEST(GradientWidth, OneUseComesAsItWasComputed) {
  at_every_stage([](int stage, const World& world) {
    Wide wide(stage, world);
    for (int step = 0; step < 3; ++step) {
      wide.engine.backward(wide.engine.forward(std::vector<double>{3}, std::vector<std::vector<double>>{{4}}));
      expect_norm(wide.norm(), 5, stage, "one use each");
      require(wide.own_dtype == torch::kBFloat16, "own was widened");
      require(wide.part_dtype == torch::kBFloat16, "part.weight was widened");
    }
  });
}

TEST(GradientWidth, SeveralUsesAreSummedInFp32) {
  using Factors = std::vector<double>;
  using Parts = std::vector<Factors>;
  at_every_stage([](int stage, const World& world) {
    Wide wide(stage, world);
    const auto train = [&](const Factors& own, const Parts& parts) {
      wide.engine.backward(wide.engine.forward(own, parts));
      return wide.norm();
    };
    expect_norm(train({256, 1}, {}), 257, stage, "twice in the root");
    require(wide.own_dtype == torch::kFloat32, "own has a narrow sum");
    expect_norm(train({}, {{256, 1}}), 257, stage, "twice in one forward of a unit");
    expect_norm(train({}, {{256}, {1}}), 257, stage, "two forwards of a unit");
    require(wide.part_dtype == torch::kFloat32, "part.weight has a narrow sum");
    expect_norm(train({}, {{257}}), 256, stage, "one use after several");  // the factor itself is rounded
    require(wide.part_dtype == torch::kBFloat16, "part.weight was widened");
  });
}

TEST(GradientWidth, UsesOutsideTheModelsForwardCount) {
  at_every_stage([](int stage, const World& world) {
    Wide wide(stage, world);
    if (stage < 3) {  // at stage 3 nobody can read it there
      wide.engine.backward(wide.engine.forward(std::vector<double>{256}, std::vector<std::vector<double>>{}) +
                           uses(wide.model->own, {1}).sum());
      expect_norm(wide.norm(), 257, stage, "once inside, once outside");
      wide.engine.backward(wide.engine.forward(std::vector<double>{2}, std::vector<std::vector<double>>{}));
      expect_norm(wide.norm(), 2, stage, "once");
      require(wide.own_dtype == torch::kBFloat16, "own was widened");
      wide.engine.backward(uses(wide.model->own, {256, 1}).sum());
      expect_norm(wide.norm(), 257, stage, "only outside, before any hook of the engine");
    }
    wide.engine.core().barrier();
  });
}

TEST(GradientWidth, SeveralGraphsAreSeveralUses) {
  at_every_stage([](int stage, const World& world) {
    Wide wide(stage, world);
    using Factors = std::vector<double>;
    using Parts = std::vector<Factors>;
    const Tensor one = wide.engine.forward(Factors{}, Parts{{256}});
    const Tensor other = wide.engine.forward(Factors{}, Parts{{1}});
    wide.engine.backward(one + other);
    expect_norm(wide.norm(), 257, stage, "two graphs in one backward");

    wide.engine.forward(Factors{}, Parts{{2}}).backward({}, /*retain_graph=*/true);
    expect_norm(wide.norm(), 2, stage, "a graph that nobody keeps");
    const Tensor kept = wide.engine.forward(Factors{}, Parts{{256}});
    kept.backward({}, /*retain_graph=*/true);
    wide.engine.backward(kept + wide.engine.forward(Factors{}, Parts{{1}}));
    expect_norm(wide.norm(), 513, stage, "a kept graph and another");  // 256, and 256 + 1
  });
}

/// Forward without a graph; backward computes it again with one, in which the weight is used twice.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, WholeImpl* model) {
    context->saved_data["model"] = reinterpret_cast<std::int64_t>(model);
    const torch::NoGradGuard no_grad;
    return x + model->part->forward(std::vector<double>{256, 1});
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    auto* model = reinterpret_cast<WholeImpl*>(context->saved_data["model"].toInt());
    const torch::AutoGradMode with_grad(true);
    (model->part->forward(std::vector<double>{256, 1}) * grads[0]).sum().backward();
    return {grads[0], {}};
  }
};

TEST(GradientWidth, WhatBackwardComputesAgainIsSummedInFp32) {
  at_every_stage([](int stage, const World& world) {
    Wide wide(stage, world);
    wide.model->at_the_end = [&wide](const Tensor& x) { return Recomputed::apply(x, wide.model.get()); };
    wide.engine.backward(wide.engine.forward(std::vector<double>{0}, std::vector<std::vector<double>>{{1}}));
    expect_norm(wide.norm(), 258, stage, "a checkpoint");  // 1, and 256 + 1
  });
}

/// Its gradient is an fp32 or a float64 tensor, whatever came in.
struct Foreign : torch::autograd::Function<Foreign> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, bool twice_as_wide) {
    context->saved_data["dtype"] = twice_as_wide;
    return x.to(torch::kFloat32);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list) {
    return {torch::full({1}, 257.0, context->saved_data["dtype"].toBool() ? torch::kFloat64 : torch::kFloat32), {}};
  }
};

TEST(GradientWidth, AGraphThatIsStillAliveMayCountAsAUse) {
  run_world(2, [&](const World& world) {
    Wide wide(0, world);
    std::vector<Tensor> kept;
    for (int step = 0; step < 2; ++step) {
      kept.push_back(wide.engine.forward(std::vector<double>{3}, std::vector<std::vector<double>>{{4}}));
      wide.engine.backward(kept.back());
      expect_norm(wide.norm(), 5, 0, "losses that are kept");
    }
    require(wide.own_dtype == torch::kFloat32, "own is narrow");  // dearer, with the same value
  });
}

TEST(GradientWidth, AWiderGradientKeepsItsBits) {
  for (const bool twice_as_wide : {false, true}) {
    run_world(2, [&](const World& world) {
      Wide wide(0, world);
      wide.engine.backward(Foreign::apply(wide.model->own, twice_as_wide).sum());
      expect_norm(wide.norm(), 257, 0, "a function with a gradient of its own");
      const Tensor loss = wide.engine.forward(std::vector<double>{}, std::vector<std::vector<double>>{{0}});
      wide.engine.backward(loss + Foreign::apply(wide.model->own, twice_as_wide).sum());
      expect_norm(wide.norm(), 257, 0, "the same after the count");
    });
  }
}

TEST(GradientWidth, TheUsersSettingComesBack) {
  run_world(1, [&](const World& world) {
    Whole model;
    const Tensor weight = model->part->inner()->weight;
    weight.set_grad_dtype(torch::kFloat32);
    {
      libtorch::Engine<WholeImpl> engine(model, config_at(0), world, quiet());
      engine.backward(engine.forward(std::vector<double>{3}, std::vector<std::vector<double>>{{4}}));
      require(engine.step().grad_norm == 5, "norm");
    }
    require(model->own.grad_dtype() == torch::kBFloat16, "own");
    require(weight.grad_dtype() == torch::kFloat32, "part.weight");
  });
}

}  // namespace
}  // namespace zeroth::test
