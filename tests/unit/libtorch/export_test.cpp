// export_safetensors: what plain PyTorch reads back, and what is left after a failure.
#include "test_nets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;

/// Every dtype, a transposed and a channels_last parameter, tied and frozen weights, buffers of odd sizes.
struct MixedImpl : torch::nn::Module {
  explicit MixedImpl(bool with_complex = false) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{4});
    const auto values = [&](std::vector<std::int64_t> shape, torch::Dtype dtype) {
      return torch::randn(shape, generator, torch::kFloat64).to(dtype);
    };
    narrow = register_parameter("narrow", values({1031}, torch::kBFloat16));  // odd: what follows is not aligned
    wide = register_parameter("wide", values({37, 41}, torch::kFloat32).t());
    image = register_parameter("image",
                               values({5, 3, 2, 2}, torch::kFloat32).contiguous(torch::MemoryFormat::ChannelsLast));
    exact = register_parameter("exact", values({33}, torch::kFloat64));
    scalar = register_parameter("scalar", values({}, torch::kFloat32));
    frozen = register_parameter("frozen", values({7}, torch::kFloat32), false);
    empty = register_parameter("empty", torch::ones({0, 3}));
    tied = register_parameter("tied", wide);
    register_buffer("flags", torch::tensor({true, false, true}));
    register_buffer("count", torch::tensor(5, torch::kInt64));
    register_buffer("table", values({3, 4}, torch::kFloat32).t());
    if (with_complex) register_buffer("phase", torch::ones({2}, torch::kComplexDouble));
  }
  Tensor forward(const Tensor& x) {
    return (narrow.to(torch::kFloat32).square().sum() + (wide * tied).sum() + image.square().sum() +
            exact.square().sum().to(torch::kFloat32) + scalar + frozen.sum() + empty.sum()) *
           x;
  }
  Tensor narrow{}, wide{}, image{}, exact{}, scalar{}, frozen{}, empty{}, tied{};
};
TORCH_MODULE(Mixed);

constexpr const char* kReader = R"py(
import json, pathlib, sys
import torch, safetensors, safetensors.torch

def check(folder):
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    names = json.loads((folder / "names.json").read_text())
    assert sorted(state) == sorted(names), (sorted(state), sorted(names))
    for name, (dtype, shape) in names.items():
        value = state[name]
        assert str(value.dtype) == dtype and list(value.shape) == shape, (name, value.dtype, value.shape)
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        assert raw == (folder / (name + ".bin")).read_bytes(), name
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "wide"}, file.metadata()

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, (dtype, shape) in names.items():
                value = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                if name in ("flags", "count", "table"):
                    self.register_buffer(name, value)
                else:
                    self.register_parameter(name, torch.nn.Parameter(value, requires_grad=name != "frozen"))
            self.tied = self.wide

    model = Mixed()
    missing, unexpected = safetensors.torch.load_model(model, path, strict=True)
    assert not missing and not unexpected, (missing, unexpected)
    for name in names:
        assert torch.equal(getattr(model, name), state[name]), name
    assert model.tied is model.wide

for folder in sys.argv[1:]:
    check(pathlib.Path(folder))
)py";

class Export : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "zeroth-export-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    folder_ = root_;
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
  }
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  [[nodiscard]] std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  /// Row-major bytes of a tensor beside the export, and its entry in names.json.
  std::string dump(const std::string& name, const Tensor& value) const {
    const Tensor dense = value.detach().contiguous();
    std::ofstream(folder_ / (name + ".bin"), std::ios::binary)
        .write(static_cast<const char*>(dense.const_data_ptr()), static_cast<std::streamsize>(dense.nbytes()));
    std::string shape;
    for (const std::int64_t extent : value.sizes()) shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
    static const std::map<torch::Dtype, std::string> kNames{{torch::kFloat32, "torch.float32"},
                                                            {torch::kFloat64, "torch.float64"},
                                                            {torch::kBFloat16, "torch.bfloat16"},
                                                            {torch::kBool, "torch.bool"},
                                                            {torch::kInt64, "torch.int64"}};
    return "\"" + name + "\": [\"" + kNames.at(value.scalar_type()) + "\", [" + shape + "]]";
  }

  fs::path root_;
  fs::path folder_;  ///< of the export at hand
};

TEST_F(Export, LoadsInPlainPyTorchBitForBit) {
  write("read.py", kReader);
  std::string command = std::string(ZEROTH_TEST_PYTHON) + " " + (root_ / "read.py").string();
  for (const int stage : {0, 1, 2, 3}) {
    folder_ = root_ / std::to_string(stage);
    fs::create_directory(folder_);
    command += " " + folder_.string();
    run_world(3, [&](const World& world) {
      Mixed model;
      libtorch::Engine<MixedImpl> engine(model, config_of(stage), world, quiet());
      for (int step = 0; step < 2; ++step) {
        engine.backward(engine.forward(torch::tensor(1.0F + static_cast<float>(world.rank()))));
        require(engine.step().committed, "not committed");
      }
      engine.export_safetensors((folder_ / "model.safetensors").string());
      // The values as the model itself sees them, inside its forward.
      engine.core().pre_forward({.unit = 0});
      if (world.rank() == 0) {
        std::string names;
        for (const auto& item : model->named_parameters()) {
          if (item.key() != "tied") names += (names.empty() ? "" : ", ") + dump(item.key(), item.value());
        }
        for (const auto& item : model->named_buffers()) names += ", " + dump(item.key(), item.value());
        write("names.json", "{" + names + "}");
      }
      engine.core().post_forward({.unit = 0}, false);
      engine.core().barrier();
    });
  }
  EXPECT_EQ(std::system(command.c_str()), 0);
}

TEST_F(Export, AFailureOnRankZeroIsAnErrorOnAllRanks) {
  const std::string path = (folder_ / "missing" / "model.safetensors").string();
  const RankReport report = try_world(3,
                                      [&](const World& world) {
                                        Trainee trainee({}, config_of(3), world);
                                        trainee.train(0);
                                        trainee.engine.export_safetensors(path);
                                      },
                                      {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), 3U) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kIo);
    EXPECT_THAT(failure.text, ::testing::HasSubstr(path));
  }
  EXPECT_TRUE(files().empty());
}

TEST_F(Export, AFailureLeavesTheOldFileAndTrainingGoesOn) {
  write("model.safetensors", "the old file");
  run_world(2, [&](const World& world) {
    Mixed model(/*with_complex=*/true);
    libtorch::Engine<MixedImpl> engine(model, config_of(3), world, quiet());
    std::string text;
    try {
      engine.export_safetensors((folder_ / "model.safetensors").string());
    } catch (const Error& error) {
      text = error.what();
    }
    require(text.find("phase") != std::string::npos, "got: " + text);
    engine.backward(engine.forward(torch::tensor(1.0F)));
    require(engine.step().committed, "not committed");
  });
  EXPECT_EQ(read("model.safetensors"), "the old file");
  EXPECT_THAT(files(), ::testing::ElementsAre("model.safetensors"));
}

TEST_F(Export, ReplacesTheOldFile) {
  write("model.safetensors", std::string(100'000, 'x'));
  run_world(2, [&](const World& world) {
    Trainee trainee({}, config_of(2), world);
    trainee.train(0);
    trainee.engine.export_safetensors((folder_ / "model.safetensors").string());
  });
  EXPECT_LT(fs::file_size(folder_ / "model.safetensors"), 100'000U);
  EXPECT_THAT(files(), ::testing::ElementsAre("model.safetensors"));
}

}  // namespace
}  // namespace zeroth::test
