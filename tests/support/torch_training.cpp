#include "support/torch_training.h"

#include "support/torch_ranks.h"

#include <zeroth/base/text.h>
#include <zeroth/libtorch/engine.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <sstream>

// Shape letters: B batch, T sequence, D width, N heads, H head width, F hidden width, V vocabulary, C
// channels, Y and X image.

namespace zeroth::test {
namespace {

using libtorch::Unit;
using torch::Tensor;

constexpr std::int64_t kVocab = 17;
constexpr std::int64_t kSequence = 5;
constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kChannels = 24;
constexpr std::int64_t kClasses = 7;

torch::Dtype torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return torch::kFloat64;
    case DType::kBFloat16:
      return torch::kBFloat16;
    default:
      return torch::kFloat32;
  }
}

/// Makes parameters from one seeded generator, in order.
struct Initial {
  torch::Dtype dtype;
  torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{17});

  [[nodiscard]] Tensor normal(std::vector<std::int64_t> shape, double deviation) {
    return (torch::randn(shape, generator, torch::kFloat64) * deviation).to(dtype);
  }
  /// Norms stay fp32 in a bf16 model: two dtypes in one unit.
  [[nodiscard]] torch::Dtype norm_dtype() const { return dtype == torch::kBFloat16 ? torch::kFloat32 : dtype; }
  [[nodiscard]] Tensor ones(std::int64_t width) const { return torch::ones({width}, norm_dtype()); }
};

Tensor rms_norm(const Tensor& x, const Tensor& weight) {
  return torch::rms_norm(x.to(weight.scalar_type()), weight.sizes(), weight, 1e-6).to(x.scalar_type());
}

/// Dropout with a generator of the rank's own: torch's default generator is shared by all threads.
Tensor drop(const Tensor& x, double probability, const torch::Generator& generator) {
  if (probability == 0) return x;
  const Tensor keep = torch::rand(x.sizes(), generator, torch::kFloat32).ge(probability).to(x.scalar_type());
  return x * keep / (1.0 - probability);
}

struct Step {
  Tensor input{};   ///< tokens [B, T] or images [B, 3, Y, X]
  Tensor target{};  ///< next tokens [B, T] or classes [B]
  torch::Generator generator{};
  bool skip_branch = false;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, double dropout, Initial& initial) : dropout_(dropout) {
    attention_norm = register_parameter("attention_norm", initial.ones(width));
    qkv = register_parameter("qkv", initial.normal({3 * width, width}, 0.2));
    out = register_parameter("out", initial.normal({width, width}, 0.2));
    mlp_norm = register_parameter("mlp_norm", initial.ones(width));
    up = register_parameter("up", initial.normal({2 * width, width}, 0.2));
    up_bias = register_parameter("up_bias", initial.normal({2 * width}, 0.02));
    down = register_parameter("down", initial.normal({width, width}, 0.2));
  }
  Tensor forward(const Tensor& x_BTD, torch::Generator generator) {
    const std::int64_t B = x_BTD.size(0), T = x_BTD.size(1), D = x_BTD.size(2);
    const auto heads = torch::linear(rms_norm(x_BTD, attention_norm), qkv).view({B, T, 3, 2, D / 2}).unbind(2);
    const Tensor y_BNTH = torch::scaled_dot_product_attention(heads[0].transpose(1, 2), heads[1].transpose(1, 2),
                                                              heads[2].transpose(1, 2), {}, 0.0,
                                                              /*is_causal=*/true);
    const Tensor h_BTD =
        x_BTD + drop(torch::linear(y_BNTH.transpose(1, 2).reshape({B, T, D}), out), dropout_, generator);
    const auto gate = torch::linear(rms_norm(h_BTD, mlp_norm), up, up_bias).chunk(2, -1);
    return h_BTD + drop(torch::linear(torch::silu(gate[0]) * gate[1], down), dropout_, generator);
  }
  double dropout_;
  Tensor attention_norm{}, qkv{}, out{}, mlp_norm{}, up{}, up_bias{}, down{};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const TorchTraining& training) {
    Initial initial{torch_dtype(training.dtype)};
    embedding_VD = register_parameter("embedding", initial.normal({kVocab, training.width}, 0.3));
    position_TD = register_parameter("position", initial.normal({kSequence, training.width}, 0.1));
    last_norm = register_parameter("last_norm", initial.ones(training.width));
    for (int layer = 0; layer < training.layers; ++layer) {
      blocks.push_back(register_module("block" + std::to_string(layer),
                                       Unit<Block>(Block(training.width, training.dropout, initial))));
    }
  }
  Tensor forward(const Step& step) {
    Tensor h_BTD = torch::embedding(embedding_VD, step.input) + position_TD;
    for (auto& block : blocks) h_BTD = block->forward(h_BTD, step.generator);
    const Tensor logits_BTV = torch::linear(rms_norm(h_BTD, last_norm), embedding_VD);
    const auto sums = logits_BTV.scalar_type() == torch::kBFloat16 ? torch::kFloat32 : logits_BTV.scalar_type();
    return torch::cross_entropy_loss(logits_BTV.to(sums).flatten(0, 1), step.target.flatten());
  }
  Tensor embedding_VD{}, position_TD{}, last_norm{};
  std::vector<Unit<Block>> blocks{};
};
TORCH_MODULE(Gpt);

