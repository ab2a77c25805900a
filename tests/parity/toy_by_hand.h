// Local updates once more, in plain loops between plain engines: what LocalUpdates is compared with.
#pragma once

#include <kernels/quant/quant.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/local_updates.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace zeroth::test {

/// The methods once more, on whole flats that every rank of a site has.
template <class T>
class ByHand {
 public:
  /// `present`: sites in the mean of the exchange after so many steps; unset: all. The others get it as well.
  using Present = std::function<std::vector<int>(std::int64_t step)>;
  ByHand(Engine& engine, const LocalSettings& settings, Present present = {})
      : engine_(engine), settings_(settings), present_(std::move(present)), first_(engine.committed_steps()) {
    x_ = read();
    start_ = x_;
    momentum_ = x_;
    for (auto& flat : momentum_) std::ranges::fill(flat, T{0});
    std::map<int, int> numbers;
    for (const FlatLayout& flat : engine.layout().flats) {
      if (flat.trainable) numbers.emplace(flat.unit, 0);
    }
    int next = 0;
    for (auto& [_, number] : numbers) number = next++;
    for (const FlatLayout& flat : engine.layout().flats)
      fragment_.push_back(flat.trainable ? numbers[flat.unit] % settings.fragments : -1);
  }

  void after_step(const Communicator& across) {
    const std::int64_t step = engine_.committed_steps() - first_;
    if (std::exchange(step_, step) == step) return;  // it was skipped
    std::vector<std::vector<T>> local = read();
    bool changed = false;
    for (int fragment = 0; fragment < settings_.fragments; ++fragment) {
      const int offset = fragment * settings_.steps / settings_.fragments;
      const bool sends = step_ >= offset && (step_ - offset) % settings_.steps == 0;
      if (settings_.method == LocalMethod::kCo2) {
        if (!sends) continue;
        for (std::size_t flat = 0; flat < x_.size(); ++flat) {
          const std::vector<T> mean = mean_of(local[flat], start_[flat], across);
          if (late_.contains(flat)) late_update(flat);
          late_[flat] = mean;  // of the window that began at start_
          begun_[flat] = start_[flat];
          start_[flat] = x_[flat];
          local[flat] = x_[flat];
        }
        changed = true;
        continue;
      }
      if (due_.contains(fragment) && due_[fragment] == step_) changed = take(fragment, local) || changed;
      if (!sends) continue;
      for (std::size_t flat = 0; flat < x_.size(); ++flat) {
        if (fragment_[flat] == fragment) update(flat, mean_of(local[flat], x_[flat], across));
      }
      due_[fragment] = step_ + settings_.delay;
      if (settings_.delay == 0) changed = take(fragment, local) || changed;
    }
    if (changed) write(local);
  }

 private:
  [[nodiscard]] bool has_codes() const { return settings_.payload != LocalPayload::kFull; }

