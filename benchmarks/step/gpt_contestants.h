// The same GPT twice: by plain torch without any communication (the floor), and in a Zeroth engine.
#pragma once

#include "model.h"
#include "step/paired_blocks.h"

#include <zeroth/engine/world.h>
#include <zeroth/libtorch/engine.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::benchmarks {

struct GptCase {
  std::string size = "25m";    ///< "3m", "25m" or "120m"
  std::string dtype = "fp32";  ///< "fp32" or "bf16"
  std::int64_t micro_batch = 4;
  std::int64_t seq = 128;
  int accumulate = 1;
  std::string reshard = "default";
};

/// --size, --dtype, --micro-batch, --seq, --accumulate and --reshard.
void add_options(CLI::App& app, GptCase& gpt_case);

/// Shape of `size`. Throws std::invalid_argument for another name.
[[nodiscard]] gpt::ModelOptions shape_of(const GptCase& gpt_case);

/// Token batches that all contestants of a rank share: the n-th micro-step of each sees the same one.
class Batches {
 public:
  Batches(const GptCase& gpt_case, int rank);
  struct Batch {
    torch::Tensor x_BT{};
    torch::Tensor y_BT{};
  };
  [[nodiscard]] const Batch& at(std::size_t micro_step) const { return batches_[micro_step % batches_.size()]; }

 private:
  std::vector<Batch> batches_{};
};

/// Forward and backward by torch, then torch's fused AdamW over the list of parameters; gradients are dropped
/// after the step. bf16: parameters and gradients in bf16 and fp32 masters; the step casts the gradients to
/// fp32 in buffers that are kept, updates the masters and casts them back, each by one torch call over all
/// parameters.
[[nodiscard]] std::unique_ptr<Contestant> make_floor(const GptCase& gpt_case, std::shared_ptr<const Batches> batches,
                                                     std::string name);

/// A GPT in an engine of its own.
class EngineGpt : public Contestant {
 public:
  /// Collective. Without a name it has that of its stage, "zero-2".
  EngineGpt(const GptCase& gpt_case, int zero_stage, std::shared_ptr<const Batches> batches, const World& world,
            std::string name = "");
  void step(PhaseTimes& phases) override;

  [[nodiscard]] libtorch::Engine<gpt::GptImpl>& engine() { return engine_; }
  /// Digest over the bits of this rank's losses so far.
  [[nodiscard]] std::uint64_t loss_digest() const { return loss_digest_; }
  [[nodiscard]] int zero_stage() const { return zero_stage_; }

 private:
  int accumulate_;
  int zero_stage_;
  std::shared_ptr<const Batches> batches_;
  libtorch::Engine<gpt::GptImpl> engine_;
  std::size_t micro_step_ = 0;
  std::uint64_t loss_digest_ = 0;
};

}  // namespace zeroth::benchmarks
