// Config: one JSON document. Settings that DeepSpeed has too have DeepSpeed's key names; all others are under "zeroth".
//
// Every key is in one of three classes (docs/configuration.md lists them all):
//   honoured  it has its documented effect
//   hint      accepted and reported once, with Zeroth's own behaviour; never changes a number
//   refused   a feature that is not built and would change training, memory or output: an error, unless the value is
//             the harmless one ("amp": {"enabled": false})
// An unknown key is an error with the nearest known name. All problems of a document are reported together.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/base/error.h>
#include <zeroth/comm/factory.h>
#include <zeroth/device/device.h>
#include <zeroth/engine/uneven.h>
#include <zeroth/optim/compression_options.h>
#include <zeroth/optim/loss_scaler.h>
#include <zeroth/optim/optimizer_options.h>
#include <zeroth/optim/schedule.h>
#include <zeroth/zero/plan.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// Section "optimizer". Keys under "params" that the type does not know are errors.
struct OptimizerConfig {
  std::string type = "AdamW";  ///< see optimizer_names()
  double lr = 1e-3;
  std::optional<std::array<double, 2>> betas{};  ///< unset: see moments()
  double eps = 1e-8;
  std::optional<double> weight_decay{};  ///< unset: see decay()
  bool adam_w_mode = true;  ///< Adam only: decoupled decay, as DeepSpeed's "Adam" does; false: decay in the gradient
  double momentum = 0.0;    ///< SGD
  double dampening = 0.0;   ///< SGD
  bool nesterov = false;    ///< SGD
  std::int64_t freeze_step = 100'000;  ///< OneBitAdam, OneBitLamb
  double freeze_threshold = 0.0;       ///< the same; 0: frozen at freeze_step
  CompressionOptions compression{};    ///< the same: of what ranks exchange after it
  LambOptions lamb{};                  ///< Lamb, OneBitLamb
  ZeroOneOptions zero_one{};           ///< ZeroOneAdam

  /// betas, or {0.9, 0.99} for Lion and {0.9, 0.999} for the others, as in their papers.
  [[nodiscard]] std::array<double, 2> moments() const;
  /// weight_decay, or 0.01 for AdamW and 0 for the others, as in torch.
  [[nodiscard]] double decay() const;
  /// The update rule behind the type: "Adam" with adam_w_mode is "AdamW". Fits make_optimizer().
  [[nodiscard]] std::string rule() const;
};

/// Section "scheduler", the fields of DeepSpeed's schedules.
struct SchedulerConfig {
  std::string type{};             ///< "" (constant), "WarmupLR", "WarmupDecayLR" (linear) or "WarmupCosineLR"
  double warmup_min_lr = 0.0;     ///< WarmupLR, WarmupDecayLR
  double warmup_max_lr = 1e-3;    ///< WarmupLR, WarmupDecayLR: takes the place of optimizer.lr
  double warmup_min_ratio = 0.0;  ///< WarmupCosineLR
  double cos_min_ratio = 1e-4;    ///< WarmupCosineLR
  std::int64_t warmup_num_steps = 1000;
  std::int64_t total_num_steps = 0;  ///< WarmupDecayLR, WarmupCosineLR; required there
  std::string warmup_type = "log";   ///< "log" or "linear"

  /// The schedule as factors of the base learning rate.
  [[nodiscard]] LearningRateSchedule schedule() const;
  /// The learning rate that schedule() multiplies: warmup_max_lr if the type has it, else `optimizer_lr`.
  [[nodiscard]] double base_lr(double optimizer_lr) const;
};

/// Section "zero_optimization", and the keys of section "zeroth" that belong to the plan.
struct ZeroConfig {
  int stage = 0;
  ReductionPolicy reduction_policy = ReductionPolicy::kPerMicroStep;
  Reshard reshard = Reshard::kDefault;
  int ring_slots = 2;
  int prefetch_units = 1;
  bool narrow_buckets = true;
  int parameter_degree = 0;    ///< ranks over which stage 3 splits parameters; 0: all
  int optimizer_degree = 0;    ///< ranks over which stages 1 to 3 split the optimizer; 0: all
  int gradient_degree = 0;     ///< ranks over which the gradients of a micro-step are summed; 0: all
  int hpz_partition_size = 1;  ///< DeepSpeed's name of parameter_degree, if above 1; see also WireCodes::node_degree
  int mics_shard_size = -1;    ///< DeepSpeed's name of both degrees, if above 0
  bool quantized_weights = false;    ///< ZeRO++: parameters are gathered as codes of 8 bits
  bool quantized_gradients = false;  ///< ZeRO++: gradients are reduced as codes of code_bits
  int code_bits = 4;                 ///< 4 or 8
  bool code_feedback = true;         ///< see WireCodes
  int code_node_degree = 0;          ///< 0: hpz_partition_size, if above 1
  int code_block = 256;              ///< elements with one scale
  [[nodiscard]] bool has_codes() const { return quantized_weights || quantized_gradients; }
};

