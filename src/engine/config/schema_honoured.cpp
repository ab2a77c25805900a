#include "engine/config/schema.h"

#include <zeroth/base/error.h>

#include <array>
#include <string>
#include <type_traits>
#include <vector>

namespace zeroth::config {
namespace {

/// schedule_names(true) of the room program.
constexpr std::string_view kScheduleNames = "gpipe|1f1b|interleaved|zb-h1|zb-h2|zb-v|v-half|v-min|dualpipev|ouroboros";

constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;
constexpr std::int64_t kMaxMilliseconds = std::int64_t{7} * 24 * 3600 * 1000;

// Names of the enumerators, in the order of their values; the same lists are the choices of the rows.
template <class E>
constexpr std::string_view kEnumNames = "";
template <>
constexpr std::string_view kEnumNames<ReductionPolicy> = "per_micro_step|per_step";
template <>
constexpr std::string_view kEnumNames<Reduction> = "rank_order|transport";
template <>
constexpr std::string_view kEnumNames<Reshard> = "default|all|none";
template <>
constexpr std::string_view kEnumNames<Uneven> = "error|drop|join";
template <>
constexpr std::string_view kEnumNames<ExecutionMode> = "inline|chaos";
static_assert(static_cast<int>(ReductionPolicy::kPerMicroStep) == 0 &&
              static_cast<int>(ReductionPolicy::kPerStep) == 1);
static_assert(static_cast<int>(Reduction::kRankOrder) == 0 && static_cast<int>(Reduction::kTransport) == 1);
static_assert(static_cast<int>(Reshard::kDefault) == 0 && static_cast<int>(Reshard::kAll) == 1 &&
              static_cast<int>(Reshard::kNone) == 2);
static_assert(static_cast<int>(Uneven::kError) == 0 && static_cast<int>(Uneven::kDrop) == 1 &&
              static_cast<int>(Uneven::kJoin) == 2);
static_assert(static_cast<int>(ExecutionMode::kInline) == 0 && static_cast<int>(ExecutionMode::kChaos) == 1);

template <class T>
void assign(T& field, const Json& value) {
  if constexpr (std::is_enum_v<T>) {
    const std::vector<std::string> names = split_list(kEnumNames<T>);
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (value == names[i]) field = static_cast<T>(i);
    }
  } else {
    field = value.get<T>();
  }
}
template <class T>
void assign(std::optional<T>& field, const Json& value) {
  field = value.get<T>();
}

template <class T>
Json to_value(const T& field) {
  if constexpr (std::is_enum_v<T>) {
    const std::vector<std::string> names = split_list(kEnumNames<T>);
    const auto index = static_cast<std::size_t>(field);
    // Also of what only a program can write: ExecutionMode::kDevice.
    ZR_CHECK(index < names.size(), ErrorCode::kConfig, "a field has a value that no configuration file can name",
             {.where = "config", .expected = std::string(kEnumNames<T>), .got = std::to_string(index)});
    return names[index];
  } else {
    return field;
  }
}
template <class T>
Json to_value(const std::optional<T>& field) {
  return field ? Json(*field) : Json();
}

// A path of members serves both directions; write may be replaced where absence has a meaning.
template <auto... Path>
constexpr KeySpec bind(KeySpec key) {
  key.read = [](Config& config, const Json& value) { assign((config.*....*Path), value); };
  if (key.write == nullptr) key.write = [](const Config& config) { return to_value((config.*....*Path)); };
  return key;
}

constexpr bool (*kAdam)(const Config&) = [](const Config& c) {
  return c.optimizer.type == "AdamW" || c.optimizer.type == "Adam";
};
constexpr bool (*kFreezes)(const Config&) = [](const Config& c) {
  return c.optimizer.type == "OneBitAdam" || c.optimizer.type == "OneBitLamb";
};
constexpr bool (*kTopK)(const Config&) = [](const Config& c) {
  return kFreezes(c) && c.optimizer.compression.compression == "top_k";
};
constexpr bool (*kAdaptive)(const Config&) = [](const Config& c) {
  return kFreezes(c) && c.optimizer.compression.compression == "adaptive";
};
constexpr bool (*kLowRank)(const Config&) = [](const Config& c) {
  return kFreezes(c) && c.optimizer.compression.compression == "low_rank";
};
constexpr bool (*kLamb)(const Config&) = [](const Config& c) {
  return c.optimizer.type == "Lamb" || c.optimizer.type == "OneBitLamb";
};
constexpr bool (*kOneBitLamb)(const Config&) = [](const Config& c) { return c.optimizer.type == "OneBitLamb"; };
constexpr bool (*kZeroOneAdam)(const Config&) = [](const Config& c) { return c.optimizer.type == "ZeroOneAdam"; };
constexpr bool (*kWithEps)(const Config&) = [](const Config& c) {
  return c.optimizer.type != "SGD" && c.optimizer.type != "Lion";
};
constexpr bool (*kWithBetas)(const Config&) = [](const Config& c) { return c.optimizer.type != "SGD"; };
constexpr bool (*kSgd)(const Config&) = [](const Config& c) { return c.optimizer.type == "SGD"; };
constexpr bool (*kScheduled)(const Config&) = [](const Config& c) { return !c.scheduler.type.empty(); };
constexpr bool (*kCosine)(const Config&) = [](const Config& c) { return c.scheduler.type == "WarmupCosineLR"; };
constexpr bool (*kTotal)(const Config&) = [](const Config& c) {
  return c.scheduler.type == "WarmupCosineLR" || c.scheduler.type == "WarmupDecayLR";
};
constexpr bool (*kAbsoluteRates)(const Config&) = [](const Config& c) {
  return c.scheduler.type == "WarmupLR" || c.scheduler.type == "WarmupDecayLR";
};

// Values that ask for nothing may be anywhere.
constexpr bool (*kCorrected)(const Config&) = [](const Config& c) {
  return kLamb(c) || c.optimizer.lamb.bias_correction;
};
constexpr bool (*kHpz)(const Config&) = [](const Config& c) {
  return c.zero.stage == 3 || c.zero.hpz_partition_size == 1;
};
constexpr bool (*kMics)(const Config&) = [](const Config& c) {
  return c.zero.stage == 3 || c.zero.mics_shard_size == -1;
};
constexpr bool (*kQuantizedWeights)(const Config&) = [](const Config& c) {
  return c.zero.stage == 3 || !c.zero.quantized_weights;
};
constexpr bool (*kCodes)(const Config&) = [](const Config& c) { return c.zero.has_codes(); };
constexpr bool (*kGradientCodes)(const Config&) = [](const Config& c) { return c.zero.quantized_gradients; };
constexpr std::string_view kFreezesText = "optimizers OneBitAdam and OneBitLamb";
constexpr std::string_view kCodesText = "zero_quantized_weights and zero_quantized_gradients";
constexpr bool (*kShardedParameters)(const Config&) = [](const Config& c) {
  return c.zero.stage == 3 || c.zero.parameter_degree == 0;
};
constexpr bool (*kShardedOptimizer)(const Config&) = [](const Config& c) {
  return c.zero.stage >= 1 || c.zero.optimizer_degree == 0;
};

constexpr Bounds kNotNegative{.low = 0.0};
constexpr Bounds kPositive{.low = 0.0, .low_open = true};
constexpr Bounds kRatio{.low = 0.0, .high = 1.0};
constexpr Bounds kBelowOne{.low = 0.0, .high = 1.0, .high_open = true};

constexpr std::array kKeys{
    bind<&Config::train_batch_size>(
        {.pointer = "/train_batch_size",
         .kind = KeyKind::kInteger,
         .text = "Sequences per step over all ranks. Two of the three batch keys give the third; one alone means "
                 "one micro-step; given together they must satisfy train = micro x accumulation x data ranks.",
         .lowest = 1}),
    bind<&Config::train_micro_batch_size_per_gpu>({.pointer = "/train_micro_batch_size_per_gpu",
                                                   .kind = KeyKind::kInteger,
                                                   .text = "Sequences per rank and micro-step.",
                                                   .lowest = 1}),
    bind<&Config::gradient_accumulation_steps>({.pointer = "/gradient_accumulation_steps",
                                                .kind = KeyKind::kInteger,
                                                .text = "Micro-steps per step.",
                                                .lowest = 1}),
    bind<&Config::data_parallel_size>(
        {.pointer = "/data_parallel_size",
         .kind = KeyKind::kInteger,
         .text = "The number of data ranks that the document was written for; another world is an error.",
         .lowest = 1}),
    bind<&Config::gradient_clipping>(
        {.pointer = "/gradient_clipping",
         .kind = KeyKind::kNumber,
         .text = "Bound of the global gradient norm. Absent or 0 means off, and the log says so; DeepSpeed "
                 "clips at 1.0 when the key is absent.",
         .default_text = "off",
         .bounds = kNotNegative}),
    bind<&Config::bf16>({.pointer = "/bf16/enabled",
                         .text = "Compute in bfloat16; masters, accumulation and reduction stay fp32. The "
                                 "section may also be called `bfloat16`."}),
    bind<&Config::bf16_auto_cast>(
        {.pointer = "/bf16/auto_cast", .text = "As `fp16.auto_cast`, to bfloat16. DeepSpeed has no such key."}),

    bind<&Config::fp16, &LossScaling::enabled>(
        {.pointer = "/fp16/enabled",
         .text = "Compute in float16, under a loss scale; masters, accumulation and reduction stay fp32."}),
    bind<&Config::fp16_auto_cast>({.pointer = "/fp16/auto_cast",
                                   .text = "Floating-point inputs of the model's forward are cast to float16, where "
                                           "`fp16.enabled` is true. Of a pipeline: those of each micro-batch, without "
                                           "the labels of a list of layers."}),
    bind<&Config::fp16, &LossScaling::static_scale>({.pointer = "/fp16/loss_scale",
                                                     .kind = KeyKind::kNumber,
                                                     .text = "A loss scale that stays; 0: one that adapts.",
                                                     .default_text = "0 (adapts)",
                                                     .bounds = kNotNegative}),
    bind<&Config::fp16, &LossScaling::initial_power>({.pointer = "/fp16/initial_scale_power",
                                                      .kind = KeyKind::kInteger,
                                                      .text = "The first scale is 2 to this power.",
                                                      .lowest = 0,
                                                      .highest = 120}),
    bind<&Config::fp16, &LossScaling::window>(
        {.pointer = "/fp16/loss_scale_window",
         .kind = KeyKind::kInteger,
         .text = "The scale doubles at a step without overflow that follows so many others, as in DeepSpeed.",
         .lowest = 1}),
    bind<&Config::fp16, &LossScaling::hysteresis>({.pointer = "/fp16/hysteresis",
                                                   .kind = KeyKind::kInteger,
                                                   .text = "Overflows until the scale halves.",
                                                   .lowest = 1,
                                                   .highest = kMaxInt}),
    bind<&Config::fp16, &LossScaling::consecutive_hysteresis>(
        {.pointer = "/fp16/consecutive_hysteresis",
         .text = "A step without overflow restores the hysteresis; false: only the growth of the scale does."}),
    bind<&Config::fp16, &LossScaling::min_scale>(
        {.pointer = "/fp16/min_loss_scale",
         .kind = KeyKind::kNumber,
         .text = "The smallest scale. A step that overflows there ends the training, with the parameter's name.",
         .bounds = kPositive}),

    bind<&Config::optimizer, &OptimizerConfig::type>(
        {.pointer = "/optimizer/type",
         .kind = KeyKind::kChoice,
         .text = "The optimizer. As in DeepSpeed, Adam means decoupled weight decay unless `adam_w_mode` is "
                 "false: the rule of AdamW, with a `weight_decay` of 0 unless it is given. The log says so once.",
         .choices = "AdamW|Adam|SGD|Lion|Lamb|OneBitAdam|OneBitLamb|ZeroOneAdam",
         .elsewhere = "Adagrad|Muon|MuAdam|MuAdamW|MuSGD",
         .choice_aliases = "FusedAdam=Adam|CPUAdam=Adam|DeepSpeedCPUAdam=Adam|FusedLion=Lion|CPULion=Lion|"
                           "DeepSpeedCPULion=Lion|FusedLamb=Lamb"}),
    bind<&Config::optimizer, &OptimizerConfig::lr>(
        {.pointer = "/optimizer/params/lr",
         .kind = KeyKind::kNumber,
         .text = "Learning rate. WarmupLR and WarmupDecayLR put `warmup_max_lr` in its place.",
         .bounds = kNotNegative}),
    bind<&Config::optimizer, &OptimizerConfig::betas>(
        {.pointer = "/optimizer/params/betas",
         .kind = KeyKind::kNumberPair,
         .text = "Decay rates of the two moments; of Lion those of the momentum in the sign and of the momentum kept.",
         .default_text = "[0.9, 0.99] (Lion), [0.9, 0.999] (the others)",
         .bounds = kBelowOne,
         .applies = kWithBetas,
         .applies_text = "optimizers other than SGD",
         .write = [](const Config& c) { return Json(c.optimizer.moments()); }}),
    bind<&Config::optimizer, &OptimizerConfig::eps>({.pointer = "/optimizer/params/eps",
                                                     .kind = KeyKind::kNumber,
                                                     .text = "Added to the root of the second moment.",
                                                     .bounds = kPositive,
                                                     .applies = kWithEps,
                                                     .applies_text = "optimizers other than SGD and Lion"}),
    bind<&Config::optimizer, &OptimizerConfig::weight_decay>(
        {.pointer = "/optimizer/params/weight_decay",
         .kind = KeyKind::kNumber,
         .text = "Weight decay. The default is torch's; DeepSpeed's fused optimizers take 0 for AdamW too.",
         .default_text = "0.01 (AdamW), 0 (the others)",
         .bounds = kNotNegative,
         .write = [](const Config& c) { return Json(c.optimizer.decay()); }}),
    bind<&Config::optimizer, &OptimizerConfig::adam_w_mode>(
        {.pointer = "/optimizer/params/adam_w_mode",
         .text = "Decay the weights (true) or add the decay to the gradient (false, with type Adam only: AdamW decays "
                 "the weights, as in DeepSpeed).",
         .applies = kAdam,
         .applies_text = "optimizers AdamW and Adam"}),
    bind<&Config::optimizer, &OptimizerConfig::momentum>({.pointer = "/optimizer/params/momentum",
                                                          .kind = KeyKind::kNumber,
                                                          .text = "Momentum.",
                                                          .bounds = kNotNegative,
                                                          .applies = kSgd,
                                                          .applies_text = "optimizer SGD"}),
    bind<&Config::optimizer, &OptimizerConfig::dampening>({.pointer = "/optimizer/params/dampening",
                                                           .kind = KeyKind::kNumber,
                                                           .text = "Dampening of the momentum.",
                                                           .applies = kSgd,
                                                           .applies_text = "optimizer SGD"}),
    bind<&Config::optimizer, &OptimizerConfig::nesterov>(
        {.pointer = "/optimizer/params/nesterov",
         .text = "Nesterov momentum; needs momentum above 0 and no dampening.",
         .applies = kSgd,
         .applies_text = "optimizer SGD"}),
    bind<&Config::optimizer, &OptimizerConfig::freeze_step>(
        {.pointer = "/optimizer/params/freeze_step",
         .kind = KeyKind::kInteger,
         .text = "Steps of AdamW, or Lamb, with gradients. After them variances are frozen, and ranks exchange their "
                 "momenta in the form of `compression`.",
         .lowest = 1,
         .applies = kFreezes,
         .applies_text = kFreezesText}),
    bind<&Config::optimizer, &OptimizerConfig::freeze_threshold>(
        {.pointer = "/optimizer/params/freeze_threshold",
         .kind = KeyKind::kNumber,
         .text = "Variances are frozen before `freeze_step` once they have settled: their sum is at least this part of "
                 "what it was 1/(1 - beta2) steps before, or the reverse, after the warmup of the scheduler. 0: never "
                 "before; 0.96 is usual.",
         .bounds = kBelowOne,
         .applies = kFreezes,
         .applies_text = kFreezesText}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::max_coeff>(
        {.pointer = "/optimizer/params/max_coeff",
         .kind = KeyKind::kNumber,
         .text = "The largest trust ratio: norm of a parameter by norm of its direction.",
         .bounds = kPositive,
         .applies = kLamb,
         .applies_text = "optimizers Lamb and OneBitLamb"}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::min_coeff>(
        {.pointer = "/optimizer/params/min_coeff",
         .kind = KeyKind::kNumber,
         .text = "The smallest trust ratio.",
         .bounds = kNotNegative,
         .applies = kLamb,
         .applies_text = "optimizers Lamb and OneBitLamb"}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::bias_correction>(
        {.pointer = "/optimizer/params/bias_correction",
         .text = "Both moments are divided by what their decay rates have left out, as in the paper. The others always "
                 "do it.",
         .applies = kCorrected,
         .applies_text = "optimizers Lamb and OneBitLamb",
         .write = [](const Config& c) { return kLamb(c) ? Json(c.optimizer.lamb.bias_correction) : Json(); }}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::coeff_beta>(
        {.pointer = "/optimizer/params/coeff_beta",
         .kind = KeyKind::kNumber,
         .text = "Decay rate of the mean of trust ratios, which is frozen with the variances.",
         .bounds = kBelowOne,
         .applies = kOneBitLamb,
         .applies_text = "optimizer OneBitLamb"}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::factor_max>(
        {.pointer = "/optimizer/params/factor_max",
         .kind = KeyKind::kNumber,
         .text = "The largest factor on a frozen trust ratio.",
         .bounds = kPositive,
         .applies = kOneBitLamb,
         .applies_text = "optimizer OneBitLamb"}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::factor_min>(
        {.pointer = "/optimizer/params/factor_min",
         .kind = KeyKind::kNumber,
         .text = "The smallest factor on a frozen trust ratio.",
         .bounds = kNotNegative,
         .applies = kOneBitLamb,
         .applies_text = "optimizer OneBitLamb"}),
    bind<&Config::optimizer, &OptimizerConfig::lamb, &LambOptions::factor_threshold>(
        {.pointer = "/optimizer/params/factor_threshold",
         .kind = KeyKind::kNumber,
         .text = "By how much of itself the factor may change in a step.",
         .bounds = kBelowOne,
         .applies = kOneBitLamb,
         .applies_text = "optimizer OneBitLamb"}),
    bind<&Config::optimizer, &OptimizerConfig::zero_one, &ZeroOneOptions::var_freeze_step>(
        {.pointer = "/optimizer/params/var_freeze_step",
         .kind = KeyKind::kInteger,
         .text = "Steps until variances are frozen.",
         .lowest = 1,
         .applies = kZeroOneAdam,
         .applies_text = "optimizer ZeroOneAdam"}),
    bind<&Config::optimizer, &OptimizerConfig::zero_one, &ZeroOneOptions::var_update_scaler>(
        {.pointer = "/optimizer/params/var_update_scaler",
         .kind = KeyKind::kInteger,
         .text = "Updates of the variances until the interval between them doubles.",
         .lowest = 1,
         .applies = kZeroOneAdam,
         .applies_text = "optimizer ZeroOneAdam"}),
    bind<&Config::optimizer, &OptimizerConfig::zero_one, &ZeroOneOptions::local_step_scaler>(
        {.pointer = "/optimizer/params/local_step_scaler",
         .kind = KeyKind::kInteger,
         .text = "After var_freeze_step: steps until the interval between synchronisations doubles.",
         .lowest = 1,
         .applies = kZeroOneAdam,
         .applies_text = "optimizer ZeroOneAdam"}),
    bind<&Config::optimizer, &OptimizerConfig::zero_one, &ZeroOneOptions::local_step_clipper>(
        {.pointer = "/optimizer/params/local_step_clipper",
         .kind = KeyKind::kInteger,
         .text = "After var_freeze_step: the longest interval between synchronisations.",
         .lowest = 1,
         .applies = kZeroOneAdam,
         .applies_text = "optimizer ZeroOneAdam"}),

    bind<&Config::optimizer, &OptimizerConfig::compression, &CompressionOptions::compression>(
        {.pointer = "/optimizer/params/compression",
         .kind = KeyKind::kChoice,
         .text = "What the messages are after `freeze_step` (APMSqueeze): signs, codes of 8 or 4 bits, the greatest "
                 "elements, products of thin matrices, or, to compare with, `exact`; `adaptive` chooses signs or codes "
                 "for each unit (L-GreCo).",
         .choices = "one_bit|exact|int8|int4|fp8|fp4|top_k|low_rank|adaptive",
         .applies = kFreezes,
         .applies_text = kFreezesText}),
    bind<&Config::optimizer, &OptimizerConfig::compression, &CompressionOptions::ratio>(
        {.pointer = "/optimizer/params/compression_ratio",
         .kind = KeyKind::kNumber,
         .text = "The share of a parameter's elements that travels, at least one element.",
         .bounds = {.low = 0.0, .high = 1.0, .low_open = true},
         .applies = kTopK,
         .applies_text = "compression top_k"}),
    bind<&Config::optimizer, &OptimizerConfig::compression, &CompressionOptions::every>(
        {.pointer = "/optimizer/params/compression_every",
         .kind = KeyKind::kInteger,
         .text =
             "Steps from one choice to the next. A run that goes on from a step that this does not divide has other "
             "bits than one that was not stopped.",
         .lowest = 1,
         .applies = kAdaptive,
         .applies_text = "compression adaptive"}),
    bind<&Config::optimizer, &OptimizerConfig::compression, &CompressionOptions::rank>(
        {.pointer = "/optimizer/params/compression_rank",
         .kind = KeyKind::kInteger,
         .text = "Columns of the two factors of a matrix.",
         .lowest = 1,
         .highest = 64,
         .applies = kLowRank,
         .applies_text = "compression low_rank"}),
    bind<&Config::scheduler, &SchedulerConfig::type>(
        {.pointer = "/scheduler/type",
         .kind = KeyKind::kChoice,
         .text = "The schedule of the learning rate; absent means constant.",
         .default_text = "constant",
         .choices = "WarmupLR|WarmupDecayLR|WarmupCosineLR",
         .elsewhere = "LRRangeTest|OneCycle",
         .write = [](const Config& c) { return c.scheduler.type.empty() ? Json() : Json(c.scheduler.type); }}),
    bind<&Config::scheduler, &SchedulerConfig::warmup_min_lr>(
        {.pointer = "/scheduler/params/warmup_min_lr",
         .kind = KeyKind::kNumber,
         .text = "Learning rate at the first step.",
         .bounds = kNotNegative,
         .applies = kAbsoluteRates,
         .applies_text = "schedulers WarmupLR and WarmupDecayLR"}),
    bind<&Config::scheduler, &SchedulerConfig::warmup_max_lr>(
        {.pointer = "/scheduler/params/warmup_max_lr",
         .kind = KeyKind::kNumber,
         .text = "Learning rate after the warmup, in place of the optimizer's.",
         .bounds = kPositive,
         .applies = kAbsoluteRates,
         .applies_text = "schedulers WarmupLR and WarmupDecayLR"}),
    bind<&Config::scheduler, &SchedulerConfig::warmup_num_steps>({.pointer = "/scheduler/params/warmup_num_steps",
                                                                  .kind = KeyKind::kInteger,
                                                                  .text = "Steps of the warmup.",
                                                                  .highest = kMaxInt,
                                                                  .applies = kScheduled,
                                                                  .applies_text = "a scheduler with a type"}),
    bind<&Config::scheduler, &SchedulerConfig::warmup_type>({.pointer = "/scheduler/params/warmup_type",
                                                             .kind = KeyKind::kChoice,
                                                             .text = "Shape of the warmup.",
                                                             .choices = "log|linear",
                                                             .applies = kScheduled,
                                                             .applies_text = "a scheduler with a type"}),
    bind<&Config::scheduler, &SchedulerConfig::total_num_steps>(
        {.pointer = "/scheduler/params/total_num_steps",
         .kind = KeyKind::kInteger,
         .text = "Steps until the rate is at its end; required, and not below `warmup_num_steps`.",
         .default_text = "required",
         .lowest = 1,
         .highest = kMaxInt,
         .applies = kTotal,
         .applies_text = "schedulers WarmupDecayLR and WarmupCosineLR"}),
    bind<&Config::scheduler, &SchedulerConfig::warmup_min_ratio>(
        {.pointer = "/scheduler/params/warmup_min_ratio",
         .kind = KeyKind::kNumber,
         .text = "Rate at the first step as a part of the optimizer's.",
         .bounds = kRatio,
         .applies = kCosine,
         .applies_text = "scheduler WarmupCosineLR"}),
    bind<&Config::scheduler, &SchedulerConfig::cos_min_ratio>(
        {.pointer = "/scheduler/params/cos_min_ratio",
         .kind = KeyKind::kNumber,
         .text = "Rate at the last step as a part of the optimizer's.",
         .bounds = kRatio,
         .applies = kCosine,
         .applies_text = "scheduler WarmupCosineLR"}),

    bind<&Config::zero, &ZeroConfig::stage>(
        {.pointer = "/zero_optimization/stage",
         .kind = KeyKind::kInteger,
         .text = "What ranks share out: nothing (0), optimizer state (1), also gradients (2), also "
                 "parameters (3). Changes memory and traffic, never a number.",
         .highest = 3}),
    bind<&Config::zero, &ZeroConfig::hpz_partition_size>(
        {.pointer = "/zero_optimization/zero_hpz_partition_size",
         .kind = KeyKind::kInteger,
         .text = "Parameters are gathered inside groups of so many consecutive ranks, say those of a node; 1 "
                 "means off. The optimizer stays "
                 "split over all ranks, which send each other updated parameters once a step. ZeRO++ keeps a "
                 "second shard for backward; "
                 "here the group's is the only one, and forward gathers it too.",
         .lowest = 1,
         .applies = kHpz,
         .applies_text = "ZeRO stage 3"}),
    bind<&Config::zero, &ZeroConfig::quantized_weights>(
        {.pointer = "/zero_optimization/zero_quantized_weights",
         .text = "Matrices are gathered as codes of 8 bits with a scale for each block (qwZ): a lossy method, half the "
                 "bytes of bf16. With `zero_hpz_partition_size` each group keeps what it has gathered, and further "
                 "gathers of a step stay inside it. Masters and checkpoints are exact.",
         .applies = kQuantizedWeights,
         .applies_text = "ZeRO stage 3"}),
    bind<&Config::zero, &ZeroConfig::quantized_gradients>(
        {.pointer = "/zero_optimization/zero_quantized_gradients",
         .text = "Gradients of matrices are summed from codes of `zeroth.codes.gradient_bits` bits (qgZ): a lossy "
                 "method, at every stage with the same bits. With `zero_hpz_partition_size` each group sums among "
                 "itself first, and its sums travel in codes, too. With `zeroth.gradient_degree` groups sum without "
                 "codes, and what groups exchange once a step travels in codes."}),
    bind<&Config::zero, &ZeroConfig::code_bits>({.pointer = "/zeroth/codes/gradient_bits",
                                                 .kind = KeyKind::kInteger,
                                                 .text = "Bits of a code of a gradient: 4 or 8.",
                                                 .lowest = 4,
                                                 .highest = 8,
                                                 .applies = kGradientCodes,
                                                 .applies_text = "zero_quantized_gradients"}),
    bind<&Config::zero, &ZeroConfig::code_feedback>(
        {.pointer = "/zeroth/codes/feedback",
         .text = "What codes of gradients miss is kept, 4 bytes an element on every rank, and added to the next ones "
                 "(LoCo). Not beside a loss scale that adapts.",
         .applies = kGradientCodes,
         .applies_text = "zero_quantized_gradients"}),
    bind<&Config::zero, &ZeroConfig::code_node_degree>(
        {.pointer = "/zeroth/codes/node_degree",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks that sum among themselves before their sums travel, and keep gathered parameters "
                 "together; 0: `zero_hpz_partition_size`.",
         .applies = kCodes,
         .applies_text = kCodesText}),
    bind<&Config::zero, &ZeroConfig::code_block>({.pointer = "/zeroth/codes/block",
                                                  .kind = KeyKind::kInteger,
                                                  .text = "Elements that share a scale: 16, 32, 64, ... or 1024.",
                                                  .lowest = 16,
                                                  .highest = 1024,
                                                  .applies = kCodes,
                                                  .applies_text = kCodesText}),
    bind<&Config::zero, &ZeroConfig::mics_shard_size>(
        {.pointer = "/zero_optimization/mics_shard_size",
         .kind = KeyKind::kInteger,
         .text = "Parameters and optimizer are split inside groups of so many consecutive ranks, and each group "
                 "has all of them (MiCS; HSDP "
                 "is the same); -1 means off. `zero_hpz_partition_size` takes less memory and no more traffic.",
         .lowest = -1,
         .applies = kMics,
         .applies_text = "ZeRO stage 3"}),
    bind<&Config::zero, &ZeroConfig::parameter_degree>(
        {.pointer = "/zeroth/parameter_degree",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks over which stage 3 splits parameters; each such group has all of them "
                 "and gathers among itself. 0: all "
                 "ranks. Changes memory and traffic, never a number.",
         .applies = kShardedParameters,
         .applies_text = "ZeRO stage 3"}),
    bind<&Config::zero, &ZeroConfig::optimizer_degree>(
        {.pointer = "/zeroth/optimizer_degree",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks over which optimizer state is split, a multiple of `parameter_degree`; "
                 "each such group makes the whole "
                 "update. 0: all ranks. Changes memory and traffic, never a number.",
         .applies = kShardedOptimizer,
         .applies_text = "ZeRO stages 1 to 3"}),
    bind<&Config::zero, &ZeroConfig::gradient_degree>(
        {.pointer = "/zeroth/gradient_degree",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks over which the gradients of a micro-step are summed; the sums of these groups are "
                 "added once a step. "
                 "With groups that are nodes, micro-steps send nothing between nodes. 0: all ranks. Part of the "
                 "numbers, like "
                 "`reduction_policy`."}),
    bind<&Config::zero, &ZeroConfig::reduction_policy>(
        {.pointer = "/zeroth/reduction_policy",
         .kind = KeyKind::kChoice,
         .text = "When gradients are summed over ranks while micro-steps accumulate. Part of the numbers.",
         .choices = kEnumNames<ReductionPolicy>}),
    bind<&Config::zero, &ZeroConfig::reshard>(
        {.pointer = "/zeroth/reshard",
         .kind = KeyKind::kChoice,
         .text = "Stage 3: which units give their gathered parameters back after forward. `default` keeps the "
                 "last repeated unit and all units that are not repeated until backward has used them.",
         .choices = kEnumNames<Reshard>}),
    bind<&Config::zero, &ZeroConfig::ring_slots>(
        {.pointer = "/zeroth/ring_slots",
         .kind = KeyKind::kInteger,
         .text = "Slots that the repeated units share for gradient buckets, so that a unit need not wait until all "
                 "ranks have "
                 "taken the gradients of the one after it; and at most as many for gathered parameters.",
         .lowest = 2,
         .highest = 4096}),
    bind<&Config::zero, &ZeroConfig::prefetch_units>({.pointer = "/zeroth/prefetch_units",
                                                      .kind = KeyKind::kInteger,
                                                      .text = "Units gathered ahead, each in a slot of its own, where "
                                                              "the device works asynchronously; on the CPU none are.",
                                                      .highest = 4096}),
    bind<&Config::zero, &ZeroConfig::narrow_buckets>(
        {.pointer = "/zeroth/narrow_buckets",
         .text = "Gradients of 16-bit matrices lie in the buckets of repeated units, and travel, as they were "
                 "computed; sums are "
                 "fp32, with the same bits. One that comes in fp32 all the same (a sum of several uses) takes memory "
                 "beyond the "
                 "plan, and a warning names the first one. false plans for fp32."}),

    bind<&Config::mesh, &MeshConfig::pp>({.pointer = "/zeroth/mesh/pp",
                                          .kind = KeyKind::kInteger,
                                          .text = "Stages of a pipeline: ranks with other layers of the model, which "
                                                  "zeroth.pipeline() cuts.",
                                          .lowest = 1}),
    bind<&Config::mesh, &MeshConfig::dp>({.pointer = "/zeroth/mesh/dp",
                                          .kind = KeyKind::kInteger,
                                          .text = "Ranks with batches of their own; 0: all that the others leave. The "
                                                  "mesh's axes are pp, dp, ep, rows, sp, tp, from outer to inner."}),
    bind<&Config::mesh, &MeshConfig::ep>(
        {.pointer = "/zeroth/mesh/ep",
         .kind = KeyKind::kInteger,
         .text = "Ranks with batches of their own, as along `dp`, and with other experts: a token travels to the ranks "
                 "of its experts. Experts are sharded over dp and sp, all else over ep, too. Not beside `rows`.",
         .lowest = 1}),
    bind<&Config::mesh, &MeshConfig::rows>(
        {.pointer = "/zeroth/mesh/rows",
         .kind = KeyKind::kInteger,
         .text =
             "Consecutive ranks that share each image, along its height; the engine splits a convolutional model as "
             "by zeroth.parallel.split_images(). Parameters are sharded over dp and rows. Not beside `pp`, `sp` and "
             "`tp`.",
         .lowest = 1}),
    bind<&Config::mesh, &MeshConfig::sp>(
        {.pointer = "/zeroth/mesh/sp",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks (with `tp`: every tp-th) that share each sequence; zeroth.parallelize() splits the "
                 "model's attention. Parameters are sharded over dp and sp.",
         .lowest = 1}),
    bind<&Config::mesh, &MeshConfig::tp>(
        {.pointer = "/zeroth/mesh/tp",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks that share the matrices of each layer, 0 as 1; zeroth.parallelize() splits them."}),
    bind<&Config::mesh, &MeshConfig::method>(
        {.pointer = "/zeroth/sequence/method",
         .kind = KeyKind::kChoice,
         .text = "How attention goes over the ranks of sp: an exchange of heads (at most as many ranks as heads), a "
                 "ring, or a grid of both, Ulysses inside.",
         .choices = "ulysses|ring|grid"}),
    bind<&Config::mesh, &MeshConfig::ulysses>(
        {.pointer = "/zeroth/sequence/ulysses",
         .kind = KeyKind::kInteger,
         .text = "Ranks inside of a grid, a divisor of sp; 0: the largest below sp. Only for method grid."}),
    bind<&Config::mesh, &MeshConfig::order>(
        {.pointer = "/zeroth/sequence/order",
         .kind = KeyKind::kChoice,
         .text = "What goes around a ring: keys and values, or with token the queries and their results "
                 "(TokenRing). Only for methods ring and grid.",
         .choices = "ring|token"}),
    bind<&Config::mesh, &MeshConfig::norms>(
        {.pointer = "/zeroth/tensor/norms",
         .kind = KeyKind::kChoice,
         .text = "split: between the layers that tp ranks share, norms, dropouts and residual sums work on slices of "
                 "the sequence; the bytes on the wire stay the same.",
         .choices = "whole|split"}),
    bind<&Config::experts, &ExpertsConfig::over>(
        {.pointer = "/zeroth/experts/over",
         .kind = KeyKind::kChoice,
         .text = "Axes of the mesh along which ranks own other experts. Over tp a rank sends its share of the tokens, "
                 "which tp ranks have alike, so that rows on the wire and copies of experts are divided by tp.",
         .choices = "ep|ep,tp|ep,sp|ep,sp,tp"}),
    bind<&Config::experts, &ExpertsConfig::meet>(
        {.pointer = "/zeroth/experts/meet",
         .kind = KeyKind::kChoice,
         .text = "Where tokens and experts meet: rows of tokens travel to the owners of experts; or copies of the "
                 "chosen experts travel to the tokens; or balance: copies only where they lower the greatest number "
                 "of rows that a rank computes.",
         .choices = "experts|tokens|balance"}),
    bind<&Config::experts, &ExpertsConfig::copies>(
        {.pointer = "/zeroth/experts/copies",
         .kind = KeyKind::kInteger,
         .text = "Most experts of other ranks that a rank holds of a layer, from its forward to its backward. Only for "
                 "meet tokens and balance.",
         .highest = std::int64_t{1} << 20U}),
    bind<&Config::experts, &ExpertsConfig::pieces>(
        {.pointer = "/zeroth/experts/pieces",
         .kind = KeyKind::kInteger,
         .text = "Runs of a rank's experts: rows of the next run travel while one is computed. 0: of 1, 2 and 4 the "
                 "quickest, measured. Never changes a number.",
         .highest = 64}),
    bind<&Config::experts, &ExpertsConfig::two_hops>(
        {.pointer = "/zeroth/experts/two_hops",
         .text = "Rows travel to a rank of the own node first, then to the other node: fewer and larger messages "
                 "between nodes. Needs as many ranks on each node. Never changes a number."}),
    bind<&Config::mesh, &MeshConfig::verify>(
        {.pointer = "/zeroth/parallel/verify",
         .kind = KeyKind::kChoice,
         .text =
             "Whether the first forward compares what tp, sp or ep split of a model with the whole: untested, where it "
             "has code of no family that the tests cover; always; or never. Changes no number.",
         .choices = "untested|always|never"}),
    bind<&Config::offload, &OffloadConfig::optimizer_device>(
        {.pointer = "/zero_optimization/offload_optimizer/device",
         .kind = KeyKind::kChoice,
         .text = "Where optimizer states and masters rest, at every stage: `nvme` is files, of which a few blocks at a "
                 "time visit memory; `cpu` is host memory, which ranks of a CPU have anyway. Never changes a number.",
         .choices = "none|cpu|nvme"}),
    bind<&Config::offload, &OffloadConfig::nvme_path>(
        {.pointer = "/zero_optimization/offload_optimizer/nvme_path",
         .kind = KeyKind::kText,
         .text =
             "Folder of the files, which have no names and leave nothing behind; several, one a disk, are separated "
             "by `:`, and every block lies on all of them.",
         .shared = false}),
    bind<&Config::offload, &OffloadConfig::buffer_count>(
        {.pointer = "/zero_optimization/offload_optimizer/buffer_count",
         .kind = KeyKind::kInteger,
         .text = "Blocks of files in memory at once: one is updated, the others are read ahead or written behind.",
         .lowest = 2,
         .highest = 4096}),
    bind<&Config::offload, &OffloadConfig::ratio>(
        {.pointer = "/zero_optimization/offload_optimizer/ratio",
         .kind = KeyKind::kNumber,
         .text = "Share of the optimizer states that rest in files; the others stay in memory (Twin-Flow).",
         .bounds = {.low = 0.0, .high = 1.0}}),
    bind<&Config::offload, &OffloadConfig::parameter_device>(
        {.pointer = "/zero_optimization/offload_param/device",
         .kind = KeyKind::kChoice,
         .text = "Where parameters rest, at every stage: `nvme` is files, from which a unit's come for each use, read "
                 "ahead in the order of the step before; `cpu` is host memory, which ranks of a CPU have anyway. Never "
                 "changes a number.",
         .choices = "none|cpu|nvme"}),
    bind<&Config::offload, &OffloadConfig::parameter_nvme_path>(
        {.pointer = "/zero_optimization/offload_param/nvme_path",
         .kind = KeyKind::kText,
         .text = "Folders of their files, as the optimizer's; without it: the same.",
         .shared = false}),
    bind<&Config::offload, &OffloadConfig::max_in_cpu>(
        {.pointer = "/zero_optimization/offload_param/max_in_cpu",
         .kind = KeyKind::kInteger,
         .text = "Elements of parameters in files that a rank has in memory at once, gathered ones not counted: "
                 "whole blocks, and no more than there are. Must have room for the largest unit; 0: for the four "
                 "largest.",
         .lowest = 0,
         .highest = std::numeric_limits<std::int64_t>::max()}),
    bind<&Config::offload, &OffloadConfig::ratio_from>(
        {.pointer = "/zeroth/offload/ratio",
         .kind = KeyKind::kChoice,
         .text = "Where the share of the states in files comes from: `given`, offload_optimizer.ratio; `planned`, the "
                 "engine measures files and updates for at most about a second when it is made, and keeps in memory "
                 "what makes the update fastest within `memory_limit_bytes` and `budget` (without a limit: half of "
                 "the memory that is free). Never changes a number.",
         .choices = "given|planned",
         .applies = [](const Config& config) { return config.offload.optimizer_device == "nvme"; },
         .applies_text = "offload_optimizer.device nvme"}),
    bind<&Config::offload, &OffloadConfig::cache_blocks>(
        {.pointer = "/zeroth/offload/cache_blocks",
         .kind = KeyKind::kInteger,
         .text = "Blocks of files that stay in memory from step to step, beside buffer_count; the others pass by.",
         .highest = std::int64_t{1} << 20U,
         .applies = [](const Config& config) { return config.offload.optimizer_device == "nvme"; },
         .applies_text = "offload_optimizer.device nvme"}),
    bind<&Config::offload, &OffloadConfig::gradients>(
        {.pointer = "/zeroth/offload/gradients",
         .kind = KeyKind::kChoice,
         .text = "Where reduced gradients rest: `host` is host memory, to which they cross from a GPU as soon as they "
                 "are summed; ranks of a CPU have it anyway. Never changes a number.",
         .choices = "device|host"}),
    bind<&Config::budget, &BudgetConfig::device_bytes>(
        {.pointer = "/zeroth/budget/device_bytes",
         .kind = KeyKind::kInteger,
         .text =
             "Most bytes of a rank's states that rest where they are updated; 0: no limit. A plan that goes over it "
             "is refused before anything is allocated, with a table.",
         .highest = kMaxBytes}),
    bind<&Config::budget, &BudgetConfig::host_bytes>(
        {.pointer = "/zeroth/budget/host_bytes",
         .kind = KeyKind::kInteger,
         .text = "Most bytes of a rank's states in host memory outside of the device, with blocks on their way and "
                 "caches; 0: no limit.",
         .highest = kMaxBytes}),
    bind<&Config::budget, &BudgetConfig::file_bytes>(
        {.pointer = "/zeroth/budget/file_bytes",
         .kind = KeyKind::kInteger,
         .text = "Most bytes of a rank's states in files; 0: no limit but the space that is free in each folder.",
         .highest = kMaxBytes}),
    bind<&Config::offload, &OffloadConfig::block_elements>(
        {.pointer = "/zeroth/offload/block_elements",
         .kind = KeyKind::kInteger,
         .text = "Elements whose states are one block, a multiple of 1024.",
         .default_text = "2^18, or 2^20 beside a device with memory of its own",
         .lowest = 1024,
         .highest = std::int64_t{1} << 30U}),
    bind<&Config::offload, &OffloadConfig::io>(
        {.pointer = "/zeroth/offload/io",
         .kind = KeyKind::kChoice,
         .text = "What moves bytes of files; `probe` takes the first that writes and reads right here.",
         .choices = "probe|io_uring|aio|threads",
         .shared = false}),
    bind<&Config::offload, &OffloadConfig::direct>(
        {.pointer = "/zeroth/offload/direct",
         .text = "Files pass the page cache (O_DIRECT) where the file system can do it; false: through the cache.",
         .shared = false}),
    bind<&Config::offload, &OffloadConfig::queue_depth>({.pointer = "/aio/queue_depth",
                                                         .kind = KeyKind::kInteger,
                                                         .text = "Transfers to files that a rank has at once.",
                                                         .lowest = 1,
                                                         .highest = 4096,
                                                         .shared = false}),
    bind<&Config::offload, &OffloadConfig::stripe_bytes>(
        {.pointer = "/aio/block_size",
         .kind = KeyKind::kInteger,
         .text =
             "Bytes of one transfer, and of the part of a block that a folder gets in its turn; a multiple of 4096.",
         .lowest = 4096,
         .highest = std::int64_t{1} << 30U,
         .shared = false}),
    bind<&Config::activations, &ActivationConfig::cpu_checkpointing>(
        {.pointer = "/activation_checkpointing/cpu_checkpointing",
         .text = "As `zeroth.activations.device` `cpu`, unless that names files."}),
    bind<&Config::activations, &ActivationConfig::device>(
        {.pointer = "/zeroth/activations/device",
         .kind = KeyKind::kChoice,
         .text = "Where tensors rest that autograd saves for backward: `nvme` is files; `cpu` is host memory, which "
                 "tensors of a CPU have anyway. Never changes a number.",
         .choices = "none|cpu|nvme"}),
    bind<&Config::activations, &ActivationConfig::nvme_path>(
        {.pointer = "/zeroth/activations/nvme_path",
         .kind = KeyKind::kText,
         .text =
             "Folder of the files, which have no names and leave nothing behind; several, one a disk, are separated "
             "by `:`.",
         .shared = false}),
    bind<&Config::activations, &ActivationConfig::saved>(
        {.pointer = "/zeroth/activations/saved",
         .kind = KeyKind::kChoice,
         .text = "Which tensors: inputs of functions under torch.utils.checkpoint (gradient checkpointing), or all "
                 "that the forward of the model saves.",
         .choices = "checkpoints|all"}),
    bind<&Config::activations, &ActivationConfig::choice>(
        {.pointer = "/zeroth/activations/choice",
         .kind = KeyKind::kChoice,
         .text = "`given`: `saved` says what moves, and the program what is computed again. `planned`: the engine "
                 "measures two steps, and then keeps, recomputes or moves what each unit saved, the same on all ranks, "
                 "as is fastest within `memory_bytes`; only `zeroth` in Python, and no pipeline.",
         .choices = "given|planned"}),
    bind<&Config::activations, &ActivationConfig::memory_bytes>(
        {.pointer = "/zeroth/activations/memory_bytes",
         .kind = KeyKind::kInteger,
         .text = "Where the choice is planned: most bytes of a rank that units keep in memory between forward and "
                 "backward; 0: half of the memory that is free, over the ranks of the host.",
         .highest = kMaxBytes}),
    bind<&Config::activations, &ActivationConfig::min_bytes>({.pointer = "/zeroth/activations/min_bytes",
                                                              .kind = KeyKind::kInteger,
                                                              .text = "Smaller tensors stay in memory.",
                                                              .highest = kMaxBytes,
                                                              .shared = false}),
    bind<&Config::activations, &ActivationConfig::prefetch>(
        {.pointer = "/zeroth/activations/prefetch",
         .kind = KeyKind::kInteger,
         .text = "Saved tensors that backward reads ahead of the one that it needs.",
         .highest = 4096,
         .shared = false}),
    bind<&Config::activations, &ActivationConfig::buffer_bytes>(
        {.pointer = "/zeroth/activations/buffer_bytes",
         .kind = KeyKind::kInteger,
         .text = "Memory for saved tensors on their way to files and back, at least two transfers (`aio.block_size`).",
         .lowest = 8192,
         .highest = kMaxBytes,
         .shared = false}),
    bind<&Config::update, &UpdateConfig::inside_backward>(
        {.pointer = "/zeroth/update/inside_backward",
         .text = "A unit is updated inside the last backward of a step, when all ranks have its last gradients; false: "
                 "after the vote. The same bits. A step that would have been skipped ends the training once a unit was "
                 "updated. Not with gradient_clipping by the exact norm, nor with a loss scale that adapts."}),
    bind<&Config::update, &UpdateConfig::clip_by>(
        {.pointer = "/zeroth/update/clip_by",
         .kind = KeyKind::kChoice,
         .text = "The norm that gradient_clipping looks at: of the step itself, or of the last committed step, which "
                 "is known before the backward. The first step is clipped by its own. Part of the numbers.",
         .choices = "exact_norm|previous_norm"}),
    bind<&Config::update, &UpdateConfig::delayed_after>(
        {.pointer = "/zeroth/update/delayed_after",
         .kind = KeyKind::kInteger,
         .text = "Delayed updates (DPU): after so many steps, the update of a step runs inside the last backward of "
                 "the next one, which computes on the parameters before it. Absent: never. Part of the numbers.",
         .default_text = "never"}),
    bind<&Config::update, &UpdateConfig::round_sums>(
        {.pointer = "/zeroth/update/round_sums",
         .text = "Sums of gradients of bfloat16 parameters are rounded to bfloat16 before the update, wherever states "
                 "rest. On a GPU whose optimizer rests in host memory or files, half as many bytes of gradients cross "
                 "the bus. Part of the numbers."}),
    bind<&Config::pipeline, &PipelineConfig::schedule>(
        {.pointer = "/zeroth/pipeline/schedule",
         .kind = KeyKind::kChoice,
         .text = "The order of forwards and backwards of micro-batches, whose number is gradient_accumulation_steps. "
                 "`zeroth schedule NAME` shows it. `ouroboros` is inexact: stages use gradients of earlier steps, and "
                 "wait for no backward. Part of the numbers.",
         .choices = kScheduleNames}),
    bind<&Config::pipeline, &PipelineConfig::chunks>(
        {.pointer = "/zeroth/pipeline/chunks",
         .kind = KeyKind::kInteger,
         .text = "Chunks of layers on each stage; 0: as few as the schedule needs.",
         .highest = 4096}),
    bind<&Config::pipeline, &PipelineConfig::split>(
        {.pointer = "/zeroth/pipeline/split",
         .kind = KeyKind::kChoice,
         .text = "How the model's layers become chunks: `balanced` (parameters, and the work of the head), "
                 "`parameters`, `uniform`, or, where zeroth.pipeline() is given a `sample`, `time` and `memory`, which "
                 "rank 0 measures. zeroth.pipeline(split=...) takes names of layers and `type:CLASS`, too.",
         .choices = "balanced|parameters|uniform|time|memory",
         .choice_aliases = "best=balanced"}),
    bind<&Config::pipeline, &PipelineConfig::scatter>(
        {.pointer = "/zeroth/pipeline/scatter",
         .text =
             "Ranks of `tp`, which have the same values, each send a slice of them to the next stage, where they are "
             "gathered. For stages on different nodes; with tensor.norms=whole."}),
    bind<&Config::pipeline, &PipelineConfig::unshard>(
        {.pointer = "/zeroth/pipeline/unshard",
         .kind = KeyKind::kChoice,
         .text = "ZeRO stage 3: a stage gathers its parameters for each micro-batch anew, or once a step.",
         .choices = "micro_batch|step"}),
    bind<&Config::pipeline, &PipelineConfig::vocabulary>(
        {.pointer = "/zeroth/pipeline/vocabulary",
         .kind = KeyKind::kChoice,
         .text = "The model's head, a linear layer before a cross entropy: `whole` on the last stage, or rows of it on "
                 "every stage. `two_barriers`: the gradient of its input is summed after that of its rows; "
                 "`one_barrier`: before, so that backwards begin earlier, with one more product of the head's size.",
         .choices = "whole|two_barriers|one_barrier"}),
    bind<&Config::pipeline, &PipelineConfig::recompute>(
        {.pointer = "/zeroth/pipeline/recompute",
         .text = "From its forward to its backward a chunk keeps its input alone, and its forward runs again before "
                 "its backward comes: RECOMPUTE in the program. The same bits; more time, fewer activations."}),
    bind<&Config::pipeline, &PipelineConfig::checkpoint_interval>(
        {.pointer = "/pipeline/activation_checkpoint_interval",
         .kind = KeyKind::kInteger,
         .text = "So many layers of a `zeroth.pipe.PipelineModule` are recomputed together, in the place of its own "
                 "argument; 0: as the module says. For any other model more than 0 means "
                 "`zeroth.pipeline.recompute`.",
         .highest = 4096}),
    bind<&Config::runtime, &RuntimeConfig::threads>(
        {.pointer = "/zeroth/threads",
         .kind = KeyKind::kInteger,
         .text = "Threads of the CPU kernels per rank; 0 shares the cores of the host out among its ranks.",
         .highest = 4096}),
    bind<&Config::runtime, &RuntimeConfig::ranks_per_node>(
        {.pointer = "/zeroth/ranks_per_node",
         .kind = KeyKind::kInteger,
         .text = "Consecutive ranks that count as one node; 0: the ranks of each host where there are several, else "
                 "all. Sums are formed inside each node first, then over the "
                 "nodes: the same bits wherever the ranks run. What crosses between nodes is counted apart, also on "
                 "one host.",
         .highest = 4096}),
    bind<&Config::runtime, &RuntimeConfig::reduction>(
        {.pointer = "/zeroth/reduction",
         .kind = KeyKind::kChoice,
         .text = "Who forms sums over ranks. `rank_order`: Zeroth, in rank order along the nodes, with the same bits "
                 "over every transport. "
                 "`transport`: over `mpi`, MPI's own calls; with more than 8 ranks sums are in an order of MPI's, and "
                 "stages, sizes and MPI's "
                 "parameters change bits. Refused where the transport has none. Part of the numbers.",
         .choices = kEnumNames<Reduction>}),
    bind<&Config::runtime, &RuntimeConfig::check_calls>(
        {.pointer = "/zeroth/check_calls",
         .text = "To find a rank that takes another path, where `reduction` is `transport`: all ranks compare each "
                 "call before they make it, "
                 "which costs two rounds of small messages. In `rank_order` they always do."}),
    bind<&Config::runtime, &RuntimeConfig::stragglers>(
        {.pointer = "/zeroth/gradient_code/stragglers",
         .kind = KeyKind::kInteger,
         .text = "Gradient coding: each stragglers + 1 ranks have the same stragglers + 1 micro-batches "
                 "(`gradient_accumulation_steps`), and a step needs one of them. The others may be late: they leave "
                 "out the rest of the step. ZeRO stages 0 to 2; the gradient is the same, whoever is late. 0: a step "
                 "needs all ranks.",
         .lowest = 0}),
    bind<&Config::runtime, &RuntimeConfig::compare_replicas>(
        {.pointer = "/zeroth/compare_replicas",
         .text = "To find memory, a kernel or a program that changes one rank's copy: after each update ranks compare "
                 "digests of the parameters and states that several of them have. A difference is an error that names "
                 "the first parameter. It reads all of these states. The numbers are the same."}),
    bind<&Config::runtime, &RuntimeConfig::link_bytes_per_s>(
        {.pointer = "/zeroth/link_bytes_per_s",
         .kind = KeyKind::kInteger,
         .text = "For experiments on one machine: each rank's link to other nodes carries so many bytes a second, by "
                 "waiting. 0: as it is. "
                 "The numbers are the same.",
         .highest = kMaxBytes,
         .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::timeout_ms>({.pointer = "/zeroth/timeout_ms",
                                                        .kind = KeyKind::kInteger,
                                                        .text =
                                                            "Milliseconds that a rank waits for a peer that is alive. "
                                                            "After 10 s, or a quarter of it, a line says who is "
                                                            "missing and where that rank is.",
                                                        .lowest = 1,
                                                        .highest = kMaxMilliseconds,
                                                        .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::first_timeout_ms>(
        {.pointer = "/zeroth/first_timeout_ms",
         .kind = KeyKind::kInteger,
         .text =
             "The same until the first step has ended, while everything is slow, and for ranks that have not met. 0: "
             "twice `timeout_ms`; ranks then meet in `timeout_ms`.",
         .highest = kMaxMilliseconds,
         .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::frozen_after_ms>(
        {.pointer = "/zeroth/frozen_after_ms",
         .kind = KeyKind::kInteger,
         .text = "Milliseconds without a sign of life after which a peer that others wait for counts as frozen. Signs "
                 "come from a thread of their "
                 "own, so a rank that computes, sleeps or holds Python's lock gives them; one that a debugger has "
                 "stopped does not. Above "
                 "`timeout_ms` it has no effect.",
         .lowest = 1,
         .highest = kMaxMilliseconds,
         .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::end_stuck_after_ms>(
        {.pointer = "/zeroth/end_stuck_after_ms",
         .kind = KeyKind::kInteger,
         .text = "Where a job of several processes has failed: milliseconds until a process that sleeps, spins or "
                 "hangs in code of its own, and so "
                 "does not come to the call that would throw the error, writes it and ends. 0: never; so it is in an "
                 "interactive Python, too.",
         .highest = kMaxMilliseconds,
         .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::preemption>(
        {.pointer = "/zeroth/preemption",
         .text = "The first SIGTERM does not end the process: at the next step all ranks agree that the job was asked "
                 "to make room, and "
                 "`result.preempted` says so. Save and end with exit code 75 then. A second SIGTERM, more than a "
                 "second later, ends the process."}),
    bind<&Config::runtime, &RuntimeConfig::uneven>(
        {.pointer = "/zeroth/uneven",
         .kind = KeyKind::kChoice,
         .text = "Where ranks run out of batches at different times, in loops over `engine.batches(loader)`. `error`: "
                 "an error on all ranks "
                 "that names them. `drop`: all end with the first. `join`: ranks without a batch take part with weight "
                 "zero until nobody "
                 "has one; each step's gradient is the mean over the batches that there are. Not beside ep.",
         .choices = kEnumNames<Uneven>}),
    bind<&Config::runtime, &RuntimeConfig::max_nonfinite_steps>(
        {.pointer = "/zeroth/max_nonfinite_steps",
         .kind = KeyKind::kInteger,
         .text = "Steps in a row that may be skipped for a non-finite gradient before training stops.",
         .lowest = 1}),
    bind<&Config::runtime, &RuntimeConfig::broadcast_buffers>(
        {.pointer = "/zeroth/broadcast_buffers",
         .text =
             "Before each forward in training every rank takes rank 0's buffers, and after each step those that "
             "changed, if the model has running statistics: so exports and evaluations do not depend on the rank."}),
    bind<&Config::runtime, &RuntimeConfig::cast>(
        {.pointer = "/zeroth/cast",
         .text = "A model in float32 takes the dtype that `bf16.enabled` or `fp16.enabled` names, with its persistent "
                 "buffers; other buffers keep their dtype. False: such a model is an error."}),
    bind<&Config::runtime, &RuntimeConfig::compute_copies>(
        {.pointer = "/zeroth/compute_copies",
         .text = "Units compute with copies of the parameters, as they always do on a GPU: on the CPU it takes memory "
                 "and time "
                 "and shows that nothing else differs. The numbers are the same.",
         .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::execution>(
        {.pointer = "/zeroth/execution",
         .kind = KeyKind::kChoice,
         .text = "`inline`: work runs on the caller's thread. `chaos`: in a seeded legal order with delays, "
                 "to find missing synchronisation. The numbers are the same.",
         .choices = kEnumNames<ExecutionMode>,
         .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::chaos_seed>({.pointer = "/zeroth/chaos_seed",
                                                        .kind = KeyKind::kInteger,
                                                        .text = "Seed of the chaos mode.",
                                                        .highest = std::numeric_limits<std::int64_t>::max(),
                                                        .shared = false}),
    bind<&Config::runtime, &RuntimeConfig::memory_limit_bytes>(
        {.pointer = "/zeroth/memory_limit_bytes",
         .kind = KeyKind::kInteger,
         .text = "Bytes that the plans of all ranks of a host may take; a plan above it is an error before "
                 "the run. 0 takes what the host and its cgroup have.",
         .highest = kMaxBytes,
         .shared = false}),
};

}  // namespace

std::span<const KeySpec> honoured_keys() {
  return kKeys;
}

}  // namespace zeroth::config
