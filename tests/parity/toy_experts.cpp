#include "toy_experts.h"

#include <zeroth/base/text.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <utility>

namespace zeroth::test {
namespace {

constexpr int kExperts = 2;
constexpr int kInputs = 5;
constexpr int kTokens = 4;  // of a rank, two for each expert

using Token = std::vector<float>;
using Tokens = std::vector<Token>;

float act(float z) {
  return z / (1.0F + std::abs(z));
}
float act_slope(float z) {
  const float d = 1.0F + std::abs(z);
  return 1.0F / (d * d);
}

Token times(const std::vector<float>& w, const Token& x, const Token& b, std::size_t rows) {
  Token y(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    float sum = b.empty() ? 0.0F : b[row];
    for (std::size_t col = 0; col < x.size(); ++col) sum += w[row * x.size() + col] * x[col];
    y[row] = sum;
  }
  return y;
}

/// Adds dz x^T to dw; returns W^T dz.
Token times_backward(const std::vector<float>& w, const Token& x, const Token& dz, std::vector<float>& dw) {
  dw.resize(dz.size() * x.size(), 0.0F);
  Token dx(x.size(), 0.0F);
  for (std::size_t row = 0; row < dz.size(); ++row) {
    for (std::size_t col = 0; col < x.size(); ++col) {
      dw[row * x.size() + col] += dz[row] * x[col];
      dx[col] += w[row * x.size() + col] * dz[row];
    }
  }
  return dx;
}

/// y += act(W y + b) for some tokens, one after the other, and the way back.
struct Layer {
  Tokens inputs{};
  Tokens z{};

