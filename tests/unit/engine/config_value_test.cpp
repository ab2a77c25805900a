// Config as a value: round trips, what ranks must share, programs that fill it in, documents as people have
// them.
#include "engine/config/reference.h"
#include "unit/engine/config_test_support.h"

#include <zeroth/zero/message_reduction.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace zeroth::test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// Any double in [low, high], by bits: denormals and all exponents.
rc::Gen<double> any_double(double low, double high) {
  return rc::gen::suchThat(rc::gen::map(rc::gen::arbitrary<std::uint64_t>(),
                                        [=](std::uint64_t bits) {
                                          const double value = std::abs(std::bit_cast<double>(bits));
                                          return std::isfinite(value) ? std::fmod(value, high) : low;
                                        }),
                           [=](double value) { return value >= low && value <= high; });
}

std::int64_t any_int(std::int64_t low, std::int64_t high) {
  return *rc::gen::inRange(low, high + 1);
}

std::optional<std::int64_t> maybe_size() {
  return *rc::gen::arbitrary<bool>() ? std::optional(any_int(1, 2147483647)) : std::nullopt;
}

OptimizerConfig any_optimizer() {
  OptimizerConfig out;
  out.type =
      *rc::gen::element<std::string>("AdamW", "Adam", "SGD", "Lion", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam");
  out.lr = *any_double(0.0, 1e300);
  if (*rc::gen::arbitrary<bool>()) out.weight_decay = *any_double(0.0, 1e300);
  if (out.type == "SGD") {
    out.momentum = *any_double(1e-300, 1e10);
    out.nesterov = *rc::gen::arbitrary<bool>();
    if (!out.nesterov) out.dampening = *any_double(0.0, 1e10);
  } else {
    out.betas = {*any_double(0.0, 0.999999), *any_double(0.0, 0.999999)};
    if (out.type != "Lion") out.eps = *any_double(5e-324, 1.0);
    if (out.type == "Adam") out.adam_w_mode = *rc::gen::arbitrary<bool>();
    if (out.type == "OneBitAdam" || out.type == "OneBitLamb") {
      out.freeze_step = any_int(1, 2147483647);
      out.freeze_threshold = *any_double(0.0, 0.999999);
      std::vector<std::string> names = reduction_names();
      names.emplace_back("adaptive");
      out.compression.compression = *rc::gen::elementOf(names);
      if (out.compression.compression == "adaptive") out.compression.every = static_cast<int>(any_int(1, 1000));
      if (out.compression.compression == "top_k") out.compression.ratio = *any_double(5e-324, 1.0);
      if (out.compression.compression == "low_rank") out.compression.rank = static_cast<int>(any_int(1, 64));
    }
    if (out.type == "Lamb" || out.type == "OneBitLamb") {
      out.lamb.min_coeff = *any_double(0.0, 1.0);
      out.lamb.max_coeff = *any_double(1.0, 1e300);
      out.lamb.bias_correction = *rc::gen::arbitrary<bool>();
    }
    if (out.type == "OneBitLamb") {
      out.lamb.coeff_beta = *any_double(0.0, 0.999999);
      out.lamb.factor_min = *any_double(0.0, 1.0);
      out.lamb.factor_max = *any_double(1.0, 1e300);
      out.lamb.factor_threshold = *any_double(0.0, 0.999999);
    }
    if (out.type == "ZeroOneAdam") {
      out.zero_one = {.var_freeze_step = any_int(1, 2147483647),
                      .var_update_scaler = any_int(1, 2147483647),
                      .local_step_scaler = any_int(1, 2147483647),
                      .local_step_clipper = any_int(1, 2147483647)};
    }
  }
  return out;
}

SchedulerConfig any_scheduler() {
  SchedulerConfig out;
  out.type = *rc::gen::element<std::string>("", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR");
  if (out.type.empty()) return out;
  out.warmup_num_steps = any_int(0, 2147483647);
  out.warmup_type = *rc::gen::element<std::string>("log", "linear");
  if (out.type != "WarmupLR")
    out.total_num_steps = any_int(std::max<std::int64_t>(1, out.warmup_num_steps), 2147483647);
  if (out.type == "WarmupCosineLR") {
    out.warmup_min_ratio = *any_double(0.0, 1.0);
    out.cos_min_ratio = *any_double(0.0, 1.0);
  } else {
    out.warmup_max_lr = *any_double(5e-324, 1e300);
    out.warmup_min_lr = *any_double(0.0, out.warmup_max_lr);
  }
  return out;
}

/// Over how many ranks states are split, by one set of keys.
void set_degrees(ZeroConfig& zero) {
  const auto parameter = static_cast<int>(any_int(1, 4096));
  const auto optimizer = parameter * static_cast<int>(any_int(0, 16));
  zero.gradient_degree = *rc::gen::element(0, 1, parameter);
  switch (any_int(0, 4)) {
    case 0:
      return;
    case 1:
      if (zero.stage == 3) zero.hpz_partition_size = parameter;
      return;
    case 2:
      if (zero.stage == 3) zero.mics_shard_size = parameter;
      return;
    default:
      if (zero.stage == 3) zero.parameter_degree = parameter;
      if (zero.stage >= 1) zero.optimizer_degree = optimizer;
  }
}

/// Numbers in codes: not beside degrees, but for the group that hpZ names.
void set_codes(Config& out) {
  ZeroConfig& zero = out.zero;
  if (zero.mics_shard_size > 0 || zero.parameter_degree + zero.optimizer_degree + zero.gradient_degree > 0) return;
  zero.quantized_weights = zero.stage == 3 && *rc::gen::arbitrary<bool>();
  zero.quantized_gradients = *rc::gen::arbitrary<bool>();
  if (!zero.has_codes()) return;
  zero.code_block = *rc::gen::element(16, 64, 256, 1024);
  if (zero.hpz_partition_size == 1) zero.code_node_degree = static_cast<int>(any_int(0, 64));
  if (!zero.quantized_gradients) return;
  zero.code_bits = *rc::gen::element(4, 8);
  zero.code_feedback = !out.fp16.is_dynamic() && *rc::gen::arbitrary<bool>();
}

Config any_config() {
  Config out;
  out.train_batch_size = maybe_size();
  out.train_micro_batch_size_per_gpu = maybe_size();
  out.gradient_accumulation_steps = maybe_size();
  out.data_parallel_size = maybe_size();
  out.gradient_clipping = *any_double(0.0, 1e300);
  out.bf16 = *rc::gen::arbitrary<bool>();
  out.fp16 = {.enabled = !out.bf16 && *rc::gen::arbitrary<bool>(),
              .static_scale = *any_double(0.0, 1e300),
              .initial_power = static_cast<int>(any_int(0, 120)),
              .window = any_int(1, 1'000'000),
              .hysteresis = static_cast<int>(any_int(1, 100)),
              .consecutive_hysteresis = *rc::gen::arbitrary<bool>(),
              .min_scale = *any_double(1e-300, 1e300)};
  out.fp16.min_scale = std::min(out.fp16.min_scale, std::ldexp(1.0, out.fp16.initial_power));
  out.bf16_auto_cast = *rc::gen::arbitrary<bool>();
  out.fp16_auto_cast = *rc::gen::arbitrary<bool>();
  out.optimizer = any_optimizer();
  out.scheduler = any_scheduler();
  out.zero = {.stage = static_cast<int>(any_int(0, 3)),
              .reduction_policy = *rc::gen::element(ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep),
              .reshard = *rc::gen::element(Reshard::kDefault, Reshard::kAll, Reshard::kNone),
              .ring_slots = static_cast<int>(any_int(2, 4096)),
              .prefetch_units = static_cast<int>(any_int(0, 4096)),
              .narrow_buckets = *rc::gen::arbitrary<bool>()};
  set_degrees(out.zero);
  set_codes(out);
  out.runtime = {.threads = static_cast<int>(any_int(0, 4096)),
                 .ranks_per_node = static_cast<int>(any_int(0, 4096)),
                 .reduction = *rc::gen::element(Reduction::kRankOrder, Reduction::kTransport),
                 .check_calls = *rc::gen::arbitrary<bool>(),
                 .stragglers = static_cast<int>(any_int(0, 1000)),
                 .compare_replicas = *rc::gen::arbitrary<bool>(),
                 .link_bytes_per_s = any_int(0, std::int64_t{1} << 62),
                 .timeout_ms = any_int(1, 604'800'000),
                 .first_timeout_ms = any_int(0, 604'800'000),
                 .uneven = *rc::gen::element(Uneven::kError, Uneven::kDrop, Uneven::kJoin),
                 .preemption = *rc::gen::arbitrary<bool>(),
                 .frozen_after_ms = any_int(1, 604'800'000),
                 .end_stuck_after_ms = any_int(0, 604'800'000),
                 .max_nonfinite_steps = static_cast<int>(any_int(1, 2147483646)),
                 .broadcast_buffers = *rc::gen::arbitrary<bool>(),
                 .cast = *rc::gen::arbitrary<bool>(),
                 .compute_copies = *rc::gen::arbitrary<bool>(),
                 .execution = *rc::gen::element(ExecutionMode::kInline, ExecutionMode::kChaos),
                 .chaos_seed = any_int(0, std::numeric_limits<std::int64_t>::max() - 1),
                 .memory_limit_bytes = any_int(0, std::int64_t{1} << 62)};
  return out;
}

TEST(ConfigValue, AnyConfigComesBackFromItsJson) {
  EXPECT_TRUE(rc::check("to_json() and from_json_text() are inverse", [] {
    const Config config = any_config();
    config.validate();
    const std::string text = config.to_json();
    const Config back = read(text);
    RC_ASSERT(back == config);
    RC_ASSERT(back.to_json() == text);
    RC_ASSERT(back.digest() == config.digest());
    for (const HintNote& hint : back.hints) RC_ASSERT(hint.instead.starts_with("no effect: "));
    // Bit for bit, also through decimal text.
    RC_ASSERT(back.optimizer.lr == config.optimizer.lr);
    RC_ASSERT(back.optimizer.moments() == config.optimizer.moments());
    RC_ASSERT(back.optimizer.freeze_step == config.optimizer.freeze_step);
    RC_ASSERT(back.optimizer.freeze_threshold == config.optimizer.freeze_threshold);
    RC_ASSERT(back.optimizer.compression == config.optimizer.compression);
    RC_ASSERT(back.optimizer.lamb == config.optimizer.lamb);
    RC_ASSERT(back.optimizer.zero_one == config.optimizer.zero_one);
    RC_ASSERT(back.optimizer.decay() == config.optimizer.decay());
    RC_ASSERT(back.scheduler.warmup_max_lr == config.scheduler.warmup_max_lr);
    RC_ASSERT(back.runtime.chaos_seed == config.runtime.chaos_seed);
    RC_ASSERT(back.zero.reduction_policy == config.zero.reduction_policy);
  }));
}

TEST(ConfigValue, NoTextBreaksTheReader) {
  EXPECT_TRUE(rc::check("a damaged document is read or refused by ConfigError", [] {
    std::string text = any_config().to_json();
    const std::int64_t edits = any_int(1, 8);
    for (std::int64_t i = 0; i < edits; ++i) {
      const auto at = static_cast<std::size_t>(any_int(0, static_cast<std::int64_t>(text.size()) - 1));
      text[at] = *rc::gen::arbitrary<char>();
    }
    try {
      const Config config = read(text);
      RC_ASSERT(read(config.to_json()) == config);
    } catch (const ConfigError& error) {
      RC_ASSERT(!error.problems().empty());
    }
  }));
}

TEST(ConfigValue, TheDigestCoversWhatRanksMustShare) {
  const Config plain;
  std::vector<Config> differ(13);
  differ[0].zero.stage = 3;
  differ[1].optimizer.lr = std::nextafter(1e-3, 1.0);
  differ[2].bf16 = true;
  differ[3].train_batch_size = 8;
  differ[4].zero.reduction_policy = ReductionPolicy::kPerStep;
  differ[5].runtime.threads = 2;
  differ[6].zero.ring_slots = 3;
  differ[7].gradient_clipping = 1.0;
  differ[8].runtime.reduction = Reduction::kTransport;
  differ[9].runtime.check_calls = true;
  differ[10].runtime.uneven = Uneven::kJoin;
  differ[11].fp16.enabled = true;
  differ[12].runtime.cast = false;
  for (const Config& config : differ) {
    EXPECT_NE(config.digest(), plain.digest());
    EXPECT_EQ(shared_differences(plain.shared_json(), config.shared_json()).size(), 1U) << config.to_json();
  }
  Config local;
  local.runtime.timeout_ms = 5;
  local.runtime.first_timeout_ms = 5;
  local.runtime.frozen_after_ms = 5;
  local.runtime.end_stuck_after_ms = 5;
  local.runtime.execution = ExecutionMode::kChaos;
  local.runtime.chaos_seed = 9;
  local.runtime.memory_limit_bytes = 1000;
  EXPECT_EQ(local.digest(), plain.digest());
  EXPECT_FALSE(local == plain);
}

TEST(ConfigValue, DifferencesNameTheKeyAndBothValues) {
  Config here;
  here.zero.stage = 3;
  Config there;
  there.zero.stage = 2;
  there.train_batch_size = 8;
  EXPECT_THAT(shared_differences(here.shared_json(), there.shared_json()),
              ElementsAre("/zero_optimization/stage: 3 here, 2 there", "/train_batch_size: absent here, 8 there"));
  EXPECT_THAT(shared_differences(there.shared_json(), here.shared_json()),
              ElementsAre("/train_batch_size: 8 here, absent there", "/zero_optimization/stage: 2 here, 3 there"));
  EXPECT_THAT(shared_differences(here.shared_json(), here.shared_json()), IsEmpty());
  EXPECT_THROW(static_cast<void>(shared_differences(here.shared_json(), "\xff{")), Error);
}

TEST(ConfigValue, AProgramsConfigIsHeldToTheSameRules) {
  Config config;
  config.optimizer.type = "SGD";
  EXPECT_NO_THROW(config.validate());
  EXPECT_EQ(config.optimizer.decay(), 0.0);
  config.optimizer.betas = {0.5, 0.5};
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.optimizer.momentum = 0.9;
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.optimizer.lr = -1.0;
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.optimizer.type = "Lion";
  EXPECT_NO_THROW(config.validate());
  EXPECT_EQ(config.optimizer.moments(), (std::array{0.9, 0.99}));
  config.optimizer.eps = 1e-6;
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.optimizer.type = "Muon";
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.offload.optimizer_device = "nvme";
  config.offload.ratio_from = "planned";
  EXPECT_NO_THROW(config.validate());
  config.offload.ratio = 0.5;
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.zero.stage = 4;
  EXPECT_THROW(config.validate(), ConfigError);
  config = {};
  config.train_batch_size = 0;
  EXPECT_THROW(config.validate(), ConfigError);
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    config = {};
    config.gradient_clipping = value;
    EXPECT_THROW(config.validate(), Error);
    config = {};
    config.optimizer.betas = {0.9, value};
    EXPECT_THROW(config.validate(), Error);
  }
}

TEST(ConfigValue, DescribesEachValueWithItsOrigin) {
  const Config config = read("{\"optimizer\": {\n\"type\": \"SGD\"}}");
  const std::vector<std::string> lines = config.describe();
  EXPECT_THAT(lines, Contains("/optimizer/type = \"SGD\" (test.json:2)"));
  EXPECT_THAT(lines, Contains("/optimizer/params/weight_decay = 0.0 (default)"));
  EXPECT_THAT(lines, Not(Contains(HasSubstr("betas"))));
}

std::vector<std::string> hint_pointers(const Config& config) {
  std::vector<std::string> out;
  for (const HintNote& note : config.hints) out.push_back(note.pointer);
  return out;
}

TEST(ConfigSamples, ZeroThreeForAFineTuning) {
  const Config config = read(R"({
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0, "steps_per_print": 2000, "wall_clock_breakdown": false,
    "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 1000,
      "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {
      "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
      "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5,
      "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
      "stage3_gather_16bit_weights_on_model_save": true,
      "offload_optimizer": {"device": "none", "pin_memory": true}, "offload_param": {"device": "none"}},
    "zero_allow_untested_optimizer": true})");
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_TRUE(config.bf16);
  EXPECT_EQ(config.resolve(2), (BatchSizes{32, 4, 4}));
  EXPECT_EQ(config.optimizer.betas, (std::array{0.8, 0.999}));
  EXPECT_EQ(config.scheduler.warmup_num_steps, 500);
  EXPECT_EQ(config.hints.size(), 13U);
  EXPECT_THAT(hint_pointers(config), Contains("/zero_optimization/overlap_comm"));
}

