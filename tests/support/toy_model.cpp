#include "support/toy_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

namespace zeroth::test {
namespace {

/// Deterministic values in (-1, 1) with few bits, so that every dtype holds them well.
double uniform(std::mt19937_64& random) {
  return (static_cast<double>(random() >> 44U) / static_cast<double>(1U << 20U)) * 2.0 - 1.0;
}

template <class T>
T activate(T z) {
  return z / (T{1} + std::abs(z));
}
template <class T>
T activate_slope(T z) {
  const T d = T{1} + std::abs(z);
  return T{1} / (d * d);
}

/// y[rows] = W[rows, cols] x[cols] + b
template <class T>
std::vector<T> affine(const std::vector<T>& w, const std::vector<T>& x, const std::vector<T>& b, std::size_t rows) {
  std::vector<T> y(rows);
  const std::size_t cols = x.size();
  for (std::size_t row = 0; row < rows; ++row) {
    T sum = b.empty() ? T{0} : b[row];
    for (std::size_t col = 0; col < cols; ++col) sum += w[row * cols + col] * x[col];
    y[row] = sum;
  }
  return y;
}

/// Adds dz x^T to dw and dz to db; returns W^T dz.
template <class T>
std::vector<T> affine_backward(const std::vector<T>& w, const std::vector<T>& x, const std::vector<T>& dz,
                               std::vector<T>& dw, std::vector<T>* db) {
  const std::size_t cols = x.size();
  dw.resize(dz.size() * cols, T{0});
  if (db != nullptr) db->resize(dz.size(), T{0});
  std::vector<T> dx(cols, T{0});
  for (std::size_t row = 0; row < dz.size(); ++row) {
    if (db != nullptr) (*db)[row] += dz[row];
    for (std::size_t col = 0; col < cols; ++col) {
      dw[row * cols + col] += dz[row] * x[col];
      dx[col] += w[row * cols + col] * dz[row];
    }
  }
  return dx;
}

}  // namespace

ToyStructure make_toy(const ToyOptions& options, std::uint64_t seed) {
  ToyStructure toy;
  std::mt19937_64 random(seed);
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, bool trainable, int group) {
    toy.params.push_back(
        {.name = name, .shape = std::move(shape), .dtype = options.dtype, .trainable = trainable, .group = group});
    std::vector<double> values(static_cast<std::size_t>(toy.params.back().numel()));
    for (double& value : values) {
      value = uniform(random) * 0.5;
      if (options.dtype == DType::kBFloat16)
        value = static_cast<double>(static_cast<float>(BFloat16(static_cast<float>(value))));
      if (options.dtype == DType::kFloat16)
        value = static_cast<double>(static_cast<float>(Float16(static_cast<float>(value))));
    }
    toy.values.push_back(std::move(values));
    return static_cast<int>(toy.params.size()) - 1;
  };
  UnitSpec root{.name = "root"};
  root.params.push_back(add("in.weight", {options.width, options.inputs}, true, 0));
  root.params.push_back(add("in.bias", {options.width}, true, 1));
  root.params.push_back(add("out.weight", {1, options.width}, true, 0));
  std::vector<UnitSpec> blocks;
  for (int block = 0; block < options.blocks; ++block) {
    const std::string name = "blocks." + std::to_string(block);
    const bool frozen = std::ranges::find(options.frozen_blocks, block) != options.frozen_blocks.end();
    UnitSpec unit{.name = name, .repeated = true};
    const std::size_t before = toy.params.size();
    if (options.tie_first_two && block < 2) {
      // The lowest common ancestor of both uses is the root.
      if (block == 0) {
        root.params.push_back(add(name + ".weight", {options.width, options.width}, !frozen, 0));
        toy.params.back().aliases.push_back("blocks.1.weight");
      }
    } else {
      unit.params.push_back(add(name + ".weight", {options.width, options.width}, !frozen, 0));
    }
    if (toy.params.size() > before) toy.params.back().memory_order = options.memory_order;
    unit.params.push_back(add(name + ".bias", {options.width}, true, 1));
    blocks.push_back(std::move(unit));
  }
  toy.units.push_back(std::move(root));
  toy.units.insert(toy.units.end(), blocks.begin(), blocks.end());
  return toy;
}