/// relu(norm(conv(x + prompt * frozen))): the gradients of all its own parameters are there before its frozen
/// one has been used for the last time, and its second input is a leaf.
struct StemImpl : torch::nn::Module {
  explicit StemImpl(Initial& initial) {
    weight = register_parameter(
        "weight", initial.normal({kChannels, 3, 3, 3}, 0.3).contiguous(torch::MemoryFormat::ChannelsLast));
    frozen = register_parameter("frozen", initial.normal({6, 6}, 0.4), /*requires_grad=*/false);
    scale = register_parameter("scale", initial.ones(kChannels));
    shift = register_parameter("shift", torch::zeros({kChannels}, initial.norm_dtype()));
    mean = register_buffer("mean", torch::zeros({kChannels}, initial.norm_dtype()));
    variance = register_buffer("variance", torch::ones({kChannels}, initial.norm_dtype()));
  }
  Tensor forward(const Tensor& x, const Tensor& prompt) {
    const Tensor y = torch::conv2d(x + torch::matmul(prompt, frozen), weight, {}, 1, 1);
    return torch::relu(
               torch::batch_norm(y.to(scale.scalar_type()), scale, shift, mean, variance, true, 0.1, 1e-5, false))
        .to(x.scalar_type());
  }
  Tensor weight{}, frozen{}, scale{}, shift{}, mean{}, variance{};
};
TORCH_MODULE(Stem);

struct MixImpl : torch::nn::Module {
  explicit MixImpl(Initial& initial) {
    weight = register_parameter("weight", initial.normal({kChannels, kChannels, 3, 3}, 0.07));
    bias = register_parameter("bias", initial.normal({kChannels}, 0.02));
  }
  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& x) {
    const Tensor y = torch::tanh(torch::conv2d(x, weight, bias, 1, 1));
    return {x + y, {y.mean()}};
  }
  Tensor weight{}, bias{};
};
TORCH_MODULE(Mix);

struct DenseImpl : torch::nn::Module {
  DenseImpl(Initial& initial, Tensor shared) {
    weight = register_parameter("weight", shared.defined() ? shared : initial.normal({kChannels, kChannels}, 0.2));
    bias = register_parameter("bias", initial.normal({kChannels}, 0.02));
  }
  Tensor forward(const Tensor& x) { return torch::relu(torch::linear(x, weight, bias)) + 0.1 * x; }
  Tensor weight{}, bias{};
};
TORCH_MODULE(Dense);