TEST(ConfigSamples, ZeroTwoWithDiagnostics) {
  const Config config = read(R"({
    "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "prescale_gradients": false,
    "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 200000000,
      "overlap_comm": false, "reduce_scatter": true, "reduce_bucket_size": 200000000, "round_robin_gradients": true,
      "cpu_offload": false},
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7,
      "torch_adam": false, "adam_w_mode": true}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_min_lr": 0,
      "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "flops_profiler": {"enabled": true, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": true},
    "comms_logger": {"enabled": true, "verbose": false, "prof_all": true, "debug": false},
    "activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false,
      "contiguous_memory_optimization": false, "number_checkpoints": null,
      "synchronize_checkpoint_boundary": false, "profile": false},
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": false, "overlap_events": true},
    "tensorboard": {"enabled": false, "output_path": "logs/", "job_name": "train"},
    "wandb": {"enabled": false}, "csv_monitor": {"enabled": false},
    "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
    "checkpoint": {"tag_validation": "Warn", "load_universal": false, "use_node_local_storage": false},
    "elasticity": {"enabled": false, "max_train_batch_size": 2000}, "data_efficiency": {"enabled": false},
    "tensor_parallel": {"autotp_size": 0}, "compile": {"deepcompile": false}})");
  EXPECT_EQ(config.zero.stage, 2);
  EXPECT_EQ(config.optimizer.rule(), "AdamW");
  EXPECT_EQ(config.scheduler.total_num_steps, 5000);
  EXPECT_EQ(config.resolve(4).train, 32);
}