ToyBatch toy_batch(const ToyOptions& options, int rank, std::int64_t step, int micro_step) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 1000003 + static_cast<std::uint64_t>(step) * 1009 +
                         static_cast<std::uint64_t>(micro_step) * 17 + 5);
  ToyBatch batch;
  for (int sample = 0; sample < options.batch; ++sample) {
    double sum = 0;
    for (int input = 0; input < options.inputs; ++input) {
      batch.x.push_back(uniform(random));
      sum += batch.x.back();
    }
    batch.target.push_back(sum * 0.5 + 0.1 * uniform(random));
  }
  return batch;
}

ToyModel::ToyModel(const ToyOptions& options, std::uint64_t seed)
    : options_(options), structure_(make_toy(options, seed)) {}

void ToyModel::bind(int flat, std::byte* data) {
  if (flats_.size() <= static_cast<std::size_t>(flat)) flats_.resize(static_cast<std::size_t>(flat) + 1, nullptr);
  flats_[static_cast<std::size_t>(flat)] = data;
}

void ToyModel::begin_update(int flat) {
  if (update_watcher_) update_watcher_(engine_->layout().flat(flat).unit);
}

void ToyModel::attach(Engine& engine) {
  engine_ = &engine;
  flats_.resize(engine.layout().flats.size(), nullptr);
  std::vector<std::byte> bytes;
  engine.initialize(
      [&](int param) {
        const std::vector<double>& values = structure_.values[static_cast<std::size_t>(param)];
        const ParamSpec& spec = structure_.params[static_cast<std::size_t>(param)];
        bytes.resize(values.size() * size_of(spec.dtype));
        for (std::size_t i = 0; i < values.size(); ++i) {
          switch (spec.dtype) {
            case DType::kFloat64:
              reinterpret_cast<double*>(bytes.data())[i] = values[i];
              break;
            case DType::kBFloat16:
              reinterpret_cast<BFloat16*>(bytes.data())[i] = BFloat16(static_cast<float>(values[i]));
              break;
            case DType::kFloat16:
              reinterpret_cast<Float16*>(bytes.data())[i] = Float16(static_cast<float>(values[i]));
              break;
            default:
              reinterpret_cast<float*>(bytes.data())[i] = static_cast<float>(values[i]);
              break;
          }
        }
        return ConstTensorView{bytes.data(), spec.shape, spec.dtype};
      },
      [](std::span<const int>) {});
}

template <class T>
std::vector<T> ToyModel::load(int param) const {
  const ParamPlace& place = engine_->layout().places[static_cast<std::size_t>(param)];
  const std::byte* flat = flats_[static_cast<std::size_t>(place.flat)];
  ZR_ASSERT(flat != nullptr, "a toy parameter is read while it is not gathered");
  const Segment& segment = engine_->layout().segment(param);
  const std::byte* data = flat + static_cast<std::size_t>(segment.offset) * size_of(options_.dtype);
  std::vector<T> values(static_cast<std::size_t>(segment.numel));
  std::vector<std::byte> copy;
  if (memory_) {
    copy.resize(array_bytes(segment.numel, options_.dtype));
    memory_->read(copy.data(), data, copy.size());
    data = copy.data();
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (options_.dtype == DType::kBFloat16) {
      values[i] = static_cast<T>(static_cast<float>(reinterpret_cast<const BFloat16*>(data)[i]));
    } else if (options_.dtype == DType::kFloat16) {
      values[i] = static_cast<T>(static_cast<float>(reinterpret_cast<const Float16*>(data)[i]));
    } else {
      values[i] = reinterpret_cast<const T*>(data)[i];
    }
  }
  return values;
}

template <class T>
void ToyModel::give(int param, const std::vector<T>& grad, bool is_sum) {
  const ParamSpec& spec = structure_.params[static_cast<std::size_t>(param)];
  if (!spec.trainable || grad.empty()) return;
  std::vector<T> given = grad;
  if (chosen_) std::ranges::fill(given, static_cast<T>(chosen_(engine_->rank())));
  if (poison_ && poison_(engine_->rank(), step_, micro_step_, param))
    given.back() = std::numeric_limits<T>::quiet_NaN();
  for (T& value : given) value *= static_cast<T>(engine_->loss_scale());
  const bool rounds = options_.round_gradients && !is_sum && engine_->rank() != options_.wide_rank;
  const auto give_rounded = [&]<class Narrow>(Narrow /*type*/) {
    std::vector<Narrow> rounded;
    for (const T value : given) rounded.emplace_back(static_cast<float>(value));
    hand_over(param, reinterpret_cast<const std::byte*>(rounded.data()), spec.dtype);
  };
  if (rounds && spec.dtype == DType::kBFloat16) return give_rounded(BFloat16());
  if (rounds && spec.dtype == DType::kFloat16) return give_rounded(Float16());
  hand_over(param, reinterpret_cast<const std::byte*>(given.data()), DTypeOf<T>::value);
}