struct ForeignImpl : torch::nn::Module {
  explicit ForeignImpl(const TorchTraining& training) {
    Initial initial{torch_dtype(training.dtype)};
    prompt = register_parameter("prompt", initial.normal({6, 6}, 0.1));
    rotation = register_parameter("rotation", initial.normal({kChannels, kChannels}, 0.2), /*requires_grad=*/false);
    head = register_parameter("head", initial.normal({kClasses, kChannels}, 0.2));
    stem = register_module("stem", Unit<Stem>(Stem(initial)));
    mix = register_module("mix", Unit<Mix>(Mix(initial)));
    encode = register_module("encode", Unit<Dense>(Dense(initial, Tensor())));
    branch = register_module("branch", Unit<Dense>(Dense(initial, Tensor())));
    decode = register_module("decode", Unit<Dense>(Dense(initial, encode->inner()->weight)));
  }
  Tensor forward(const Step& step) {
    Tensor h = stem->forward(step.input, prompt);
    Tensor penalty = torch::zeros({}, h.options());
    for (int use = 0; use < 2; ++use) {
      auto [mixed, means] = mix->forward(h);
      h = mixed;
      penalty = penalty + means[0] * means[0];
    }
    Tensor h_BC = encode->forward(h.mean({2, 3}));
    if (!step.skip_branch) h_BC = h_BC + branch->forward(h_BC);
    // The root's trainable head has its gradient before its frozen rotation has been used.
    const Tensor logits = torch::linear(torch::matmul(decode->forward(h_BC), rotation), head);
    const auto sums = logits.scalar_type() == torch::kBFloat16 ? torch::kFloat32 : logits.scalar_type();
    return torch::cross_entropy_loss(logits.to(sums), step.target) + 0.1 * penalty.to(sums);
  }
  Tensor prompt{}, rotation{}, head{};
  Unit<Stem> stem = nullptr;
  Unit<Mix> mix = nullptr;
  Unit<Dense> encode = nullptr, branch = nullptr, decode = nullptr;
};
TORCH_MODULE(Foreign);

/// Data, random numbers and path of one micro-step: a function of who and when.
Step make_step(const TorchTraining& training, int rank, int step, int micro) {
  const auto key = static_cast<std::uint64_t>((step * 64 + micro) * 16 + rank);
  Step result;
  result.generator = at::make_generator<at::CPUGeneratorImpl>(key);
  if (training.net == TorchNet::kGpt) {
    result.input = torch::randint(kVocab, {kBatch, kSequence}, result.generator, torch::kInt64);
    result.target = torch::randint(kVocab, {kBatch, kSequence}, result.generator, torch::kInt64);
  } else {
    result.input = torch::randn({kBatch, 3, 6, 6}, result.generator, torch::kFloat64).to(torch_dtype(training.dtype));
    result.target = torch::randint(kClasses, {kBatch}, result.generator, torch::kInt64);
    // One rank in turn skips; in each third step all of them do, so that the branch stays untouched.
    result.skip_branch = step % 3 == 2 || (rank + step + micro) % 3 == 0;
  }
  return result;
}

Config config_of(const TorchTraining& training) {
  Config config;
  config.gradient_accumulation_steps = training.micro_steps;
  config.gradient_clipping = training.clipping;
  if (training.sgd) {
    config.optimizer.type = "SGD";
    config.optimizer.momentum = 0.9;
  }
  config.optimizer.lr = training.lr;
  config.optimizer.weight_decay = 0.1;
  config.zero.stage = training.zero_stage;
  config.zero.reshard = training.reshard;
  config.zero.reduction_policy = training.policy;
  config.zero.ring_slots = training.ring_slots;
  config.runtime.threads = 1;
  config.runtime.execution = training.mode;
  config.runtime.chaos_seed = training.chaos_seed;
  config.runtime.timeout_ms = 60'000;
  return config;
}

/// "norm" and vectors without decay, as a trainer would.
libtorch::EngineOptions engine_options() {
  libtorch::EngineOptions options;
  options.log_level = LogLevel::kOff;
  options.groups = {
      {.match = [](const std::string&, const Tensor& parameter) { return parameter.dim() < 2; }, .weight_decay = 0.0}};
  return options;
}

std::map<std::string, TorchValue> values_of(Engine& engine) {
  std::map<std::string, TorchValue> values;
  const ModelLayout& layout = engine.layout();
  for (std::size_t index = 0; index < layout.flats.size(); ++index) {
    const FlatLayout& flat = layout.flats[index];
    std::vector<std::byte> whole(flat.bytes());
    engine.read_flat(static_cast<int>(index), whole.data());
    for (const Segment& segment : flat.segments) {
      const auto begin = whole.begin() + segment.offset * static_cast<std::int64_t>(size_of(flat.dtype));
      TorchValue& value = values[layout.params[static_cast<std::size_t>(segment.param)].name];
      value.dtype = flat.dtype;
      value.bytes.assign(begin, begin + segment.numel * static_cast<std::int64_t>(size_of(flat.dtype)));
    }
  }
  return values;
}

template <class Net>
std::string buffers_of(Net& model) {
  std::string text;
  for (const auto& item : model->named_buffers()) {
    const Tensor dense = item.value().contiguous();
    text += item.key() + " " +
            std::to_string(digest64({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()})) + "\n";
  }
  return text;
}