/// What DeepSpeedPlugin() of accelerate 1.15 makes, as Python's json module writes it, after the batch sizes are filled
/// in; with HfDeepSpeedConfig of transformers and without.
TEST(ConfigSamples, AccelerateWritesNullsAndInfinity) {
  const Config config = read(R"({
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": null},
      "offload_param": {"device": "none", "nvme_path": null}, "stage3_gather_16bit_weights_on_model_save": false},
    "gradient_clipping": 1.0, "steps_per_print": Infinity, "fp16": {"enabled": true, "auto_cast": true},
    "bf16": {"enabled": false}, "zero_allow_untested_optimizer": true})");
  EXPECT_EQ(config.zero.stage, 2);
  EXPECT_EQ(config.input_dtype(), DType::kFloat16);
  EXPECT_EQ(config.origin_of("/zero_optimization/offload_param/nvme_path"), "default");
  EXPECT_THAT(hint_pointers(config), Contains("/steps_per_print"));
  EXPECT_EQ(config.hints[0].text(),
            "/steps_per_print = Infinity (test.json:5): the program prints what StepResult holds");
  const Config file = read(R"({
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "nvme_path": "none"},
      "offload_param": {"device": "none", "nvme_path": "none"}, "reduce_bucket_size": 4096,
      "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-05,
      "total_num_steps": 10, "warmup_num_steps": 1}},
    "communication_data_type": "fp32", "train_micro_batch_size_per_gpu": 1, "steps_per_print": Infinity,
    "checkpoint": {"use_node_local_storage": true}})");
  EXPECT_EQ(file.offload.optimizer_device, "cpu");
}