/// Section "zeroth.mesh": the ranks as a grid, from outer to inner.
struct MeshConfig {
  int pp = 1;                       ///< stages of a pipeline: ranks that have other layers
  int dp = 0;                       ///< ranks with batches of their own; 0: all that the other axes leave
  int ep = 1;                       ///< ranks with batches and with experts of their own
  int rows = 1;                     ///< ranks that share each image: its rows
  int sp = 1;                       ///< ranks that share a sequence
  int tp = 1;                       ///< ranks that share the matrices of a layer
  std::string method = "ulysses";   ///< of attention over sp: "ulysses", "ring", "grid" (Ulysses inside, ring outside)
  std::string order = "ring";       ///< what goes around a ring: "ring" (keys and values), "token" (queries too)
  int ulysses = 0;                  ///< ranks inside of a grid; 0: the largest divisor of sp below it
  std::string norms = "whole";      ///< "split": along tp, norms work on slices of the sequence
  std::string verify = "untested";  ///< which split models are compared with the whole: "untested", "always", "never"
  /// Any axis beside dp is there.
  [[nodiscard]] bool splits_models() const { return pp > 1 || ep > 1 || rows > 1 || sp > 1 || tp > 1; }
};

/// Section "zeroth.experts": how tokens and experts meet on ranks of ep.
struct ExpertsConfig {
  std::string over = "ep";       ///< axes of the mesh whose ranks have other experts: "ep,tp"
  std::string meet = "experts";  ///< "experts": tokens travel; "tokens": experts; "balance": some experts
  std::int64_t copies = 1;       ///< most experts of other ranks that a rank holds during a layer
  int pieces = 1;                ///< runs of experts whose rows travel while others are computed; 0: measured
  bool two_hops = false;         ///< rows travel inside nodes, then between them
};

/// Section "zeroth.pipeline".
struct PipelineConfig {
  std::string schedule = "1f1b";   ///< a name of make_schedule()
  int chunks = 0;                  ///< of layers on each stage; 0: as few as the schedule needs
  std::string split = "balanced";  ///< how layers become chunks: or "parameters", "uniform"
  bool scatter = false;  ///< ranks of tp each send a slice of what they have alike, for stages on different nodes
  std::string unshard = "micro_batch";  ///< stage 3: how long a stage keeps gathered parameters: "micro_batch", "step"
  std::string vocabulary = "whole";     ///< the head: on the last stage, or rows on all: "two_barriers", "one_barrier"
  bool recompute = false;               ///< a chunk keeps its input, and its forward runs again before its backward
  /// DeepSpeed's "pipeline.activation_checkpoint_interval": layers of a PipelineModule that are recomputed together;
  /// for other models more than 0 is `recompute`.
  int checkpoint_interval = 0;
  [[nodiscard]] bool recomputes_chunks() const { return recompute || checkpoint_interval > 0; }
};

/// Sections "zero_optimization.offload_optimizer" and "offload_param", "aio", and "zeroth.offload".
struct OffloadConfig {
  std::string optimizer_device = "none";               ///< "none", "cpu" (host memory) or "nvme" (files)
  std::string nvme_path{};                             ///< folders of the files, one a disk, separated by ':'
  int buffer_count = 4;                                ///< blocks of files in memory at once
  double ratio = 1.0;                                  ///< share of the states that rest there
  std::string parameter_device = "none";               ///< "none", "cpu" (host memory) or "nvme" (files)
  std::string parameter_nvme_path{};                   ///< as nvme_path, which it is where it is empty
  std::int64_t max_in_cpu = 0;                         ///< elements of parameters in files in memory at once; 0: few
  std::string ratio_from = "given";                    ///< "given": `ratio`; "planned": by measured speeds
  int cache_blocks = 0;                                ///< blocks of files that stay in memory beside buffer_count
  std::string gradients = "device";                    ///< where reduced gradients rest: or "host"
  std::optional<std::int64_t> block_elements{};        ///< whose states are one block; unset: the engine chooses
  std::string io = "probe";                            ///< engine of requests to files: see io_engine_of()
  bool direct = true;                                  ///< files pass the page cache (O_DIRECT), where it can be
  int queue_depth = 32;                                ///< transfers at once
  std::int64_t stripe_bytes = std::int64_t{1} << 20U;  ///< of one transfer, and of a folder's share
};