  Tokens forward(const std::vector<float>& w, const std::vector<float>& b, Tokens tokens) {
    inputs = std::move(tokens);
    z.clear();
    Tokens outputs = inputs;
    for (std::size_t t = 0; t < inputs.size(); ++t) {
      z.push_back(times(w, inputs[t], b, inputs[t].size()));
      for (std::size_t i = 0; i < z[t].size(); ++i) outputs[t][i] += act(z[t][i]);
    }
    return outputs;
  }
  /// `grads`: of w, and of b if there is one.
  Tokens backward(const std::vector<float>& w, Tokens dh, std::vector<float>& dw, std::vector<float>* db) const {
    for (std::size_t t = 0; t < dh.size(); ++t) {
      Token dz(dh[t].size());
      for (std::size_t i = 0; i < dz.size(); ++i) dz[i] = dh[t][i] * act_slope(z[t][i]);
      if (db != nullptr) {
        db->resize(dz.size(), 0.0F);
        for (std::size_t i = 0; i < dz.size(); ++i) (*db)[i] += dz[i];
      }
      const Token dx = times_backward(w, inputs[t], dz, dw);
      for (std::size_t i = 0; i < dx.size(); ++i) dh[t][i] += dx[i];
    }
    return dh;
  }
};

/// Parameters and units of a rank with some of the experts.
struct Structure {
  std::vector<ParamSpec> params{};
  std::vector<UnitSpec> units{};  ///< 0: root; then of each layer its dense block and its experts
  std::vector<std::vector<float>> values{};
  std::vector<std::string> names{};
};

Structure make_structure(const ExpertsTraining& training, const std::vector<int>& experts, int expert_group) {
  const std::int64_t width = training.width;
  Structure made;
  std::mt19937_64 random(11);
  const auto draw = [&random](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = (static_cast<float>(random() >> 44U) / static_cast<float>(1U << 20U)) - 0.5F;
    return values;
  };
  const auto add = [&](UnitSpec& unit, ParamSpec param, std::vector<float> values, const std::string& name) {
    unit.params.push_back(static_cast<int>(made.params.size()));
    made.params.push_back(std::move(param));
    made.values.push_back(std::move(values));
    made.names.push_back(name);
  };
  UnitSpec root{.name = "root"};
  add(root, {.name = "in.weight", .shape = {width, kInputs}}, draw(width * kInputs), "in.weight");
  add(root, {.name = "out.weight", .shape = {1, width}}, draw(width), "out.weight");
  made.units.push_back(std::move(root));
  for (int layer = 0; layer < training.layers; ++layer) {
    const std::string number = std::to_string(layer);
    UnitSpec block{.name = "blocks." + number, .repeated = true};
    add(block, {.name = "blocks." + number + ".weight", .shape = {width, width}}, draw(width * width),
        "blocks." + number + ".weight");
    made.units.push_back(std::move(block));
    UnitSpec unit{.name = "experts." + number, .repeated = true};
    for (int expert = 0; expert < kExperts; ++expert) {
      std::vector<float> weight = draw(width * width);
      std::vector<float> bias = draw(width);
      if (std::ranges::find(experts, expert) == experts.end()) continue;
      const std::string mine = "experts." + number + "." + std::to_string(expert);
      // One process has the experts as parameters of their own, a rank as a box of the tensor of both.
      const std::string name = expert_group == 0 ? mine : "experts." + number;
      ParamSpec weights{.name = name + ".weight", .shape = {1, width, width}};
      ParamSpec biases{.name = name + ".bias", .shape = {1, width}};
      if (expert_group != 0) {
        weights.logical_shape = {kExperts, width, width};
        weights.box_offset = {expert, 0, 0};
        biases.logical_shape = {kExperts, width};
        biases.box_offset = {expert, 0};
      }
      weights.shard_group = expert_group;
      biases.shard_group = expert_group;
      add(unit, std::move(weights), std::move(weight), mine + ".weight");
      add(unit, std::move(biases), std::move(bias), mine + ".bias");
    }
    made.units.push_back(std::move(unit));
  }
  return made;
}

/// An engine and its parameters' addresses.
class Bound final : public ParameterBinder {
 public:
  Bound(const Structure& structure, const EngineSettings& settings, Device& device,
        std::shared_ptr<CommBackend> backend)
      : structure_(structure),
        engine_(structure.params, structure.units, settings, device, std::move(backend), *this, Logger()) {
    flats_.resize(engine_.layout().flats.size(), nullptr);
    engine_.initialize(
        [this](int param) {
          const auto index = static_cast<std::size_t>(param);
          return ConstTensorView{reinterpret_cast<const std::byte*>(structure_.values[index].data()),
                                 structure_.params[index].shape, DType::kFloat32};
        },
        [](std::span<const int>) {});
  }
  void bind(int flat, std::byte* data) override {
    if (flats_.size() <= static_cast<std::size_t>(flat)) flats_.resize(static_cast<std::size_t>(flat) + 1, nullptr);
    flats_[static_cast<std::size_t>(flat)] = data;
  }
  [[nodiscard]] Engine& engine() { return engine_; }
  [[nodiscard]] std::vector<float> load(int param) const {
    const Segment& segment = engine_.layout().segment(param);
    const std::byte* flat =
        flats_[static_cast<std::size_t>(engine_.layout().places[static_cast<std::size_t>(param)].flat)];
    ZR_ASSERT(flat != nullptr, "a toy parameter is read while it is not gathered");
    std::vector<float> values(static_cast<std::size_t>(segment.numel));
    std::memcpy(values.data(), flat + static_cast<std::size_t>(segment.offset) * sizeof(float),
                values.size() * sizeof(float));
    return values;
  }
  void give(int param, const std::vector<float>& grad) {
    engine_.grad_ready(param, {reinterpret_cast<const std::byte*>(grad.data()),
                               structure_.params[static_cast<std::size_t>(param)].shape, DType::kFloat32});
  }
  [[nodiscard]] std::vector<double> value(int param) {
    const ParamPlace& place = engine_.layout().places[static_cast<std::size_t>(param)];
    std::vector<float> flat(static_cast<std::size_t>(engine_.layout().flat(place.flat).length));
    engine_.read_flat(place.flat, reinterpret_cast<std::byte*>(flat.data()));
    const Segment& segment = engine_.layout().segment(param);
    return {flat.begin() + segment.offset, flat.begin() + segment.offset + segment.numel};
  }

 private:
  const Structure& structure_;
  std::vector<std::byte*> flats_;
  Engine engine_;
};

EngineSettings settings_of(const ExpertsTraining& training) {
  EngineSettings settings;
  settings.plan = training.dense;
  settings.micro_steps = training.micro_steps;
  settings.gradient_clipping = training.clipping;
  settings.groups = {GroupHyper{.lr = 0.02, .weight_decay = 0.1}};
  return settings;
}

int weight_of_block(int layer, int experts) {
  return 2 + layer * (1 + 2 * experts);
}
int weight_of_expert(int layer, int experts, int expert) {
  return weight_of_block(layer, experts) + 1 + 2 * expert;
}
int unit_of_block(int layer) {
  return 1 + 2 * layer;
}
int unit_of_experts(int layer) {
  return 2 + 2 * layer;
}

/// One rank's tokens on their way through the model, but for the experts.
class TokenStream {
 public:
  TokenStream(const ExpertsTraining& training, int rank, std::int64_t step)
      : layers_(static_cast<std::size_t>(training.layers)),
        batch_(toy_batch({.inputs = kInputs, .batch = kTokens}, rank, step, 0)),
        width_(static_cast<std::size_t>(training.width)) {}