template <class Net>
TorchOutcome run_rank(const TorchTraining& training, const World& world) {
  at::set_num_threads(1);
  Net model(training);
  auto engine = libtorch::Engine(model, config_of(training), world, engine_options());
  TorchOutcome own;
  for (int step = 0; step < training.steps; ++step) {
    if (step + 1 == training.steps) {
      own.memory = {training.reports_memory ? engine.memory_report() : MemoryReport{}};
      engine.reset_counters();
    }
    double loss_sum = 0;
    StepResult result;
    for (int micro = 0; micro < training.micro_steps; ++micro) {
      const Tensor loss = engine.forward(make_step(training, world.rank(), step, micro));
      loss_sum += loss.detach().to(torch::kFloat64).template item<double>();
      engine.backward(loss);
      result = engine.step();
    }
    if (training.after_step) training.after_step(engine.core(), step);
    const libtorch::WireReport wire = engine.wire_report();
    own.wire = {{wire.planned_per_step, wire.all_gather, wire.reduce_scatter}};
    own.losses.push_back(engine.average(loss_sum / training.micro_steps));
    own.norms.push_back(result.grad_norm);
  }
  own.values = values_of(engine.core());
  engine.core().barrier();
  own.buffers = {buffers_of(model)};
  return own;
}

/// Element of a parameter, as a number that shows every bit.
std::string element_text(const TorchValue& value, std::size_t index) {
  const std::byte* bytes = value.bytes.data() + index * size_of(value.dtype);
  if (value.dtype == DType::kFloat64) {
    double element = 0;
    std::memcpy(&element, bytes, sizeof element);
    return hex_float(element);
  }
  std::uint32_t bits = 0;
  if (value.dtype == DType::kBFloat16) {
    std::uint16_t high = 0;
    std::memcpy(&high, bytes, sizeof high);
    bits = std::uint32_t{high} << 16U;
  } else {
    std::memcpy(&bits, bytes, sizeof bits);
  }
  return hex_float(std::bit_cast<float>(bits));
}

/// Of two parameters that are not equal.
std::string element_difference(const TorchValue& expected, const TorchValue& got) {
  if (expected.dtype != got.dtype || expected.bytes.size() != got.bytes.size()) return ": dtype or size";
  const auto first = std::ranges::mismatch(expected.bytes, got.bytes).in1 - expected.bytes.begin();
  const std::size_t index = static_cast<std::size_t>(first) / size_of(expected.dtype);
  return " element " + std::to_string(index) + ": " + element_text(expected, index) + " against " +
         element_text(got, index);
}

/// Puts what one of the ranks has seen to what the others have; what they share must be equal.
void add_rank(TorchOutcome& all, TorchOutcome own, std::size_t rank) {
  all.memory[rank] = own.memory[0];
  all.wire[rank] = own.wire[0];
  all.buffers[rank] = std::move(own.buffers[0]);
  if (all.losses.empty()) {
    all.losses = own.losses;
    all.norms = own.norms;
    all.values = own.values;
  }
  own.buffers = all.buffers;
  const std::string different = difference(all, own);
  ZR_CHECK(different.empty(), ErrorCode::kInternal, "ranks of one training differ: " + different);
}

/// Weight decay for matrices only, as engine_options() has it.
std::unique_ptr<torch::optim::Optimizer> plain_optimizer(const TorchTraining& training,
                                                         const std::vector<Tensor>& decayed,
                                                         const std::vector<Tensor>& plain) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (training.sgd) {
    const auto options = torch::optim::SGDOptions(training.lr).momentum(0.9);
    groups.emplace_back(
        decayed, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(options).weight_decay(0.1)));
    groups.emplace_back(plain, std::make_unique<torch::optim::SGDOptions>(options));
    return std::make_unique<torch::optim::SGD>(groups, options);
  }
  const auto options = torch::optim::AdamWOptions(training.lr).weight_decay(0.0);
  groups.emplace_back(
      decayed, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(options).weight_decay(0.1)));
  groups.emplace_back(plain, std::make_unique<torch::optim::AdamWOptions>(options));
  return std::make_unique<torch::optim::AdamW>(groups, options);
}

