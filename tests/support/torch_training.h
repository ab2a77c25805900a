// Trains two small LibTorch models on ranks that are threads, or on the one rank that this process is, and
// returns everything that could differ. No torch in this header, so that the tests which only compare compile
// in a second.
#pragma once

#include <zeroth/engine/engine.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace zeroth {
class World;
}

namespace zeroth::test {

enum class TorchNet {
  kGpt,      ///< transformer: tied embedding, dropout, SwiGLU, fp32 norms in bf16 blocks; every block is a unit
  kForeign,  ///< convolution (channels_last), batch norm, a reused unit, a skipped branch, tied and frozen
             ///< weights, soft prompt
};

struct TorchTraining {
  TorchNet net = TorchNet::kGpt;
  DType dtype = DType::kFloat32;
  int layers = 3;  ///< GPT: blocks
  int width = 24;  ///< GPT: model width, a multiple of 8
  int world = 1;
  int micro_steps = 1;
  int steps = 4;
  double clipping = 0.5;
  double lr = 1e-2;
  bool sgd = false;  ///< SGD with momentum, which does not forgive a wrong factor of the gradient, instead of AdamW
  double dropout = 0.2;
  int zero_stage = 0;
  Reshard reshard = Reshard::kDefault;
  ReductionPolicy policy = ReductionPolicy::kPerMicroStep;
  int ring_slots = 2;
  ExecutionMode mode = ExecutionMode::kInline;
  std::int64_t chaos_seed = 1;
  /// Reports read the process's smaps, which takes longer than a training as small as this.
  bool reports_memory = true;
  /// Runs on every rank after each step.
  std::function<void(Engine& engine, int step)> after_step{};

  [[nodiscard]] std::string text() const;
};

/// Received bytes of one rank in the last step, counted at the copy.
struct TorchWire {
  WireBytes planned{};
  std::uint64_t all_gather = 0;
  std::uint64_t reduce_scatter = 0;
};

struct TorchValue {
  DType dtype = DType::kFloat32;
  std::vector<std::byte> bytes{};

  bool operator==(const TorchValue&) const = default;
};

struct TorchOutcome {
  std::vector<double> losses{};  ///< mean over ranks and micro-steps, one a step; compared by bits
  std::vector<double> norms{};
  std::map<std::string, TorchValue> values{};  ///< parameters at the end
  std::vector<std::string> buffers{};          ///< digests of a rank's buffers at the end, one a rank
  std::vector<MemoryReport> memory{};          ///< one a rank, of everything but the last step's peaks
  std::vector<TorchWire> wire{};               ///< one a rank
};

/// Ranks as threads. Throws if they do not agree with each other.
[[nodiscard]] TorchOutcome train_torch(const TorchTraining& training);
/// The part of one rank, all of which call it: buffers, memory and wire hold one entry, that of this rank.
[[nodiscard]] TorchOutcome train_torch_as_rank(const TorchTraining& training, const World& world);
/// First difference in words with both values, "" if every bit is equal.
[[nodiscard]] std::string difference(const TorchOutcome& expected, const TorchOutcome& got);

/// Losses of the same training in one process without an engine: torch's own backward over all ranks' and
/// micro-steps' batches, clip_grad_norm_ and AdamW.
[[nodiscard]] std::vector<double> train_plain_torch(const TorchTraining& training);

}  // namespace zeroth::test