  void embed(const std::vector<float>& w_in) {
    for (std::size_t t = 0; t < kTokens; ++t) {
      x_.emplace_back();
      for (std::size_t i = 0; i < kInputs; ++i) x_.back().push_back(static_cast<float>(batch_.x[t * kInputs + i]));
      tokens.push_back(times(w_in, x_.back(), {}, width_));
    }
  }
  void block(int layer, const std::vector<float>& w) {
    tokens = layers_[static_cast<std::size_t>(layer)].forward(w, {}, std::move(tokens));
  }
  /// Tokens become their gradients; returns that of w_out.
  std::vector<float> head(const std::vector<float>& w_out) {
    std::vector<float> dw;
    for (std::size_t t = 0; t < kTokens; ++t) {
      const float error = times(w_out, tokens[t], {}, 1)[0] - static_cast<float>(batch_.target[t]);
      tokens[t] = times_backward(w_out, tokens[t], {error / static_cast<float>(kTokens)}, dw);
    }
    return dw;
  }
  std::vector<float> block_backward(int layer, const std::vector<float>& w) {
    std::vector<float> dw;
    tokens = layers_[static_cast<std::size_t>(layer)].backward(w, std::move(tokens), dw, nullptr);
    return dw;
  }
  std::vector<float> embed_backward(const std::vector<float>& w_in) {
    std::vector<float> dw;
    for (std::size_t t = 0; t < kTokens; ++t) (void)times_backward(w_in, x_[t], tokens[t], dw);
    return dw;
  }
  /// Of those for one expert, in order.
  [[nodiscard]] Tokens for_expert(int expert) const {
    Tokens chosen;
    for (std::size_t t = static_cast<std::size_t>(expert); t < kTokens; t += kExperts) chosen.push_back(tokens[t]);
    return chosen;
  }
  void from_expert(int expert, const Tokens& given) {
    for (std::size_t i = 0; i < given.size(); ++i) tokens[i * kExperts + static_cast<std::size_t>(expert)] = given[i];
  }

  Tokens tokens{};

 private:
  std::vector<Layer> layers_;
  ToyBatch batch_;
  std::size_t width_;
  Tokens x_;
};

/// Tokens to and from the ranks with the other experts: those of rank 0 first.
class Exchange {
 public:
  Exchange(const Communicator& communicator, int width)
      : communicator_(communicator), width_(static_cast<std::size_t>(width)) {}
  [[nodiscard]] Tokens operator()(const std::vector<Tokens>& to) const {
    std::vector<float> out;
    for (const Tokens& tokens : to) {
      for (const Token& token : tokens) out.insert(out.end(), token.begin(), token.end());
    }
    std::vector<float> in(out.size());
    communicator_.all_to_all(std::span<const float>(out), std::span(in));
    Tokens got;
    for (std::size_t at = 0; at < in.size(); at += width_)
      got.emplace_back(in.begin() + static_cast<std::ptrdiff_t>(at),
                       in.begin() + static_cast<std::ptrdiff_t>(at + width_));
    return got;
  }

 private:
  const Communicator& communicator_;
  std::size_t width_;
};

/// Sends the tokens to their experts, does `work` there, and brings them back.
void through_experts(TokenStream& stream, const Exchange& exchange, const std::function<Tokens(Tokens)>& work) {
  const auto halves = [](const Tokens& all) {
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / kExperts);
    return std::vector<Tokens>{{all.begin(), middle}, {middle, all.end()}};
  };
  const Tokens mine = exchange({stream.for_expert(0), stream.for_expert(1)});
  const std::vector<Tokens> back = halves(exchange(halves(work(mine))));
  for (int expert = 0; expert < kExperts; ++expert) stream.from_expert(expert, back[static_cast<std::size_t>(expert)]);
}

void finish(Bound& bound, const Structure& structure, ExpertsOutcome& outcome) {
  for (std::size_t param = 0; param < structure.params.size(); ++param) {
    outcome.names.push_back(structure.names[param]);
    outcome.values.push_back(bound.value(static_cast<int>(param)));
  }
  outcome.memory = bound.engine().memory_report();
  outcome.transfers = bound.engine().transfer_report();
  outcome.planned_wire = bound.engine().planned_wire();
}

void take_result(ExpertsOutcome& outcome, const StepResult& result) {
  outcome.results.push_back(result);
  outcome.norms.push_back(hex_float(result.grad_norm));
}

}  // namespace