/// Section "zeroth.activations", and "activation_checkpointing.cpu_checkpointing".
struct ActivationConfig {
  std::string device = "none";                          ///< "none", "cpu" (host memory) or "nvme" (files)
  bool cpu_checkpointing = false;                       ///< DeepSpeed's name of device "cpu"
  std::string nvme_path{};                              ///< folders of the files, separated by ':'
  std::string saved = "checkpoints";                    ///< inputs of checkpointed functions; or "all"
  std::string choice = "given";                         ///< or "planned": of each unit, by measured steps
  std::int64_t memory_bytes = 0;                        ///< for what planned units keep; 0: half of what is free
  std::int64_t min_bytes = 4096;                        ///< smaller tensors stay
  int prefetch = 2;                                     ///< saved tensors that backward reads ahead
  std::int64_t buffer_bytes = std::int64_t{32} << 20U;  ///< of memory for what is on its way
  /// "none", "cpu" or "nvme".
  [[nodiscard]] std::string tier() const { return device == "none" && cpu_checkpointing ? "cpu" : device; }
};

/// Section "zeroth.budget": most bytes of a rank on each tier; 0: no limit.
struct BudgetConfig {
  std::int64_t device_bytes = 0;
  std::int64_t host_bytes = 0;
  std::int64_t file_bytes = 0;
};

/// Section "zeroth.update": when the update of a step runs. See UpdateSettings.
struct UpdateConfig {
  bool inside_backward = false;
  std::string clip_by = "exact_norm";           ///< or "previous_norm"
  std::optional<std::int64_t> delayed_after{};  ///< steps before the first whose update is delayed; unset: none is
  bool round_sums = false;                      ///< of gradients, to bfloat16
};

/// The rest of section "zeroth".
struct RuntimeConfig {
  int threads = 0;  ///< of CPU kernels per rank; 0: the cores of this host shared by its ranks
  int ranks_per_node =
      0;  ///< consecutive ranks that count as one node; 0: the ranks of each host over shm+mpi and mpi, else all
  Reduction reduction = Reduction::kRankOrder;  ///< what forms sums over ranks, and in which order
  bool check_calls = false;                     ///< also compare the calls of transports that do not compare them
  int stragglers = 0;                           ///< of a gradient code: see EngineSettings
  bool compare_replicas = false;                ///< after each update, what several ranks should have alike
  std::int64_t link_bytes_per_s = 0;            ///< emulated speed of a rank's link to other nodes; 0: no emulation
  std::int64_t timeout_ms = 300'000;            ///< longest wait for a living rank
  std::int64_t first_timeout_ms = 0;            ///< until the first step has ended; 0: twice timeout_ms
  Uneven uneven = Uneven::kError;
  bool preemption = false;                  ///< SIGTERM sets StepResult::preempted instead of ending the process
  std::int64_t frozen_after_ms = 10'000;    ///< a rank without a sign of life for this time is lost
  std::int64_t end_stuck_after_ms = 5'000;  ///< time after the job's end at which a stuck process is ended; 0: never
  int max_nonfinite_steps = 10;             ///< skipped steps in a row that end the training
  bool broadcast_buffers = true;            ///< copy rank 0's buffers before each training forward
  bool cast = true;                         ///< a float32 model takes the dtype that bf16 or fp16 enables
  bool compute_copies = false;              ///< units compute on copies of the parameters, on the CPU too
  ExecutionMode execution = ExecutionMode::kInline;
  std::int64_t chaos_seed = 0;
  std::int64_t memory_limit_bytes = 0;  ///< for all plans of one host; 0: memory of the host and its cgroup
};

/// train == micro * accumulate * data ranks.
struct BatchSizes {
  std::int64_t train = 0;       ///< sequences per step over all ranks
  std::int64_t micro = 0;       ///< sequences per rank and micro-step
  std::int64_t accumulate = 1;  ///< micro-steps per step
  bool operator==(const BatchSizes&) const = default;
};

/// A key of class "hint" in a document: accepted, not followed, reported once.
struct HintNote {
  std::string pointer{};  ///< "/zero_optimization/overlap_comm"
  std::string given{};    ///< its value as JSON
  std::string instead{};  ///< Zeroth's own behaviour
  std::string origin{};   ///< "zero3.json:7"
  /// "/zero_optimization/overlap_comm = true (zero3.json:7): ..."
  [[nodiscard]] std::string text() const;
};

/// A value from outside the document, such as a command line. It wins over the document, also over "auto".
struct ConfigOverride {
  std::string pointer{};  ///< JSON pointer of the key
  std::string json{};     ///< the value as JSON: `3`, `"AdamW"`, `[0.9, 0.95]`
  std::string origin{};   ///< for messages: "--zero-stage"
};

