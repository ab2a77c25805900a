// Models that ranks share: the configuration's mesh is the one along which they are split, and such ranks have one
// batch.
#include "adapter_checks.h"

#include <zeroth/engine/settings.h>
#include <zeroth/libtorch/tensor_parallel.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <mutex>

namespace zeroth::test {
namespace {

using libtorch::ColumnLinear;
using libtorch::ParameterBox;
using libtorch::RankGroup;
using libtorch::RowLinear;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

struct SharedImpl : torch::nn::Module {
  explicit SharedImpl(const RankGroup& tp)
      : up(register_module("up", ColumnLinear(sizes(5, 8), tp))),
        down(register_module("down", RowLinear(sizes(8, 5), tp))) {}
  static libtorch::LinearSizes sizes(std::int64_t in, std::int64_t out) {
    return {.in_features = in, .out_features = out, .dtype = torch::kFloat64};
  }
  Tensor forward(const Tensor& x) { return down->forward(torch::tanh(up->forward(x))).square().mean(); }
  ColumnLinear up{nullptr};
  RowLinear down{nullptr};
};
TORCH_MODULE(Shared);

Config shared_config(int stage, int dp, int tp) {
  Config config = config_of(stage);
  config.mesh.dp = dp;
  config.mesh.tp = tp;
  return config;
}

Shared shared_model(const Mesh& mesh) {
  at::set_num_threads(1);
  static std::mutex one_generator;  // torch's
  const std::lock_guard lock(one_generator);
  torch::manual_seed(1);
  return Shared(RankGroup(mesh.axis("tp")));
}

TEST(SharedModels, TrainAlikeOnAnyMeshOfTheConfiguration) {
  for (const int stage : {0, 3}) {
    std::vector<double> norms;
    for (const auto& [ranks, dp, tp] : {std::array{1, 1, 1}, {2, 1, 2}, {2, 0, 2}}) {
      run_world(ranks, [&, dp = dp, tp = tp](const World& world) {
        const Config config = shared_config(stage, dp, tp);
        const Mesh mesh = world.mesh(config);
        Shared model = shared_model(mesh);
        libtorch::Engine<SharedImpl> engine(model, config, world, quiet());
        engine.backward(engine.forward(batch(mesh.coordinate("dp"), 0)));
        const double norm = engine.step().grad_norm;
        if (world.rank() == 0) norms.push_back(norm);
      });
    }
    for (const double norm : norms) EXPECT_NEAR(norm, norms[0], 1e-12) << "stage " << stage;
  }
}

TEST(SharedModels, AnotherMeshThanTheConfigurationsIsRefused) {
  struct Case {
    const char* what;
    MeshSpec made;
    int dp, tp;
    const char* expected;
    const char* got;
  };
  const std::vector<Case> cases{
      {"fewer ranks share", {{{"dp", 2}, {"tp", 2}}}, 1, 4, "expected: tp=4", "got: dp=2 tp=2"},
      {"more ranks share", {{{"tp", 4}}}, 2, 2, "expected: dp=2 tp=2", "got: tp=4"},
      {"the axes are swapped", {{{"tp", 2}, {"dp", 2}}}, 2, 2, "expected: dp=2 tp=2", "got: tp=2 dp=2"}};
  for (const Case& one : cases) {
    for (const int stage : {0, 3}) {
      const std::string text = refusal(4, ErrorCode::kConfig, [&](const World& world) {
        const Config config = shared_config(stage, one.dp, one.tp);
        const Mesh mesh = world.mesh(one.made, make_comm_options(config, world.size()));
        libtorch::Engine<SharedImpl> engine(shared_model(mesh), config, world, quiet());
      });
      EXPECT_THAT(text, AllOf(HasSubstr("/zeroth/mesh"), HasSubstr(one.expected), HasSubstr(one.got),
                              HasSubstr("world.mesh(config)")))
          << one.what;
    }
  }
}

TEST(SharedModels, PartsThatDoNotMakeTheWholeOnceAreRefused) {
  struct Case {
    const char* what;
    std::function<void(ParameterBox& box, int rank)> change;
    const char* says;
  };
  const std::vector<Case> cases{{"one part twice", [](ParameterBox& box, int) { box.offset = {0, 0}; },
                                 "got: rank 0 has [4, 5] at [0, 0], rank 1 has [4, 5] at [0, 0]"},
                                {"an overlap", [](ParameterBox& box, int rank) { box.offset = {rank * 3, 0}; },
                                 "got: rank 0 has [4, 5] at [0, 0], rank 1 has [4, 5] at [3, 0]"},
                                {"a gap",
                                 [](ParameterBox& box, int rank) {
                                   box.logical_shape = {9, 5};
                                   box.offset = {rank * 5, 0};
                                 },
                                 "got: parts with 40 elements of 45"}};
  for (const Case& one : cases) {
    const std::string text = refusal(2, ErrorCode::kMismatch, [&](const World& world) {
      const Config config = shared_config(3, 0, 2);
      const Mesh mesh = world.mesh(config);
      Shared model = shared_model(mesh);
      libtorch::EngineOptions options = quiet();
      options.box_of = [&](const std::string& name, const Tensor&) -> std::optional<ParameterBox> {
        if (name != "up.weight") return std::nullopt;
        ParameterBox box = model->up->boxes()[0].second;
        one.change(box, world.rank());
        return box;
      };
      libtorch::Engine<SharedImpl> engine(model, config, world, options);
    });
    EXPECT_THAT(text, AllOf(HasSubstr("which: up.weight"), HasSubstr(one.says))) << one.what;
  }
  // The groups of a mesh that the world does not know: of another world, or of torch.
  const std::string text = refusal(4, ErrorCode::kMismatch, [&](const World& world) {
    const Config config = shared_config(0, 1, 4);
    const Mesh own = world.mesh(config);
    const auto all = world.connect(make_comm_options(config, 4), std::make_shared<TrafficTable>());
    const Mesh mesh(all, {{{"dp", 2}, {"tp", 2}}});
    libtorch::Engine<SharedImpl> engine(shared_model(mesh), config, world, quiet());
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 0 has [4, 5] at [0, 0], rank 2 has [4, 5] at [0, 0]"),
                          HasSubstr("along the mesh dp=1 sp=1 tp=4")));
}

TEST(SharedModels, RanksWithOtherBatchesAreRefused) {
  const auto refused = [](int dp, const std::function<Tensor(const World& world)>& input, bool compares = true) {
    const int ranks = dp * 2;
    const auto body = [&](const World& world) {
      const Config config = shared_config(3, dp, 2);
      const Mesh mesh = world.mesh(config);
      libtorch::EngineOptions options = quiet();
      if (!compares) options.same_batches.clear();
      libtorch::Engine<SharedImpl> engine(shared_model(mesh), config, world, options);
      engine.backward(engine.forward(input(world)));
      require(engine.step().committed, "a step was skipped");
    };
    if (compares) return refusal(ranks, ErrorCode::kMismatch, body);
    run_world(ranks, body);
    return std::string();
  };
  for (const int dp : {1, 2}) {
    EXPECT_THAT(refused(dp, [](const World& world) { return batch(world.rank(), 0); }),
                AllOf(HasSubstr("ranks that share a model were given different batches"),
                      HasSubstr("which: tensor 0 on rank 1 of"), HasSubstr("mesh.coordinate(\"dp\")")));
  }
  EXPECT_THAT(refused(1, [](const World& world) { return batch(0, 0).slice(0, world.rank()); }),
              AnyOf(HasSubstr("got: on this rank Double [3, 5]"), HasSubstr("got: on this rank Double [2, 5]")));
  (void)refused(1, [](const World& world) { return batch(world.rank(), 0); }, /*compares=*/false);
}

TEST(SharedModels, TheTimeoutsOfAMeshAreTheEngines) {
  const std::string text = refusal(2, ErrorCode::kConfig, [](const World& world) {
    const Mesh mesh = world.mesh({{{"dp", 2}}});
    Trainee trainee({}, config_of(0), world);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("which: zeroth.timeout_ms 300000 (60000 here)"), HasSubstr("world.mesh(config)")));
  run_world(2, [](const World& world) {
    const Mesh mesh = world.mesh(config_of(0));
    Trainee trainee({}, config_of(0), world);
    trainee.train(0);
  });
}

}  // namespace
}  // namespace zeroth::test