ExpertsOutcome train_experts_rank(const ExpertsTraining& training, std::unique_ptr<CommBackend> base) {
  const int rank = base->rank();
  const auto table = std::make_shared<TrafficTable>();
  const auto backend = std::make_shared<CountingBackend>(std::move(base), table);
  const MeshSpec spec{{{"edp", 2}, {"ep", 2}}};
  const Mesh mesh(backend, spec);
  const Communicator ep = mesh.axis("ep");
  const int expert = mesh.coordinate("ep");

  Structure structure = make_structure(training, {expert}, /*expert_group=*/1);
  EngineSettings settings = settings_of(training);
  settings.mesh = spec;
  settings.shard_groups = {{.name = "dense", .plan = training.dense},
                           {.name = "experts", .plan = training.experts, .distinct_axes = {"ep"}}};
  if (training.tamper) training.tamper(rank, structure.params, settings);
  const auto device = make_cpu_device(training.mode, training.chaos_seed * 131 + static_cast<std::uint64_t>(rank));
  Bound bound(structure, settings, *device, backend);
  Engine& engine = bound.engine();
  const Exchange exchange(ep, training.width);
  ExpertsOutcome outcome;

  const auto give = [&](std::int64_t step, int param, std::vector<float> grad) {
    if (training.poison && training.poison(rank, step, param)) grad.back() = std::numeric_limits<float>::quiet_NaN();
    bound.give(param, grad);
  };
  for (std::int64_t step = 0; step < training.steps; ++step) {
    table->reset();
    StepResult result;
    for (int micro = 0; micro < training.micro_steps; ++micro) {
      TokenStream stream(training, rank + kExpertRanks * micro, step);
      std::vector<Layer> experts(static_cast<std::size_t>(training.layers));
      const Invocation root = engine.begin_forward(0);
      engine.pre_forward(root);
      stream.embed(bound.load(0));
      for (int layer = 0; layer < training.layers; ++layer) {
        const Invocation block = engine.begin_forward(unit_of_block(layer));
        engine.pre_forward(block);
        stream.block(layer, bound.load(weight_of_block(layer, 1)));
        engine.post_forward(block, true);
        through_experts(stream, exchange, [&](Tokens tokens) {
          const Invocation use = engine.begin_forward(unit_of_experts(layer));
          engine.pre_forward(use);
          const int weight = weight_of_expert(layer, 1, 0);
          tokens = experts[static_cast<std::size_t>(layer)].forward(bound.load(weight), bound.load(weight + 1),
                                                                    std::move(tokens));
          engine.post_forward(use, true);
          return tokens;
        });
      }
      engine.post_forward(root, true);
      engine.pre_backward(0);
      give(step, 1, stream.head(bound.load(1)));
      for (int layer = training.layers; layer-- > 0;) {
        through_experts(stream, exchange, [&](Tokens dh) {
          engine.pre_backward(unit_of_experts(layer));
          const int weight = weight_of_expert(layer, 1, 0);
          std::vector<float> dw;
          std::vector<float> db;
          dh = experts[static_cast<std::size_t>(layer)].backward(bound.load(weight), std::move(dh), dw, &db);
          give(step, weight, dw);
          give(step, weight + 1, db);
          engine.post_backward(unit_of_experts(layer));
          return dh;
        });
        engine.pre_backward(unit_of_block(layer));
        give(step, weight_of_block(layer, 1), stream.block_backward(layer, bound.load(weight_of_block(layer, 1))));
        engine.post_backward(unit_of_block(layer));
      }
      give(step, 0, stream.embed_backward(bound.load(0)));
      engine.post_backward(0);
      engine.end_backward();
      if (training.before_step) training.before_step(engine, step);
      result = engine.step();
    }
    take_result(outcome, result);
    const auto bytes_of = [&](CollectiveKind kind) {
      const TrafficRow row = table->row(kind);
      return row.bytes + row.one_sided_bytes;
    };
    outcome.gather_bytes = bytes_of(CollectiveKind::kAllGather);
    outcome.reduce_bytes = bytes_of(CollectiveKind::kReduceScatter);
  }
  finish(bound, structure, outcome);
  engine.barrier();
  return outcome;
}