template <class Net>
std::vector<double> run_plain(const TorchTraining& training) {
  at::set_num_threads(1);
  Net model(training);
  std::vector<Tensor> decayed, plain, trainable;
  for (const Tensor& parameter : model->parameters()) {
    const auto same = [&](const Tensor& other) { return other.is_same(parameter); };
    if (!parameter.requires_grad() || std::ranges::any_of(trainable, same)) continue;  // tied weights come twice
    trainable.push_back(parameter);
    (parameter.dim() < 2 ? plain : decayed).push_back(parameter);
  }
  const std::unique_ptr<torch::optim::Optimizer> optimizer = plain_optimizer(training, decayed, plain);
  std::vector<double> losses;
  for (int step = 0; step < training.steps; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int micro = 0; micro < training.micro_steps; ++micro) {
      for (int rank = 0; rank < training.world; ++rank) {
        const Tensor loss = model->forward(make_step(training, rank, step, micro));
        sum += loss.detach().to(torch::kFloat64).template item<double>();
        (loss / static_cast<double>(training.world * training.micro_steps)).backward();
      }
    }
    if (training.clipping > 0) torch::nn::utils::clip_grad_norm_(trainable, training.clipping);
    optimizer->step();
    losses.push_back(sum / (training.world * training.micro_steps));
  }
  return losses;
}

}  // namespace

std::string TorchTraining::text() const {
  return std::string(net == TorchNet::kGpt ? "gpt " : "foreign ") + std::string(name_of(dtype)) + " world " +
         std::to_string(world) + " stage " + std::to_string(zero_stage) + " reshard " + std::string(name_of(reshard)) +
         " " + std::string(name_of(policy)) + " accumulate " + std::to_string(micro_steps) +
         (mode == ExecutionMode::kChaos ? " chaos seed " + std::to_string(chaos_seed) : " inline");
}

TorchOutcome train_torch(const TorchTraining& training) {
  TorchOutcome all;
  std::mutex mutex;
  const auto world_size = static_cast<std::size_t>(training.world);
  all.memory.resize(world_size);
  all.wire.resize(world_size);
  all.buffers.resize(world_size);
  run_world(training.world, [&](const World& world) {
    TorchOutcome own = train_torch_as_rank(training, world);
    const std::lock_guard lock(mutex);
    add_rank(all, std::move(own), static_cast<std::size_t>(world.rank()));
  });
  return all;
}

TorchOutcome train_torch_as_rank(const TorchTraining& training, const World& world) {
  ZR_CHECK(training.world == world.size(), ErrorCode::kUsage, "the training is for another number of ranks");
  return training.net == TorchNet::kGpt ? run_rank<Gpt>(training, world) : run_rank<Foreign>(training, world);
}

std::string difference(const TorchOutcome& expected, const TorchOutcome& got) {
  const auto compare = [](const std::vector<double>& a, const std::vector<double>& b,
                          const std::string& what) -> std::string {
    if (a.size() != b.size()) return "number of steps";
    for (std::size_t step = 0; step < a.size(); ++step) {
      // Bits, so that two NaNs are equal and the zeros are not.
      if (std::memcmp(&a[step], &b[step], sizeof(double)) == 0) continue;
      return what + " of step " + std::to_string(step) + ": " + hex_float(a[step]) + " against " + hex_float(b[step]);
    }
    return "";
  };
  if (const std::string text = compare(expected.losses, got.losses, "loss"); !text.empty()) return text;
  if (const std::string text = compare(expected.norms, got.norms, "norm"); !text.empty()) return text;
  if (expected.values.size() != got.values.size()) return "number of parameters";
  for (const auto& [name, value] : expected.values) {
    const auto found = got.values.find(name);
    if (found == got.values.end()) return "no parameter " + name;
    if (found->second != value) return "parameter " + name + element_difference(value, found->second);
  }
  if (expected.buffers.size() != got.buffers.size()) return "number of ranks with buffers";
  for (std::size_t rank = 0; rank < expected.buffers.size(); ++rank) {
    if (expected.buffers[rank] == got.buffers[rank]) continue;
    std::istringstream one(expected.buffers[rank]), other(got.buffers[rank]);
    std::string a, b;
    while (std::getline(one, a) && std::getline(other, b) && a == b) continue;
    return "digest of buffer " + a + " against " + b;
  }
  return "";
}

std::vector<double> train_plain_torch(const TorchTraining& training) {
  return training.net == TorchNet::kGpt ? run_plain<Gpt>(training) : run_plain<Foreign>(training);
}

}  // namespace zeroth::test