void ToyModel::hand_over(int param, const std::byte* values, DType dtype) {
  const ParamSpec& spec = structure_.params[static_cast<std::size_t>(param)];
  if (memory_) values = memory_->place(values, array_bytes(spec.numel(), dtype));
  engine_->grad_ready(param, {values, spec.shape, dtype});
}

template <class T>
double ToyModel::run(std::int64_t step, int micro_step, const SkipRule& skip, bool backward) {
  const auto width = static_cast<std::size_t>(options_.width);
  const auto inputs = static_cast<std::size_t>(options_.inputs);
  const ToyBatch batch = toy_batch(options_, data_rank_ >= 0 ? data_rank_ : engine_->rank(), step, micro_step);
  step_ = step;
  micro_step_ = micro_step;
  // Which blocks run, in order; the last one twice if asked.
  std::vector<int> path;
  for (int block = 0; block < options_.blocks; ++block) {
    if (skip && skip(engine_->rank(), step, block)) continue;
    path.push_back(block);
    if (options_.reuse_last && block + 1 == options_.blocks) path.push_back(block);
  }
  const auto weight_of = [&](int block) {
    if (options_.tie_first_two && block == 1) block = 0;
    const std::string name = "blocks." + std::to_string(block) + ".weight";
    for (std::size_t param = 0; param < structure_.params.size(); ++param) {
      if (structure_.params[param].name == name) return static_cast<int>(param);
    }
    return -1;
  };
  const auto bias_of = [&](int block) { return structure_.units[static_cast<std::size_t>(block) + 1].params.back(); };

  const Invocation root = engine_->begin_forward(0, !backward);
  engine_->pre_forward(root);
  visit(false, 0);
  const std::vector<T> w_in = load<T>(0);
  const std::vector<T> b_in = load<T>(1);
  const std::vector<T> w_out = load<T>(2);
  struct Sample {
    std::vector<T> x, z_in;
    std::vector<std::vector<T>> h;  // input of each block, then the output
    std::vector<std::vector<T>> z;
    T error = 0;
  };
  std::vector<Sample> samples(static_cast<std::size_t>(options_.batch));
  for (std::size_t s = 0; s < samples.size(); ++s) {
    for (std::size_t i = 0; i < inputs; ++i) samples[s].x.push_back(static_cast<T>(batch.x[s * inputs + i]));
    samples[s].z_in = affine(w_in, samples[s].x, b_in, width);
    std::vector<T> h(width);
    for (std::size_t i = 0; i < width; ++i) h[i] = activate(samples[s].z_in[i]);
    samples[s].h.push_back(std::move(h));
  }
  for (const int block : path) {
    const Invocation use = engine_->begin_forward(block + 1, !backward);
    engine_->pre_forward(use);
    visit(false, block + 1);
    const std::vector<T> w = load<T>(weight_of(block));
    const std::vector<T> b = load<T>(bias_of(block));
    for (Sample& sample : samples) {
      sample.z.push_back(affine(w, sample.h.back(), b, width));
      std::vector<T> h = sample.h.back();
      for (std::size_t i = 0; i < width; ++i) h[i] += activate(sample.z.back()[i]);
      sample.h.push_back(std::move(h));
    }
    engine_->post_forward(use, backward);
  }
  double loss = 0;
  const T scale = T{1} / static_cast<T>(samples.size());
  for (std::size_t s = 0; s < samples.size(); ++s) {
    const std::vector<T> y = affine(w_out, samples[s].h.back(), {}, 1);
    samples[s].error = y[0] - static_cast<T>(batch.target[s]);
    loss += static_cast<double>(samples[s].error * samples[s].error * T{0.5} * scale);
  }
  engine_->post_forward(root, backward);
  if (!backward) return loss;

  engine_->pre_backward(0);
  visit(true, 0);
  std::vector<std::vector<T>> grads(structure_.params.size());
  std::vector<std::vector<T>> dh;
  for (Sample& sample : samples) {
    dh.push_back(affine_backward<T>(load<T>(2), sample.h.back(), {sample.error * scale}, grads[2], nullptr));
  }
  give(2, grads[2]);
  for (std::size_t position = path.size(); position-- > 0;) {
    const int block = path[position];
    const int weight = weight_of(block);
    engine_->pre_backward(block + 1);
    visit(true, block + 1);
    const std::vector<T> w = load<T>(weight);
    const bool last_use = position == 0 || path[position - 1] != block;
    for (std::size_t s = 0; s < samples.size(); ++s) {
      std::vector<T> dz(width);
      for (std::size_t i = 0; i < width; ++i) dz[i] = dh[s][i] * activate_slope(samples[s].z[position][i]);
      const std::vector<T> dx = affine_backward(w, samples[s].h[position], dz, grads[static_cast<std::size_t>(weight)],
                                                &grads[static_cast<std::size_t>(bias_of(block))]);
      for (std::size_t i = 0; i < width; ++i) dh[s][i] += dx[i];
    }
    if (!last_use) continue;
    const bool reused = options_.reuse_last && block + 1 == options_.blocks;
    std::vector<T>& bias = grads[static_cast<std::size_t>(bias_of(block))];
    const bool left_out = left_out_ && left_out_(engine_->rank(), step, block);
    if (left_out) std::ranges::fill(bias, T{0});
    if (!left_out || gives_zeros_) give(bias_of(block), bias, reused);
    const bool tied = options_.tie_first_two && block == 1;
    if (!tied) give(weight, grads[static_cast<std::size_t>(weight)], reused || (options_.tie_first_two && block == 0));
    engine_->end_gradients(block + 1);
    engine_->post_backward(block + 1);
  }
  for (std::size_t s = 0; s < samples.size(); ++s) {
    std::vector<T> dz(width);
    for (std::size_t i = 0; i < width; ++i) dz[i] = dh[s][i] * activate_slope(samples[s].z_in[i]);
    affine_backward(w_in, samples[s].x, dz, grads[0], &grads[1]);
  }
  give(0, grads[0]);
  give(1, grads[1]);
  engine_->post_backward(0);
  engine_->end_backward();
  return loss;
}