ExpertsOutcome train_experts_in_one_process(const ExpertsTraining& training) {
  const Structure structure = make_structure(training, {0, 1}, /*expert_group=*/0);
  EngineSettings settings = settings_of(training);
  settings.plan = zero_plan(0, {"dp"});
  settings.micro_steps = kExpertRanks;
  const auto device = make_cpu_device(ExecutionMode::kInline, 0);
  Bound bound(structure, settings, *device, make_backend("self", {.rank = 0, .size = 1}));
  Engine& engine = bound.engine();
  ExpertsOutcome outcome;
  struct Gradient {
    int param;
    std::vector<float> values;
  };
  for (std::int64_t step = 0; step < training.steps; ++step) {
    std::vector<TokenStream> streams;
    for (int rank = 0; rank < kExpertRanks; ++rank) streams.emplace_back(training, rank, step);
    std::vector<std::vector<Gradient>> grads(kExpertRanks);
    // Of rank (edp, ep), which has expert ep: those of both ranks of edp go through it, one after the other.
    const auto through = [&](int rank, const std::function<Tokens(Tokens)>& work) {
      const int first = rank / kExperts * kExperts;
      const int expert = rank % kExperts;
      Tokens tokens = streams[static_cast<std::size_t>(first)].for_expert(expert);
      const Tokens others = streams[static_cast<std::size_t>(first) + 1].for_expert(expert);
      tokens.insert(tokens.end(), others.begin(), others.end());
      tokens = work(std::move(tokens));
      const auto middle = tokens.begin() + static_cast<std::ptrdiff_t>(tokens.size() / 2);
      streams[static_cast<std::size_t>(first)].from_expert(expert, {tokens.begin(), middle});
      streams[static_cast<std::size_t>(first) + 1].from_expert(expert, {middle, tokens.end()});
    };
    std::vector<std::vector<Layer>> experts(static_cast<std::size_t>(training.layers),
                                            std::vector<Layer>(kExpertRanks));
    for (TokenStream& stream : streams) stream.embed(bound.load(0));
    for (int layer = 0; layer < training.layers; ++layer) {
      for (TokenStream& stream : streams) stream.block(layer, bound.load(weight_of_block(layer, kExperts)));
      for (int rank = 0; rank < kExpertRanks; ++rank) {
        const int weight = weight_of_expert(layer, kExperts, rank % kExperts);
        through(rank, [&](Tokens tokens) {
          return experts[static_cast<std::size_t>(layer)][static_cast<std::size_t>(rank)].forward(
              bound.load(weight), bound.load(weight + 1), std::move(tokens));
        });
      }
    }
    for (std::size_t rank = 0; rank < kExpertRanks; ++rank)
      grads[rank].push_back({1, streams[rank].head(bound.load(1))});
    for (int layer = training.layers; layer-- > 0;) {
      for (int rank = 0; rank < kExpertRanks; ++rank) {
        const int weight = weight_of_expert(layer, kExperts, rank % kExperts);
        through(rank, [&](Tokens dh) {
          std::vector<float> dw;
          std::vector<float> db;
          dh = experts[static_cast<std::size_t>(layer)][static_cast<std::size_t>(rank)].backward(
              bound.load(weight), std::move(dh), dw, &db);
          grads[static_cast<std::size_t>(rank)].push_back({weight, dw});
          grads[static_cast<std::size_t>(rank)].push_back({weight + 1, db});
          return dh;
        });
      }
      const int weight = weight_of_block(layer, kExperts);
      for (std::size_t rank = 0; rank < kExpertRanks; ++rank)
        grads[rank].push_back({weight, streams[rank].block_backward(layer, bound.load(weight))});
    }
    for (std::size_t rank = 0; rank < kExpertRanks; ++rank)
      grads[rank].push_back({0, streams[rank].embed_backward(bound.load(0))});
    StepResult result;
    for (const std::vector<Gradient>& of_rank : grads) {
      for (const Gradient& gradient : of_rank) bound.give(gradient.param, gradient.values);
      engine.end_backward();
      result = engine.step();
    }
    take_result(outcome, result);
  }
  finish(bound, structure, outcome);
  return outcome;
}

std::string difference(const ExpertsOutcome& one_process, const ExpertsOutcome& rank) {
  for (std::size_t step = 0; step < one_process.norms.size(); ++step) {
    if (rank.norms.size() <= step || one_process.norms[step] != rank.norms[step])
      return "norm of step " + std::to_string(step) + ": " + one_process.norms[step] + " against " +
             (step < rank.norms.size() ? rank.norms[step] : "nothing");
  }
  for (std::size_t param = 0; param < rank.names.size(); ++param) {
    const auto found = std::ranges::find(one_process.names, rank.names[param]);
    if (found == one_process.names.end()) return "a parameter " + rank.names[param];
    if (one_process.values[static_cast<std::size_t>(found - one_process.names.begin())] != rank.values[param])
      return "values of " + rank.names[param];
  }
  return "";
}

}  // namespace zeroth::test