TEST(ConfigValue, InputsAreCastWhereTheirDtypeIsEnabled) {
  EXPECT_EQ(read(R"({"bf16": {"enabled": true, "auto_cast": true}})").input_dtype(), DType::kBFloat16);
  EXPECT_EQ(read(R"({"bf16": {"enabled": true}, "fp16": {"auto_cast": true}})").input_dtype(), std::nullopt);
  EXPECT_EQ(read(R"({"bf16": {"auto_cast": true}})").input_dtype(), std::nullopt);
}

TEST(ConfigSamples, AnAutoDocumentListsWhatToFillIn) {
  const std::string text = R"({
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"})";
  EXPECT_EQ(problems_of(text).size(), 9U);
  for (const ConfigProblem& problem : problems_of(text)) EXPECT_EQ(problem.what, "\"auto\" is left over");
}

TEST(ConfigSamples, AnOffloadDocumentIsRefusedByName) {
  const std::vector<ConfigProblem> problems = problems_of(R"({
    "train_batch_size": 8, "amp": {"enabled": true},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
      "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}, "zero_quantized_nontrainable_weights": true}})");
  std::vector<std::string> pointers;
  for (const ConfigProblem& problem : problems) {
    pointers.push_back(problem.pointer);
    EXPECT_EQ(problem.what, "Zeroth cannot do this");
  }
  EXPECT_THAT(pointers,
              ::testing::UnorderedElementsAre("/amp", "/zero_optimization/zero_quantized_nontrainable_weights"));
}

TEST(ConfigReference, ListsEveryKeyOnce) {
  const std::string page = config::reference_markdown();
  EXPECT_THAT(page, HasSubstr("| `zero_optimization.stage` | an integer from 0 to 3 | `0` | yes |"));
  EXPECT_THAT(page, HasSubstr("| `zero_optimization.overlap_comm` | `null` | On the CPU"));
  EXPECT_THAT(page, HasSubstr("| `amp` | \"enabled\": false |"));
  const std::size_t at = page.find("```json");
  ASSERT_NE(at, std::string::npos);
  const std::size_t begin = page.find('{', at);
  const Config sample = read(page.substr(begin, page.find("```", begin) - begin));
  EXPECT_EQ(sample.zero.stage, 3);
}

}  // namespace
}  // namespace zeroth::test