double ToyModel::forward_backward(std::int64_t step, int micro_step, const SkipRule& skip) {
  return options_.dtype == DType::kFloat64 ? run<double>(step, micro_step, skip, true)
                                           : run<float>(step, micro_step, skip, true);
}

double ToyModel::evaluate(std::int64_t step, int micro_step) {
  return options_.dtype == DType::kFloat64 ? run<double>(step, micro_step, {}, false)
                                           : run<float>(step, micro_step, {}, false);
}

std::vector<double> ToyModel::value(int param) {
  const ParamPlace& place = engine_->layout().places[static_cast<std::size_t>(param)];
  const FlatLayout& flat = engine_->layout().flat(place.flat);
  std::vector<std::byte> bytes(flat.bytes());
  engine_->read_flat(place.flat, bytes.data());
  const Segment& segment = engine_->layout().segment(param);
  std::vector<double> values(static_cast<std::size_t>(segment.numel));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::byte* at = bytes.data() + (static_cast<std::size_t>(segment.offset) + i) * size_of(flat.dtype);
    switch (flat.dtype) {
      case DType::kFloat64:
        std::memcpy(&values[i], at, 8);
        break;
      case DType::kBFloat16: {
        BFloat16 narrow;
        std::memcpy(&narrow, at, 2);
        values[i] = static_cast<double>(static_cast<float>(narrow));
        break;
      }
      case DType::kFloat16: {
        Float16 narrow;
        std::memcpy(&narrow, at, 2);
        values[i] = static_cast<double>(static_cast<float>(narrow));
        break;
      }
      default: {
        float single = 0;
        std::memcpy(&single, at, 4);
        values[i] = static_cast<double>(single);
        break;
      }
    }
  }
  return values;
}

}  // namespace zeroth::test