/// One problem of a configuration.
struct ConfigProblem {
  std::string pointer{};  ///< JSON pointer of the key; empty for the document as a whole
  std::string origin{};   ///< "zero3.json:4"
  std::string what{};     ///< "unknown key"
  std::string expected{};
  std::string got{};
  std::string hint{};
  /// "zero3.json:4: /zero_optimization/stge: unknown key; hint: did you mean "stage"?"
  [[nodiscard]] std::string text() const;
};

/// kConfig with all problems. what() lists up to 50 of them and counts the rest.
class ConfigError : public Error {
 public:
  /// `total`: number of all problems, also of those that are not in the list.
  ConfigError(std::string_view origin, std::vector<ConfigProblem> problems, std::size_t total);
  [[nodiscard]] const std::vector<ConfigProblem>& problems() const noexcept { return problems_; }

 private:
  std::vector<ConfigProblem> problems_;
};

struct Config {
  std::optional<std::int64_t> train_batch_size{};
  std::optional<std::int64_t> train_micro_batch_size_per_gpu{};
  std::optional<std::int64_t> gradient_accumulation_steps{};
  std::optional<std::int64_t> data_parallel_size{};  ///< checked against the world by resolve()
  double gradient_clipping = 0.0;                    ///< bound of the global norm; 0 or absent: off (DeepSpeed: 1.0)
  bool bf16 = false;                                 ///< "bf16": {"enabled": ...}
  bool bf16_auto_cast = false;                       ///< "bf16": {"auto_cast": ...}
  LossScaling fp16{};                                ///< "fp16"
  bool fp16_auto_cast = false;                       ///< "fp16": {"auto_cast": ...}
  OptimizerConfig optimizer{};
  SchedulerConfig scheduler{};
  ZeroConfig zero{};
  UpdateConfig update{};
  MeshConfig mesh{};
  PipelineConfig pipeline{};
  ExpertsConfig experts{};
  OffloadConfig offload{};
  ActivationConfig activations{};
  BudgetConfig budget{};
  RuntimeConfig runtime{};
  std::vector<HintNote> hints{};  ///< in the order of the keys; not part of the comparison

  /// Reads a regular file of at most 16 MiB. Throws ConfigError.
  [[nodiscard]] static Config from_file(const std::filesystem::path& path,
                                        std::span<const ConfigOverride> overrides = {});
  /// `origin` names the source in messages. The text is strict JSON in UTF-8: no comments, no duplicate keys, nothing
  /// after the end; but Infinity and NaN are read, for hints. Throws ConfigError.
  [[nodiscard]] static Config from_json_text(std::string_view text, std::string_view origin,
                                             std::span<const ConfigOverride> overrides = {});

  /// To which floating-point inputs of a forward are cast; none: they stay as they are.
  [[nodiscard]] std::optional<DType> input_dtype() const;
  /// The whole configuration with defaults, keys sorted; from_json_text() of it gives an equal Config. Hints are left
  /// out. Throws kConfig for a value that is not finite.
  [[nodiscard]] std::string to_json() const;
  /// Checks a Config that a program filled in, by the rules for documents. Throws ConfigError.
  void validate() const;

  /// Completes the batch sizes for a world. Two of them give the third; one alone means one micro-step. All three must
  /// agree. Throws kConfig with the nearest sizes that agree.
  [[nodiscard]] BatchSizes resolve(std::int64_t data_ranks) const;
  /// The part of resolve() that needs no batch size. Throws kConfig if `data_parallel_size` is another number.
  void require_data_ranks(std::int64_t data_ranks) const;

  /// The keys that must be equal on all ranks, as canonical JSON: all honoured keys except timeouts, the execution
  /// mode, its seed and the memory limit.
  [[nodiscard]] std::string shared_json() const;
  /// digest64 of shared_json().
  [[nodiscard]] std::uint64_t digest() const;

  /// The origin of a value: "zero3.json:4", the origin of an override, or "default".
  [[nodiscard]] std::string origin_of(std::string_view pointer) const;
  /// One line per value, for the log: "/zero_optimization/stage = 3 (zero3.json:4)".
  [[nodiscard]] std::vector<std::string> describe() const;

  /// True for equal values; origins and hints are not compared.
  bool operator==(const Config& other) const;

 private:
  std::map<std::string, std::string, std::less<>> origins_{};
};

/// Differences between two shared_json() texts: "/zero_optimization/stage: 3 here, 2 there". For the error about ranks
/// with different configurations.
[[nodiscard]] std::vector<std::string> shared_differences(std::string_view here, std::string_view there);

}  // namespace zeroth