  /// Of the sites' values; with codes of start - local.
  std::vector<T> mean_of(const std::vector<T>& local, const std::vector<T>& start, const Communicator& across) const {
    std::vector<T> sent = local;
    if (has_codes()) {
      std::vector<float> moved;
      for (std::size_t i = 0; i < local.size(); ++i) moved.push_back(static_cast<float>(start[i] - local[i]));
      const auto format = settings_.payload == LocalPayload::kFp4    ? kernels::CodeFormat::kE3M0
                          : settings_.payload == LocalPayload::kInt4 ? kernels::CodeFormat::kInt4
                                                                     : kernels::CodeFormat::kInt8;
      const auto n = static_cast<std::int64_t>(moved.size());
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(kernels::code_bytes(n, format)));
      std::vector<float> scales(static_cast<std::size_t>(kernels::code_blocks(n, settings_.block)));
      kernels::quantize({.codes = codes.data(),
                         .scales = scales.data(),
                         .src = moved.data(),
                         .n = n,
                         .block = settings_.block,
                         .format = format},
                        kernels::Isa::kScalar);
      const kernels::QuantSource source{.codes = codes.data(), .scales = scales.data()};
      kernels::dequantize({.dst = moved.data(),
                           .sources = &source,
                           .num_sources = 1,
                           .n = n,
                           .block = settings_.block,
                           .format = format},
                          kernels::Isa::kScalar);
      std::ranges::copy(moved, sent.begin());
    }
    std::vector<T> all(sent.size() * static_cast<std::size_t>(across.size()));
    across.all_gather(std::span<const T>(sent), std::span(all));
    std::vector<int> sites;
    for (int site = 0; site < across.size(); ++site) sites.push_back(site);
    if (present_) sites = present_(step_);
    const auto of = [&](int site, std::size_t i) { return all[static_cast<std::size_t>(site) * sent.size() + i]; };
    std::vector<T> mean(sent.begin(), sent.end());
    for (std::size_t i = 0; i < mean.size(); ++i) {
      if (has_codes()) {  // values of codes are float32, and so are their sums
        float sum = static_cast<float>(of(sites.front(), i));
        for (std::size_t next = 1; next < sites.size(); ++next) sum += static_cast<float>(of(sites[next], i));
        mean[i] = sum * (1.0F / static_cast<float>(sites.size()));
        continue;
      }
      mean[i] = of(sites.front(), i);
      for (std::size_t next = 1; next < sites.size(); ++next) mean[i] += of(sites[next], i);
      mean[i] /= static_cast<T>(sites.size());
    }
    return mean;
  }

  /// Nesterov, as torch.optim.SGD has it, rearranged so that it is the mean for lr 1 and no momentum.
  void update(std::size_t flat, const std::vector<T>& mean) {
    const auto lr = static_cast<T>(settings_.outer_lr);
    const auto mu = static_cast<T>(settings_.outer_momentum);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      const T moved = has_codes() ? mean[i] : x_[flat][i] - mean[i];
      const T before = momentum_[flat][i];
      const T after = mu * before + moved;
      momentum_[flat][i] = after;
      T next = has_codes() ? x_[flat][i] - moved : mean[i];
      if (settings_.outer_lr != 1.0) next += static_cast<T>(1.0 - settings_.outer_lr) * moved;
      if (settings_.outer_momentum > 0) next -= lr * (mu * (settings_.nesterov ? after : before));
      x_[flat][i] = next;
    }
  }

  void late_update(std::size_t flat) {
    const std::vector<T> mean = late_[flat];
    for (std::size_t i = 0; i < mean.size(); ++i) {
      T m = static_cast<T>(settings_.outer_momentum) * momentum_[flat][i] +
            (has_codes() ? mean[i] : begun_[flat][i] - mean[i]);
      if (settings_.clip > 0)
        m = std::min(std::max(m, -static_cast<T>(settings_.clip)), static_cast<T>(settings_.clip));
      momentum_[flat][i] = m;
      const T gap = settings_.gap_scale > 0
                        ? T{1} + std::abs(x_[flat][i] - begun_[flat][i]) / static_cast<T>(settings_.gap_scale)
                        : T{1};
      x_[flat][i] -= static_cast<T>(settings_.outer_lr) * (m / gap);
    }
  }

  bool take(int fragment, std::vector<std::vector<T>>& local) {
    const auto keep = static_cast<T>(settings_.keep_local);
    const auto give = static_cast<T>(1.0 - settings_.keep_local);
    for (std::size_t flat = 0; flat < x_.size(); ++flat) {
      if (fragment_[flat] != fragment) continue;
      for (std::size_t i = 0; i < x_[flat].size(); ++i)
        local[flat][i] = settings_.keep_local > 0 ? keep * local[flat][i] + give * x_[flat][i] : x_[flat][i];
    }
    due_.erase(fragment);
    return true;
  }

  std::vector<std::vector<T>> read() {
    std::vector<std::vector<T>> flats;
    for (const FlatLayout& flat : engine_.layout().flats)
      flats.emplace_back(flat.trainable ? static_cast<std::size_t>(flat.length) : 0U);
    engine_.read_states({.kind = "master"}, [&](const StateTensor& tensor) {
      for (std::size_t flat = 0; flat < flats.size(); ++flat) {
        for (const Segment& segment : engine_.layout().flats[flat].segments) {
          if (flats[flat].empty() ||
              engine_.layout().params[static_cast<std::size_t>(segment.param)].name != tensor.name)
            continue;
          std::memcpy(flats[flat].data() + segment.offset, tensor.data.data(), tensor.data.size());
        }
      }
    });
    return flats;
  }

  void write(const std::vector<std::vector<T>>& flats) {
    WeightWrite write{.source = -1};
    std::vector<std::span<const std::byte>> values;
    for (std::size_t flat = 0; flat < flats.size(); ++flat) {
      for (const Segment& segment : engine_.layout().flats[flat].segments) {
        if (flats[flat].empty()) continue;
        write.names.push_back(engine_.layout().params[static_cast<std::size_t>(segment.param)].name);
        values.push_back(std::as_bytes(std::span(flats[flat]))
                             .subspan(static_cast<std::size_t>(segment.offset) * sizeof(T),
                                      static_cast<std::size_t>(segment.numel) * sizeof(T)));
      }
    }
    write.values = [&values](std::size_t index) { return values[index]; };
    engine_.write_weights(write);
  }

  Engine& engine_;
  LocalSettings settings_;
  Present present_;
  std::int64_t first_;
  std::int64_t step_ = 0;
  std::vector<int> fragment_;      // of each flat
  std::vector<std::vector<T>> x_;  // one a flat, as the others
  std::vector<std::vector<T>> momentum_;
  std::vector<std::vector<T>> start_;           // of the running window
  std::map<std::size_t, std::vector<T>> late_;  // means on their way
  std::map<std::size_t, std::vector<T>> begun_;
  std::map<int, std::int64_t> due_;
};

}  // namespace zeroth::test
