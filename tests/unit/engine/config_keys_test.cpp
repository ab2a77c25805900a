// Every key of the schema: what it reads, what it refuses, that it comes back from to_json().
#include "engine/config/schema.h"
#include "unit/engine/config_test_support.h"

#include <zeroth/engine/param_axes.h>
#include <zeroth/engine/settings.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

namespace zeroth::test {
namespace {

using config::Json;
using config::KeyKind;
using config::KeySpec;
using ::testing::HasSubstr;

struct Good {
  std::string json{};
  std::function<bool(const Config&)> reads{};
};

struct KeyCase {
  std::string pointer{};
  std::string beside{};  ///< JSON object that the key needs around it
  std::vector<Good> good{};
  std::vector<std::string> bad{};
};

const std::string kAdam = R"({"optimizer": {"type": "Adam"}})";
const std::string kLamb = R"({"optimizer": {"type": "Lamb"}})";
const std::string kOneBitLamb = R"({"optimizer": {"type": "OneBitLamb"}})";
const std::string kZeroOne = R"({"optimizer": {"type": "ZeroOneAdam"}})";
const std::string kSgd = R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}})";
const std::string kWarmup = R"({"scheduler": {"type": "WarmupLR"}})";
const std::string kCosine =
    R"({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 90}}})";
const std::string kStage3 = R"({"zero_optimization": {"stage": 3}})";
const std::string kQuantized = R"({"zero_optimization": {"zero_quantized_gradients": true}})";
const std::vector<std::string> kNotInteger{"\"3\"", "true", "1.5", "[]", "{}", "1e30", "99999999999999999999", "-1"};
const std::vector<std::string> kNotNumber{"\"3\"", "true", "[]", "{}"};
const std::vector<std::string> kNotFlag{"\"true\"", "1", "0", "[]", "{}"};

std::vector<std::string> operator+(std::vector<std::string> list, const std::vector<std::string>& more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

std::vector<KeyCase> cases() {
  return {
      {"/train_batch_size",
       "{}",
       {{"8", [](auto& c) { return c.train_batch_size == 8; }},
        {"8.0", [](auto& c) { return c.train_batch_size == 8; }},
        {"2147483647", [](auto& c) { return c.train_batch_size == 2147483647; }},
        {"null", [](auto& c) { return !c.train_batch_size; }}},
       kNotInteger + std::vector<std::string>{"0", "2147483648"}},
      {"/train_micro_batch_size_per_gpu",
       "{}",
       {{"2", [](auto& c) { return c.train_micro_batch_size_per_gpu == 2; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/gradient_accumulation_steps",
       "{}",
       {{"3", [](auto& c) { return c.gradient_accumulation_steps == 3; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/data_parallel_size",
       "{}",
       {{"5", [](auto& c) { return c.data_parallel_size == 5; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/gradient_clipping",
       "{}",
       {{"0", [](auto& c) { return c.gradient_clipping == 0.0; }},
        {"1", [](auto& c) { return c.gradient_clipping == 1.0; }},
        {"0.25", [](auto& c) { return c.gradient_clipping == 0.25; }},
        {"null", [](auto& c) { return c.gradient_clipping == 0.0; }}},
       kNotNumber + std::vector<std::string>{"-0.5"}},
      {"/bf16/auto_cast", "{}", {{"true", [](auto& c) { return c.bf16_auto_cast; }}}, kNotFlag},
      {"/bf16/enabled",
       "{}",
       {{"true", [](auto& c) { return c.bf16; }}, {"false", [](auto& c) { return !c.bf16; }}},
       kNotFlag},
      {"/fp16/enabled",
       "{}",
       {{"true", [](auto& c) { return c.fp16.enabled; }}, {"false", [](auto& c) { return !c.fp16.enabled; }}},
       kNotFlag},
      {"/fp16/auto_cast", "{}", {{"true", [](auto& c) { return c.fp16_auto_cast; }}}, kNotFlag},
      {"/fp16/loss_scale",
       "{}",
       {{"0", [](auto& c) { return c.fp16.static_scale == 0.0; }},
        {"128", [](auto& c) { return c.fp16.static_scale == 128.0; }}},
       kNotNumber + std::vector<std::string>{"-1"}},
      {"/fp16/initial_scale_power",
       "{}",
       {{"0", [](auto& c) { return c.fp16.initial_power == 0; }},
        {"20", [](auto& c) { return c.fp16.initial_power == 20; }}},
       kNotInteger + std::vector<std::string>{"121"}},
      {"/fp16/loss_scale_window",
       "{}",
       {{"500", [](auto& c) { return c.fp16.window == 500; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/fp16/hysteresis",
       "{}",
       {{"1", [](auto& c) { return c.fp16.hysteresis == 1; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/fp16/consecutive_hysteresis",
       "{}",
       {{"true", [](auto& c) { return c.fp16.consecutive_hysteresis; }}},
       kNotFlag},
      {"/fp16/min_loss_scale",
       "{}",
       {{"0.5", [](auto& c) { return c.fp16.min_scale == 0.5; }}},
       kNotNumber + std::vector<std::string>{"0", "-1"}},
      {"/optimizer/type",
       "{}",
       {{"\"AdamW\"", [](auto& c) { return c.optimizer.type == "AdamW"; }},
        {"\"adam\"", [](auto& c) { return c.optimizer.type == "Adam"; }},
        {"\"SGD\"", [](auto& c) { return c.optimizer.type == "SGD"; }}},
       {"\"Muon\"", "\"\"", "3", "\"AdamWW\""}},
      {"/optimizer/params/lr",
       "{}",
       {{"0.5", [](auto& c) { return c.optimizer.lr == 0.5; }},
        {"0", [](auto& c) { return c.optimizer.lr == 0.0; }},
        {"3e-4", [](auto& c) { return c.optimizer.lr == 3e-4; }}},
       kNotNumber + std::vector<std::string>{"-1e-9"}},
      {"/optimizer/params/betas",
       "{}",
       {{"[0.9, 0.95]", [](auto& c) { return c.optimizer.betas == std::array{0.9, 0.95}; }},
        {"[0, 0]", [](auto& c) { return c.optimizer.betas == std::array{0.0, 0.0}; }}},
       {"[0.9]", "[0.9, 0.95, 0.99]", "[0.9, 1.0]", "[1, 0.9]", "[-0.1, 0.9]", "[0.9, \"0.9\"]", "[true, false]", "0.9",
        "[]", "[[0.9], 0.9]"}},
      {"/optimizer/params/eps",
       "{}",
       {{"1e-6", [](auto& c) { return c.optimizer.eps == 1e-6; }}},
       kNotNumber + std::vector<std::string>{"0", "-1e-8"}},
      {"/optimizer/params/weight_decay",
       "{}",
       {{"0.1", [](auto& c) { return c.optimizer.decay() == 0.1; }},
        {"0", [](auto& c) { return c.optimizer.decay() == 0.0; }}},
       kNotNumber + std::vector<std::string>{"-0.1"}},
      {"/optimizer/params/adam_w_mode",
       kAdam,
       {{"true", [](auto& c) { return c.optimizer.rule() == "AdamW"; }},
        {"false", [](auto& c) { return c.optimizer.rule() == "Adam"; }}},
       kNotFlag},
      {"/optimizer/params/momentum",
       kSgd,
       {{"0.9", [](auto& c) { return c.optimizer.momentum == 0.9; }}},
       kNotNumber + std::vector<std::string>{"-0.1"}},
      {"/optimizer/params/dampening",
       kSgd,
       {{"0.25", [](auto& c) { return c.optimizer.dampening == 0.25; }}},
       kNotNumber},
      {"/optimizer/params/nesterov", kSgd, {{"true", [](auto& c) { return c.optimizer.nesterov; }}}, kNotFlag},
      {"/optimizer/params/freeze_step",
       R"({"optimizer": {"type": "OneBitAdam"}})",
       {{"1", [](auto& c) { return c.optimizer.freeze_step == 1; }},
        {"2000", [](auto& c) { return c.optimizer.freeze_step == 2000; }}},
       kNotInteger + std::vector<std::string>{"0", "-1"}},
      {"/optimizer/params/freeze_threshold",
       R"({"optimizer": {"type": "OneBitLamb"}})",
       {{"0.96", [](auto& c) { return c.optimizer.freeze_threshold == 0.96; }}},
       kNotNumber + std::vector<std::string>{"1.0", "-0.5"}},
      {"/optimizer/params/compression",
       R"({"optimizer": {"type": "OneBitAdam"}})",
       {{"\"int8\"", [](auto& c) { return c.optimizer.compression.compression == "int8"; }},
        {"\"low_rank\"", [](auto& c) { return c.optimizer.compression.compression == "low_rank"; }}},
       {"\"zip\"", "8", "true"}},
      {"/optimizer/params/compression_ratio",
       R"({"optimizer": {"type": "OneBitAdam", "params": {"compression": "top_k"}}})",
       {{"0.5", [](auto& c) { return c.optimizer.compression.ratio == 0.5; }}},
       kNotNumber + std::vector<std::string>{"0", "1.5"}},
      {"/optimizer/params/compression_every",
       R"({"optimizer": {"type": "OneBitAdam", "params": {"compression": "adaptive"}}})",
       {{"20", [](auto& c) { return c.optimizer.compression.every == 20; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/optimizer/params/compression_rank",
       R"({"optimizer": {"type": "OneBitAdam", "params": {"compression": "low_rank"}}})",
       {{"2", [](auto& c) { return c.optimizer.compression.rank == 2; }}},
       kNotInteger + std::vector<std::string>{"0", "65"}},
      {"/optimizer/params/max_coeff",
       kLamb,
       {{"5", [](auto& c) { return c.optimizer.lamb.max_coeff == 5; }}},
       kNotNumber + std::vector<std::string>{"0", "-1"}},
      {"/optimizer/params/min_coeff",
       kLamb,
       {{"0", [](auto& c) { return c.optimizer.lamb.min_coeff == 0; }},
        {"0.5", [](auto& c) { return c.optimizer.lamb.min_coeff == 0.5; }}},
       kNotNumber + std::vector<std::string>{"-1", "11"}},
      {"/optimizer/params/bias_correction",
       kLamb,
       {{"false", [](auto& c) { return !c.optimizer.lamb.bias_correction; }},
        {"true", [](auto& c) { return c.optimizer.lamb.bias_correction; }}},
       kNotFlag},
      {"/optimizer/params/coeff_beta",
       kOneBitLamb,
       {{"0.5", [](auto& c) { return c.optimizer.lamb.coeff_beta == 0.5; }}},
       kNotNumber + std::vector<std::string>{"1", "-0.1"}},
      {"/optimizer/params/factor_max",
       kOneBitLamb,
       {{"2", [](auto& c) { return c.optimizer.lamb.factor_max == 2; }}},
       kNotNumber + std::vector<std::string>{"0", "-1"}},
      {"/optimizer/params/factor_min",
       kOneBitLamb,
       {{"0.25", [](auto& c) { return c.optimizer.lamb.factor_min == 0.25; }}},
       kNotNumber + std::vector<std::string>{"-1", "5"}},
      {"/optimizer/params/factor_threshold",
       kOneBitLamb,
       {{"0.2", [](auto& c) { return c.optimizer.lamb.factor_threshold == 0.2; }}},
       kNotNumber + std::vector<std::string>{"-0.1", "1"}},
      {"/optimizer/params/var_freeze_step",
       kZeroOne,
       {{"50", [](auto& c) { return c.optimizer.zero_one.var_freeze_step == 50; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/optimizer/params/var_update_scaler",
       kZeroOne,
       {{"4", [](auto& c) { return c.optimizer.zero_one.var_update_scaler == 4; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/optimizer/params/local_step_scaler",
       kZeroOne,
       {{"100", [](auto& c) { return c.optimizer.zero_one.local_step_scaler == 100; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/optimizer/params/local_step_clipper",
       kZeroOne,
       {{"1", [](auto& c) { return c.optimizer.zero_one.local_step_clipper == 1; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/scheduler/type",
       "{}",
       {{"\"WarmupLR\"", [](auto& c) { return c.scheduler.type == "WarmupLR"; }},
        {"\"warmuplr\"", [](auto& c) { return c.scheduler.type == "WarmupLR"; }},
        {"null", [](auto& c) { return c.scheduler.type.empty(); }}},
       {"\"OneCycle\"", "\"\"", "1", "\"Warmup\""}},
      {"/scheduler/params/warmup_min_lr",
       kWarmup,
       {{"1e-5", [](auto& c) { return c.scheduler.warmup_min_lr == 1e-5; }}},
       kNotNumber + std::vector<std::string>{"-1"}},
      {"/scheduler/params/warmup_max_lr",
       kWarmup,
       {{"2e-3", [](auto& c) { return c.scheduler.warmup_max_lr == 2e-3; }}},
       kNotNumber + std::vector<std::string>{"0", "-1", "[1e-3, 1e-4]"}},
      {"/scheduler/params/warmup_num_steps",
       kWarmup,
       {{"0", [](auto& c) { return c.scheduler.warmup_num_steps == 0; }},
        {"17", [](auto& c) { return c.scheduler.warmup_num_steps == 17; }}},
       kNotInteger},
      {"/scheduler/params/warmup_type",
       kWarmup,
       {{"\"linear\"", [](auto& c) { return c.scheduler.warmup_type == "linear"; }},
        {"\"log\"", [](auto& c) { return c.scheduler.warmup_type == "log"; }}},
       {"\"cosine\"", "1"}},
      {"/scheduler/params/total_num_steps",
       kCosine,
       {{"100", [](auto& c) { return c.scheduler.total_num_steps == 100; }},
        {"3", [](auto& c) { return c.scheduler.total_num_steps == 3; }}},
       kNotInteger + std::vector<std::string>{"0", "2"}},
      {"/scheduler/params/warmup_min_ratio",
       kCosine,
       {{"0.5", [](auto& c) { return c.scheduler.warmup_min_ratio == 0.5; }}},
       kNotNumber + std::vector<std::string>{"-0.1", "1.1"}},
      {"/scheduler/params/cos_min_ratio",
       kCosine,
       {{"0.1", [](auto& c) { return c.scheduler.cos_min_ratio == 0.1; }}},
       kNotNumber + std::vector<std::string>{"-0.1", "1.1"}},
      {"/zero_optimization/stage",
       "{}",
       {{"0", [](auto& c) { return c.zero.stage == 0; }},
        {"1", [](auto& c) { return c.zero.stage == 1; }},
        {"2", [](auto& c) { return c.zero.stage == 2; }},
        {"3.0", [](auto& c) { return c.zero.stage == 3; }}},
       kNotInteger + std::vector<std::string>{"4", "\"auto\""}},
      {"/zero_optimization/zero_hpz_partition_size",
       kStage3,
       {{"1", [](auto& c) { return c.zero.hpz_partition_size == 1; }},
        {"8", [](auto& c) { return c.zero.hpz_partition_size == 8; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/zero_optimization/mics_shard_size",
       kStage3,
       {{"-1", [](auto& c) { return c.zero.mics_shard_size == -1; }},
        {"4", [](auto& c) { return c.zero.mics_shard_size == 4; }}},
       {"0", "-2", "0.5", "true", "\"1\""}},
      {"/zero_optimization/zero_quantized_weights",
       kStage3,
       {{"true", [](auto& c) { return c.zero.quantized_weights; }},
        {"false", [](auto& c) { return !c.zero.quantized_weights; }}},
       kNotFlag},
      {"/zero_optimization/zero_quantized_gradients",
       "{}",
       {{"true", [](auto& c) { return c.zero.quantized_gradients; }},
        {"false", [](auto& c) { return !c.zero.quantized_gradients; }}},
       kNotFlag},
      {"/zeroth/codes/gradient_bits",
       kQuantized,
       {{"4", [](auto& c) { return c.zero.code_bits == 4; }}, {"8", [](auto& c) { return c.zero.code_bits == 8; }}},
       kNotInteger + std::vector<std::string>{"2", "6", "16"}},
      {"/zeroth/codes/feedback",
       kQuantized,
       {{"true", [](auto& c) { return c.zero.code_feedback; }},
        {"false", [](auto& c) { return !c.zero.code_feedback; }}},
       kNotFlag},
      {"/zeroth/codes/node_degree",
       kQuantized,
       {{"0", [](auto& c) { return c.zero.code_node_degree == 0; }},
        {"8", [](auto& c) { return c.zero.code_node_degree == 8; }}},
       kNotInteger},
      {"/zeroth/codes/block",
       kQuantized,
       {{"16", [](auto& c) { return c.zero.code_block == 16; }},
        {"1024", [](auto& c) { return c.zero.code_block == 1024; }}},
       kNotInteger + std::vector<std::string>{"8", "48", "2048"}},
      {"/zeroth/parameter_degree",
       kStage3,
       {{"0", [](auto& c) { return c.zero.parameter_degree == 0; }},
        {"8", [](auto& c) { return c.zero.parameter_degree == 8; }}},
       kNotInteger},
      {"/zeroth/optimizer_degree",
       R"({"zero_optimization": {"stage": 2}})",
       {{"0", [](auto& c) { return c.zero.optimizer_degree == 0; }},
        {"8", [](auto& c) { return c.zero.optimizer_degree == 8; }}},
       kNotInteger},
      {"/zeroth/mesh/pp",
       "{}",
       {{"1", [](auto& c) { return c.mesh.pp == 1; }}, {"4", [](auto& c) { return c.mesh.pp == 4; }}},
       {"0", "-1", "1.5", "true"}},
      {"/zeroth/pipeline/schedule",
       "{}",
       {{"\"gpipe\"", [](auto& c) { return c.pipeline.schedule == "gpipe"; }},
        {"\"ouroboros\"", [](auto& c) { return c.pipeline.schedule == "ouroboros"; }}},
       {"1", "true", "\"ouroboro\""}},
      {"/zeroth/pipeline/chunks",
       "{}",
       {{"0", [](auto& c) { return c.pipeline.chunks == 0; }}, {"2", [](auto& c) { return c.pipeline.chunks == 2; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/pipeline/split",
       "{}",
       {{"\"uniform\"", [](auto& c) { return c.pipeline.split == "uniform"; }},
        {"\"time\"", [](auto& c) { return c.pipeline.split == "time"; }}},
       {"1", "true"}},
      {"/zeroth/pipeline/scatter",
       "{}",
       {{"true", [](auto& c) { return c.pipeline.scatter; }}, {"false", [](auto& c) { return !c.pipeline.scatter; }}},
       {"1", "\"on\""}},
      {"/zeroth/pipeline/unshard",
       "{}",
       {{"\"micro_batch\"", [](auto& c) { return c.pipeline.unshard == "micro_batch"; }},
        {"\"step\"", [](auto& c) { return c.pipeline.unshard == "step"; }}},
       {"\"never\"", "1"}},
      {"/zeroth/pipeline/vocabulary",
       "{}",
       {{"\"whole\"", [](auto& c) { return c.pipeline.vocabulary == "whole"; }},
        {"\"two_barriers\"", [](auto& c) { return c.pipeline.vocabulary == "two_barriers"; }},
        {"\"one_barrier\"", [](auto& c) { return c.pipeline.vocabulary == "one_barrier"; }}},
       {"\"split\"", "1"}},
      {"/zeroth/pipeline/recompute",
       "{}",
       {{"true", [](auto& c) { return c.pipeline.recompute; }},
        {"false", [](auto& c) { return !c.pipeline.recomputes_chunks(); }}},
       {"1", "\"all\""}},
      {"/pipeline/activation_checkpoint_interval",
       "{}",
       {{"0", [](auto& c) { return !c.pipeline.recomputes_chunks(); }},
        {"2", [](auto& c) { return c.pipeline.checkpoint_interval == 2 && c.pipeline.recomputes_chunks(); }}},
       {"-1", "1.5", "true"}},
      {"/zero_optimization/offload_optimizer/device",
       "{}",
       {{"\"none\"", [](auto& c) { return c.offload.optimizer_device == "none"; }},
        {"\"cpu\"", [](auto& c) { return c.offload.optimizer_device == "cpu"; }},
        {"\"nvme\"", [](auto& c) { return c.offload.optimizer_device == "nvme"; }}},
       {"\"disk\"", "1", "true"}},
      {"/zero_optimization/offload_optimizer/nvme_path",
       "{}",
       {{"\"/a:/b\"", [](auto& c) { return c.offload.nvme_path == "/a:/b"; }}},
       {"1", "true"}},
      {"/zero_optimization/offload_optimizer/buffer_count",
       "{}",
       {{"2", [](auto& c) { return c.offload.buffer_count == 2; }},
        {"9", [](auto& c) { return c.offload.buffer_count == 9; }}},
       {"1", "0", "2.5", "5000", "true"}},
      {"/zero_optimization/offload_optimizer/ratio",
       "{}",
       {{"0.5", [](auto& c) { return c.offload.ratio == 0.5; }}, {"0", [](auto& c) { return c.offload.ratio == 0.0; }}},
       {"-0.1", "1.5", "true"}},
      {"/zero_optimization/offload_param/device",
       "{}",
       {{"\"none\"", [](auto& c) { return c.offload.parameter_device == "none"; }},
        {"\"cpu\"", [](auto& c) { return c.offload.parameter_device == "cpu"; }},
        {"\"nvme\"", [](auto& c) { return c.offload.parameter_device == "nvme"; }}},
       {"\"disk\"", "1", "true"}},
      {"/zero_optimization/offload_param/nvme_path",
       "{}",
       {{"\"/a:/b\"", [](auto& c) { return c.offload.parameter_nvme_path == "/a:/b"; }}},
       {"1", "true"}},
      {"/zero_optimization/offload_param/max_in_cpu",
       "{}",
       {{"0", [](auto& c) { return c.offload.max_in_cpu == 0; }},
        {"1e9", [](auto& c) { return c.offload.max_in_cpu == 1'000'000'000; }}},
       {"-1", "2.5", "true"}},
      {"/zeroth/update/inside_backward", "{}", {{"true", [](auto& c) { return c.update.inside_backward; }}}, kNotFlag},
      {"/zeroth/update/round_sums", "{}", {{"true", [](auto& c) { return c.update.round_sums; }}}, kNotFlag},
      {"/zeroth/update/clip_by",
       "{}",
       {{"\"previous_norm\"", [](auto& c) { return c.update.clip_by == "previous_norm"; }},
        {"\"exact_norm\"", [](auto& c) { return c.update.clip_by == "exact_norm"; }}},
       {"\"norm\"", "true", "0"}},
      {"/zeroth/update/delayed_after",
       "{}",
       {{"0", [](auto& c) { return c.update.delayed_after == 0; }},
        {"40", [](auto& c) { return c.update.delayed_after == 40; }},
        {"null", [](auto& c) { return !c.update.delayed_after; }}},
       kNotInteger},
      {"/zeroth/offload/block_elements",
       "{}",
       {{"1024", [](auto& c) { return c.offload.block_elements == 1024; }},
        {"null", [](auto& c) { return !c.offload.block_elements; }}},
       {"0", "1.5", "true"}},
      {"/zeroth/offload/ratio",
       R"({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})",
       {{"\"planned\"", [](auto& c) { return c.offload.ratio_from == "planned"; }},
        {"\"given\"", [](auto& c) { return c.offload.ratio_from == "given"; }}},
       {"0.5", "\"auto\"", "true"}},
      {"/zeroth/offload/cache_blocks",
       R"({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})",
       {{"0", [](auto& c) { return c.offload.cache_blocks == 0; }},
        {"12", [](auto& c) { return c.offload.cache_blocks == 12; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/offload/gradients",
       "{}",
       {{"\"device\"", [](auto& c) { return c.offload.gradients == "device"; }},
        {"\"host\"", [](auto& c) { return c.offload.gradients == "host"; }}},
       {"\"cpu\"", "\"nvme\"", "true"}},
      {"/zeroth/budget/device_bytes",
       "{}",
       {{"1000", [](auto& c) { return c.budget.device_bytes == 1000; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/budget/host_bytes",
       "{}",
       {{"8e9", [](auto& c) { return c.budget.host_bytes == 8'000'000'000; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/budget/file_bytes",
       "{}",
       {{"0", [](auto& c) { return c.budget.file_bytes == 0; }},
        {"7", [](auto& c) { return c.budget.file_bytes == 7; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/offload/io",
       "{}",
       {{"\"aio\"", [](auto& c) { return c.offload.io == "aio"; }},
        {"\"probe\"", [](auto& c) { return c.offload.io == "probe"; }}},
       {"\"posix\"", "1"}},
      {"/zeroth/offload/direct",
       "{}",
       {{"false", [](auto& c) { return !c.offload.direct; }}, {"true", [](auto& c) { return c.offload.direct; }}},
       {"1", "\"on\""}},
      {"/aio/queue_depth", "{}", {{"8", [](auto& c) { return c.offload.queue_depth == 8; }}}, {"0", "5000", "true"}},
      {"/aio/block_size",
       "{}",
       {{"1048576", [](auto& c) { return c.offload.stripe_bytes == 1048576; }}},
       {"0", "1.5", "true"}},
      {"/activation_checkpointing/cpu_checkpointing",
       "{}",
       {{"true", [](auto& c) { return c.activations.tier() == "cpu"; }},
        {"false", [](auto& c) { return c.activations.tier() == "none"; }}},
       {"1", "\"on\""}},
      {"/zeroth/activations/device",
       "{}",
       {{"\"none\"", [](auto& c) { return c.activations.device == "none"; }},
        {"\"cpu\"", [](auto& c) { return c.activations.device == "cpu"; }},
        {"\"nvme\"", [](auto& c) { return c.activations.tier() == "nvme"; }}},
       {"\"disk\"", "1", "true"}},
      {"/zeroth/activations/nvme_path",
       "{}",
       {{"\"/a:/b\"", [](auto& c) { return c.activations.nvme_path == "/a:/b"; }}},
       {"1", "true"}},
      {"/zeroth/activations/saved",
       "{}",
       {{"\"all\"", [](auto& c) { return c.activations.saved == "all"; }},
        {"\"checkpoints\"", [](auto& c) { return c.activations.saved == "checkpoints"; }}},
       {"\"some\"", "1"}},
      {"/zeroth/activations/choice",
       "{}",
       {{"\"given\"", [](auto& c) { return c.activations.choice == "given"; }},
        {"\"planned\"", [](auto& c) { return c.activations.choice == "planned"; }}},
       {"\"auto\"", "1"}},
      {"/zeroth/activations/memory_bytes",
       "{}",
       {{"0", [](auto& c) { return c.activations.memory_bytes == 0; }},
        {"1048576", [](auto& c) { return c.activations.memory_bytes == 1048576; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/activations/min_bytes",
       "{}",
       {{"0", [](auto& c) { return c.activations.min_bytes == 0; }}},
       {"-1", "1.5", "true"}},
      {"/zeroth/activations/prefetch",
       "{}",
       {{"0", [](auto& c) { return c.activations.prefetch == 0; }},
        {"3", [](auto& c) { return c.activations.prefetch == 3; }}},
       {"-1", "5000", "true"}},
      {"/zeroth/activations/buffer_bytes",
       "{}",
       {{"65536", [](auto& c) { return c.activations.buffer_bytes == 65536; }}},
       {"0", "4096", "true"}},
      {"/zeroth/mesh/dp",
       "{}",
       {{"0", [](auto& c) { return c.mesh.dp == 0; }}, {"4", [](auto& c) { return c.mesh.dp == 4; }}},
       {"2.5", "-1", "\"2\"", "true"}},
      {"/zeroth/mesh/rows",
       "{}",
       {{"1", [](auto& c) { return c.mesh.rows == 1; }}, {"4", [](auto& c) { return c.mesh.rows == 4; }}},
       {"0", "-1", "\"2\"", "true"}},
      {"/zeroth/mesh/ep",
       "{}",
       {{"1", [](auto& c) { return c.mesh.ep == 1; }}, {"4", [](auto& c) { return c.mesh.ep == 4; }}},
       {"0", "-1", "\"2\"", "true"}},
      {"/zeroth/mesh/sp",
       "{}",
       {{"1", [](auto& c) { return c.mesh.sp == 1; }}, {"4", [](auto& c) { return c.mesh.sp == 4; }}},
       {"0", "-1", "\"2\"", "true"}},
      {"/zeroth/mesh/tp",
       "{}",
       {{"0", [](auto& c) { return c.mesh.tp == 0; }}, {"2", [](auto& c) { return c.mesh.tp == 2; }}},
       {"-1", "0.5", "\"2\"", "true"}},
      {"/zeroth/sequence/method",
       "{}",
       {{"\"ring\"", [](auto& c) { return c.mesh.method == "ring"; }},
        {"\"grid\"", [](auto& c) { return c.mesh.method == "grid"; }}},
       {"\"\"", "0", "\"star\""}},
      {"/zeroth/sequence/ulysses",
       "{}",
       {{"0", [](auto& c) { return c.mesh.ulysses == 0; }}, {"2", [](auto& c) { return c.mesh.ulysses == 2; }}},
       {"-1", "0.5", "\"2\"", "true"}},
      {"/zeroth/sequence/order",
       "{}",
       {{"\"ring\"", [](auto& c) { return c.mesh.order == "ring"; }},
        {"\"token\"", [](auto& c) { return c.mesh.order == "token"; }}},
       {"\"\"", "0", "\"star\""}},
      {"/zeroth/tensor/norms",
       "{}",
       {{"\"whole\"", [](auto& c) { return c.mesh.norms == "whole"; }},
        {"\"split\"", [](auto& c) { return c.mesh.norms == "split"; }}},
       {"\"\"", "0", "\"half\""}},
      {"/zeroth/experts/over",
       "{}",
       {{"\"ep,tp\"", [](auto& c) { return c.experts.over == "ep,tp"; }},
        {"\"ep,sp,tp\"", [](auto& c) { return c.experts.over == "ep,sp,tp"; }}},
       {"\"\"", "0", "\"dp\""}},
      {"/zeroth/experts/meet",
       "{}",
       {{"\"tokens\"", [](auto& c) { return c.experts.meet == "tokens"; }},
        {"\"balance\"", [](auto& c) { return c.experts.meet == "balance"; }}},
       {"\"\"", "0", "\"home\""}},
      {"/zeroth/experts/copies",
       "{}",
       {{"0", [](auto& c) { return c.experts.copies == 0; }}, {"7", [](auto& c) { return c.experts.copies == 7; }}},
       {"-1", "0.5", "\"2\"", "true"}},
      {"/zeroth/experts/pieces",
       "{}",
       {{"0", [](auto& c) { return c.experts.pieces == 0; }}, {"4", [](auto& c) { return c.experts.pieces == 4; }}},
       {"-1", "65", "0.5", "\"2\""}},
      {"/zeroth/experts/two_hops",
       "{}",
       {{"true", [](auto& c) { return c.experts.two_hops; }}, {"false", [](auto& c) { return !c.experts.two_hops; }}},
       {"0", "\"yes\""}},
      {"/zeroth/parallel/verify",
       "{}",
       {{"\"always\"", [](auto& c) { return c.mesh.verify == "always"; }},
        {"\"never\"", [](auto& c) { return c.mesh.verify == "never"; }}},
       {"\"\"", "0", "\"sometimes\""}},
      {"/zeroth/gradient_degree",
       "{}",
       {{"0", [](auto& c) { return c.zero.gradient_degree == 0; }},
        {"8", [](auto& c) { return c.zero.gradient_degree == 8; }}},
       kNotInteger},
      {"/zeroth/reduction_policy",
       "{}",
       {{"\"per_step\"", [](auto& c) { return c.zero.reduction_policy == ReductionPolicy::kPerStep; }},
        {"\"per_micro_step\"", [](auto& c) { return c.zero.reduction_policy == ReductionPolicy::kPerMicroStep; }}},
       {"\"\"", "0", "\"per_microstep\""}},
      {"/zeroth/reshard",
       "{}",
       {{"\"default\"", [](auto& c) { return c.zero.reshard == Reshard::kDefault; }},
        {"\"all\"", [](auto& c) { return c.zero.reshard == Reshard::kAll; }},
        {"\"none\"", [](auto& c) { return c.zero.reshard == Reshard::kNone; }}},
       {"true", "\"some\""}},
      {"/zeroth/ring_slots",
       "{}",
       {{"3", [](auto& c) { return c.zero.ring_slots == 3; }}},
       kNotInteger + std::vector<std::string>{"0", "1", "4097"}},
      {"/zeroth/prefetch_units",
       "{}",
       {{"0", [](auto& c) { return c.zero.prefetch_units == 0; }},
        {"4", [](auto& c) { return c.zero.prefetch_units == 4; }}},
       kNotInteger + std::vector<std::string>{"4097"}},
      {"/zeroth/narrow_buckets",
       "{}",
       {{"false", [](auto& c) { return !c.zero.narrow_buckets; }},
        {"true", [](auto& c) { return c.zero.narrow_buckets; }}},
       kNotFlag},
      {"/zeroth/threads",
       "{}",
       {{"7", [](auto& c) { return c.runtime.threads == 7; }}},
       kNotInteger + std::vector<std::string>{"4097"}},
      {"/zeroth/ranks_per_node",
       "{}",
       {{"2", [](auto& c) { return c.runtime.ranks_per_node == 2; }}},
       kNotInteger + std::vector<std::string>{"4097"}},
      {"/zeroth/reduction",
       "{}",
       {{"\"transport\"", [](auto& c) { return c.runtime.reduction == Reduction::kTransport; }},
        {"\"rank_order\"", [](auto& c) { return c.runtime.reduction == Reduction::kRankOrder; }}},
       {"\"\"", "0", "\"mpi\""}},
      {"/zeroth/check_calls",
       "{}",
       {{"true", [](auto& c) { return c.runtime.check_calls; }},
        {"false", [](auto& c) { return !c.runtime.check_calls; }}},
       kNotFlag},
      {"/zeroth/link_bytes_per_s",
       "{}",
       {{"125000000", [](auto& c) { return c.runtime.link_bytes_per_s == 125'000'000; }}},
       {"-1", "1.5", "\"1\"", "9223372036854775807"}},
      {"/zeroth/uneven",
       "{}",
       {{"\"error\"", [](auto& c) { return c.runtime.uneven == Uneven::kError; }},
        {"\"drop\"", [](auto& c) { return c.runtime.uneven == Uneven::kDrop; }},
        {"\"join\"", [](auto& c) { return c.runtime.uneven == Uneven::kJoin; }}},
       {"\"\"", "0", "true"}},
      {"/zeroth/timeout_ms",
       "{}",
       {{"250", [](auto& c) { return c.runtime.timeout_ms == 250; }}},
       kNotInteger + std::vector<std::string>{"0", "604800001"}},
      {"/zeroth/first_timeout_ms",
       "{}",
       {{"250", [](auto& c) { return c.runtime.first_timeout_ms == 250; }},
        {"0", [](auto& c) { return c.runtime.first_timeout_ms == 0; }}},
       kNotInteger + std::vector<std::string>{"-1", "604800001"}},
      {"/zeroth/frozen_after_ms",
       "{}",
       {{"250", [](auto& c) { return c.runtime.frozen_after_ms == 250; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/zeroth/end_stuck_after_ms",
       "{}",
       {{"250", [](auto& c) { return c.runtime.end_stuck_after_ms == 250; }},
        {"0", [](auto& c) { return c.runtime.end_stuck_after_ms == 0; }}},
       kNotInteger + std::vector<std::string>{"-1", "604800001"}},
      {"/zeroth/preemption",
       "{}",
       {{"true", [](auto& c) { return c.runtime.preemption; }},
        {"false", [](auto& c) { return !c.runtime.preemption; }}},
       kNotFlag},
      {"/zeroth/max_nonfinite_steps",
       "{}",
       {{"1", [](auto& c) { return c.runtime.max_nonfinite_steps == 1; }}},
       kNotInteger + std::vector<std::string>{"0"}},
      {"/zeroth/gradient_code/stragglers",
       "{}",
       {{"2", [](auto& c) { return c.runtime.stragglers == 2; }}},
       kNotInteger + std::vector<std::string>{"-1"}},
      {"/zeroth/compare_replicas",
       "{}",
       {{"true", [](auto& c) { return c.runtime.compare_replicas; }},
        {"false", [](auto& c) { return !c.runtime.compare_replicas; }}},
       kNotFlag},
      {"/zeroth/cast", "{}", {{"false", [](auto& c) { return !c.runtime.cast; }}}, kNotFlag},
      {"/zeroth/broadcast_buffers",
       "{}",
       {{"false", [](auto& c) { return !c.runtime.broadcast_buffers; }},
        {"true", [](auto& c) { return c.runtime.broadcast_buffers; }}},
       kNotFlag},
      {"/zeroth/compute_copies",
       "{}",
       {{"false", [](auto& c) { return !c.runtime.compute_copies; }},
        {"true", [](auto& c) { return c.runtime.compute_copies; }}},
       kNotFlag},
      {"/zeroth/execution",
       "{}",
       {{"\"chaos\"", [](auto& c) { return c.runtime.execution == ExecutionMode::kChaos; }},
        {"\"inline\"", [](auto& c) { return c.runtime.execution == ExecutionMode::kInline; }}},
       {"\"threaded\"", "1"}},
      {"/zeroth/chaos_seed",
       "{}",
       {{"9223372036854775807", [](auto& c) { return c.runtime.chaos_seed == 9223372036854775807; }}},
       {"-1", "9223372036854775808", "1.5", "\"1\""}},
      {"/zeroth/memory_limit_bytes",
       "{}",
       {{"5e9", [](auto& c) { return c.runtime.memory_limit_bytes == 5'000'000'000; }}},
       {"-1", "1.5", "\"1\"", "9223372036854775807"}},
  };
}

std::string with(const KeyCase& key, const std::string& json) {
  Json document = Json::parse(key.beside);
  document[Json::json_pointer(key.pointer)] = Json::parse(json);
  return document.dump();
}

TEST(ConfigKeys, EachHonouredKeyReadsItsValuesAndComesBack) {
  for (const KeyCase& key : cases()) {
    for (const Good& good : key.good) {
      const std::string text = with(key, good.json);
      const Config config = read(text);
      EXPECT_TRUE(good.reads(config)) << text;
      for (const HintNote& hint : config.hints) {
        EXPECT_TRUE(config.optimizer.type == "Adam" || hint.instead.starts_with("no effect: ")) << text << hint.text();
      }
      const Config back = read(config.to_json());
      EXPECT_EQ(back, config) << text;
      EXPECT_TRUE(good.reads(back)) << text;
      EXPECT_NO_THROW(config.validate()) << text;
      EXPECT_EQ(config.origin_of(key.pointer), good.json == "null" ? "default" : "test.json:1");
    }
  }
}

TEST(ConfigKeys, EachHonouredKeyRefusesOtherValues) {
  for (const KeyCase& key : cases()) {
    for (const std::string& bad : key.bad) {
      const ConfigProblem problem = problem_of(with(key, bad));
      EXPECT_EQ(problem.pointer, key.pointer) << bad;
      EXPECT_FALSE(problem.expected.empty()) << key.pointer << " " << bad;
      EXPECT_FALSE(problem.got.empty()) << key.pointer << " " << bad;
    }
    EXPECT_EQ(problem_of(with(key, "\"auto\"")).pointer, key.pointer);
  }
}

TEST(ConfigKeys, EachHonouredKeyHasACase) {
  std::set<std::string> tested;
  for (const KeyCase& key : cases()) EXPECT_TRUE(tested.insert(key.pointer).second) << key.pointer;
  std::set<std::string> known;
  for (const KeySpec& key : config::honoured_keys()) EXPECT_TRUE(known.emplace(key.pointer).second) << key.pointer;
  EXPECT_EQ(tested, known);
}

TEST(ConfigKeys, TheSchemaIsConsistent) {
  std::set<std::string_view> pointers;
  for (const KeySpec* key : config::all_keys()) {
    EXPECT_TRUE(pointers.insert(key->pointer).second) << key->pointer << " is there twice";
    EXPECT_TRUE(key->pointer.starts_with('/')) << key->pointer;
    EXPECT_FALSE(key->text.empty()) << key->pointer;
    EXPECT_FALSE(config::expected_text(*key).empty()) << key->pointer;
    EXPECT_EQ(key->key_class == config::KeyClass::kHonoured, key->read != nullptr && key->write != nullptr);
    EXPECT_EQ(key->applies == nullptr, key->applies_text.empty()) << key->pointer;
  }
  for (const std::string_view pointer : pointers) {
    // No key is at the same time a section of another one.
    for (const std::string_view other : pointers) {
      EXPECT_FALSE(other.starts_with(std::string(pointer) + "/")) << pointer << " and " << other;
    }
  }
  for (const config::KeyAlias& alias : config::key_aliases()) EXPECT_FALSE(pointers.contains(alias.alias));
}

TEST(ConfigKeys, AutoTellsWhereItIsResolved) {
  const ConfigProblem problem = problem_of(R"({"train_batch_size": "auto"})");
  EXPECT_EQ(problem.what, "\"auto\" is left over");
  EXPECT_THAT(problem.hint, HasSubstr("override"));
  // transformers leaves it over where a stage does not need the value.
  EXPECT_TRUE(problems_of(R"({"zero_optimization": {"reduce_bucket_size": "auto"}})").empty());
}

TEST(ConfigKeys, WhatIsBuiltElsewhereIsNamedAsSuch) {
  EXPECT_EQ(problem_of(R"({"optimizer": {"type": "muon"}})").hint, "muon is not built");
  EXPECT_EQ(problem_of(R"({"optimizer": {"type": "Muon"}})").expected,
            "\"AdamW\", \"Adam\", \"SGD\", \"Lion\", \"Lamb\", \"OneBitAdam\", \"OneBitLamb\" or \"ZeroOneAdam\"");
  EXPECT_EQ(problem_of(R"({"scheduler": {"type": "OneCycle"}})").hint, "OneCycle is not built");
}

TEST(ConfigKeys, NamesOfDeepSpeedsAdamMeanWhatTheyMeanThere) {
  struct Case {
    const char* optimizer;
    const char* rule;
    double decay;
    const char* note;  ///< "": none
  };
  for (const Case& of : {
           Case{R"({"type": "Adam"})", "AdamW", 0.0, "decoupled weight decay"},
           Case{R"({"type": "Adam", "params": {"adam_w_mode": true}})", "AdamW", 0.0, ""},
           Case{R"({"type": "Adam", "params": {"adam_w_mode": false}})", "Adam", 0.0, ""},
           Case{R"({"type": "FusedAdam"})", "AdamW", 0.0, "decoupled weight decay"},
           Case{R"({"type": "cpuadam", "params": {"adam_w_mode": false}})", "Adam", 0.0, "as torch.optim.Adam does"},
           Case{R"({"type": "DeepSpeedCPUAdam", "params": {"adamw_mode": true}})", "AdamW", 0.0, "decoupled"},
           Case{R"({"type": "AdamW"})", "AdamW", 0.01, ""},
           Case{R"({"type": "AdamW", "params": {"adam_w_mode": false}})", "AdamW", 0.01, "all the same"},
       }) {
    const Config config = read(R"({"optimizer": )" + std::string(of.optimizer) + "}");
    EXPECT_EQ(config.optimizer.rule(), of.rule) << of.optimizer;
    EXPECT_EQ(config.optimizer.decay(), of.decay) << of.optimizer;
    const std::string note(of.note);
    ASSERT_EQ(config.hints.size(), note.empty() ? 0U : 1U) << of.optimizer;
    if (!note.empty()) {
      EXPECT_THAT(config.hints[0].text(), HasSubstr(note));
    }
    EXPECT_EQ(read(config.to_json()), config) << of.optimizer;
  }
}

TEST(ConfigKeys, DefaultsOfWeightDecayFollowTheType) {
  EXPECT_EQ(read("{}").optimizer.decay(), 0.01);
  EXPECT_EQ(read(R"({"optimizer": {"type": "Adam"}})").optimizer.decay(), 0.0);
  EXPECT_EQ(read(R"({"optimizer": {"type": "SGD"}})").optimizer.decay(), 0.0);
  // Saying the default is the same as leaving it out, also for the digest.
  EXPECT_EQ(read("{}").digest(), read(R"({"optimizer": {"params": {"weight_decay": 0.01}}})").digest());
}

struct Contradiction {
  std::string text{};
  std::string pointer{};
};

TEST(ConfigKeys, ContradictionsBetweenKeysAreErrors) {
  for (const Contradiction& c : std::vector<Contradiction>{
           {R"({"optimizer": {"params": {"momentum": 0.9}}})", "/optimizer/params/momentum"},
           {R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}})", "/optimizer/params/betas"},
           {R"({"optimizer": {"type": "SGD", "params": {"adam_w_mode": true}}})", "/optimizer/params/adam_w_mode"},
           {R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})", "/optimizer/params/nesterov"},
           {R"({"optimizer": {"type": "SGD", "params": {"nesterov": true, "momentum": 0.9, "dampening": 0.1}}})",
            "/optimizer/params/nesterov"},
           {R"({"scheduler": {"params": {"warmup_num_steps": 3}}})", "/scheduler"},
           {R"({"scheduler": {"type": "WarmupDecayLR"}})", "/scheduler/params/total_num_steps"},
           {R"({"scheduler": {"type": "WarmupCosineLR"}})", "/scheduler/params/total_num_steps"},
           {R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}})",
            "/scheduler/params/total_num_steps"},
           {R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}})",
            "/scheduler/params/total_num_steps"},
           {R"({"scheduler": {"type": "WarmupLR", "params": {"cos_min_ratio": 0.1}}})",
            "/scheduler/params/cos_min_ratio"},
       }) {
    EXPECT_EQ(problem_of(c.text).pointer, c.pointer) << c.text;
  }
  // A type that cannot be read accuses no other key.
  EXPECT_EQ(problem_of(R"({"optimizer": {"type": "Muon", "params": {"momentum": 0.9}}})").pointer, "/optimizer/type");
}

TEST(ConfigKeys, SchedulesAreFactorsOfTheBaseRate) {
  using Kind = LearningRateSchedule::Kind;
  EXPECT_EQ(read("{}").scheduler.schedule(), LearningRateSchedule{});
  EXPECT_EQ(read("{}").scheduler.base_lr(0.5), 0.5);
  const SchedulerConfig cosine = read(R"({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7,
      "total_num_steps": 90, "warmup_min_ratio": 0.25, "cos_min_ratio": 0.125, "warmup_type": "linear"}}})")
                                     .scheduler;
  EXPECT_EQ(cosine.schedule(), (LearningRateSchedule{.kind = Kind::kWarmupCosine,
                                                     .warmup_steps = 7,
                                                     .total_steps = 90,
                                                     .warmup_start = 0.25,
                                                     .logarithmic = false,
                                                     .floor = 0.125}));
  EXPECT_EQ(cosine.base_lr(0.5), 0.5);
  const SchedulerConfig linear = read(R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7,
      "total_num_steps": 90, "warmup_min_lr": 0.25, "warmup_max_lr": 2.0}}})")
                                     .scheduler;
  EXPECT_EQ(linear.schedule(), (LearningRateSchedule{.kind = Kind::kWarmupLinear,
                                                     .warmup_steps = 7,
                                                     .total_steps = 90,
                                                     .warmup_start = 0.125,
                                                     .logarithmic = true}));
  EXPECT_EQ(linear.base_lr(0.5), 2.0);
}

TEST(ConfigKeys, HintsAreNotedAndChangeNothing) {
  const Config plain = read("{}");
  for (const KeySpec& key : config::hint_keys()) {
    for (const char* given :
         {"true", "500000000", "-0.5", "\"auto\"", "[1,\"x\",[]]", "{}", "Infinity", "-Infinity", "NaN"}) {
      const std::string text = document_with(key.pointer, given);
      const Config config = read(text);
      ASSERT_EQ(config.hints.size(), 1U) << text;
      EXPECT_EQ(config.hints[0].pointer, key.pointer);
      EXPECT_EQ(config.hints[0].given, given);
      EXPECT_EQ(config.hints[0].origin, "test.json:1");
      EXPECT_THAT(config.hints[0].text(), HasSubstr(std::string(key.text)));
      EXPECT_EQ(config.to_json(), plain.to_json()) << text;
      EXPECT_EQ(config.digest(), plain.digest()) << text;
    }
  }
  // A slip in the name of a member is found all the same.
  EXPECT_EQ(problem_of(R"({"flops_profiler": {"profile_stepp": 1}})").hint, "did you mean \"profile_step\"?");
}

TEST(ConfigKeys, NullIsTheSameAsAbsent) {
  const Config plain = read("{}");
  std::vector<std::string> pointers;
  for (const KeySpec* key : config::all_keys()) pointers.emplace_back(key->pointer);
  for (const config::KeyAlias& alias : config::key_aliases()) pointers.emplace_back(alias.alias);
  for (const std::string& pointer : pointers) {
    const std::string text = document_with(pointer, "null");
    const Config config = read(text);
    EXPECT_EQ(config.to_json(), plain.to_json()) << text;
    EXPECT_TRUE(config.hints.empty()) << text;
    EXPECT_EQ(config.origin_of(pointer), "default") << text;
    if (std::ranges::find(config::key_aliases(), pointer, &config::KeyAlias::alias) != config::key_aliases().end()) {
      continue;  // an override names the key itself
    }
    const std::vector<ConfigOverride> over{{pointer, "null", "--x"}};
    EXPECT_EQ(read("{}", over), plain) << pointer;
  }
  EXPECT_TRUE(read(R"({"bf16": null, "bfloat16": {"enabled": true, "auto_cast": null}})").bf16);
  EXPECT_TRUE(read(R"({"bf16": {"enabled": true}, "bfloat16": null})").bf16);
  EXPECT_TRUE(
      problems_of(R"({"wandb": {"enabled": null, "team": null}, "compression_training": {"x": null}})").empty());
  EXPECT_EQ(problem_of(R"({"scheduler": {"type": null, "params": {"warmup_num_steps": 3}}})").pointer, "/scheduler");
  // A name that there is not is a slip whatever its value, and so is null inside a value.
  EXPECT_EQ(problem_of(R"({"stage": null})").what, "unknown key");
  EXPECT_EQ(problem_of(R"({"optimizer": {"params": {"betas": [null, 0.9]}}})").got, "[null,0.9]");
}

TEST(ConfigKeys, RefusedKeysAreErrorsUnlessTheyAskForNothing) {
  const Config plain = read("{}");
  for (const KeySpec& key : config::refused_keys()) {
    if (key.kind != KeyKind::kSection) {
      for (const std::string& off : config::split_list(key.off)) {
        const Config config = read(document_with(key.pointer, off));
        EXPECT_TRUE(config.hints.empty()) << key.pointer;
        EXPECT_EQ(config.to_json(), plain.to_json()) << key.pointer;
      }
      for (const char* on : {"\"something\"", "17", "[1]"}) {
        EXPECT_EQ(problem_of(document_with(key.pointer, on)).pointer, key.pointer) << on;
      }
    }
  }
}

struct Refusal {
  std::string pointer{};
  std::vector<std::string> off{};
  std::vector<std::string> on{};
};

TEST(ConfigKeys, RefusedSectionsAreJudgedByTheirSwitch) {
  const std::vector<std::string> switch_off{R"({"enabled": false})", "{}"};
  const std::vector<std::string> switch_on{R"({"enabled": true})", R"({"enabled": "auto"})", R"({"enabled": 1})",
                                           "true", "[]"};
  std::vector<Refusal> list{
      {"/tensor_parallel/tp", {R"({"tp_size": 1})", "{}"}, {R"({"tp_size": 2})"}},
      {"/compile", {R"({"deepcompile": false, "passes": null})"}, {R"({"deepcompile": true})"}},
      {"/sparse_attention", {R"({"mode": "dense"})"}, {R"({"mode": "fixed"})", "{}"}},
      {"/compression_training",
       {"{}", R"({"weight_quantization": {"shared_parameters": {"enabled": false}, "different_groups": {"a": 1}}})",
        R"({"layer_reduction": {"enabled": false, "keep": 3}})"},
       {R"({"layer_reduction": {"enabled": true}})",
        R"({"weight_quantization": {"shared_parameters": {"enabled": true}}})", R"({"head_pruning": {"x": 1}})"}},
      {"/datastates_ckpt", {"{}"}, {R"({"host_cache_size": 16})"}},
  };
  for (const KeySpec& key : config::refused_keys()) {
    if (key.kind == KeyKind::kSection && key.off == "?enabled=false") {
      list.push_back({std::string(key.pointer), switch_off, switch_on});
    }
  }
  for (const Refusal& refusal : list) {
    for (const std::string& off : refusal.off) {
      EXPECT_TRUE(problems_of(document_with(refusal.pointer, off)).empty()) << refusal.pointer << " " << off;
    }
    for (const std::string& on : refusal.on) {
      const ConfigProblem problem = problem_of(document_with(refusal.pointer, on));
      EXPECT_EQ(problem.pointer, refusal.pointer) << on;
      EXPECT_FALSE(problem.expected.empty()) << refusal.pointer;
    }
  }
  // A misspelt switch must not pass for "off".
  EXPECT_EQ(problem_of(R"({"wandb": {"enable": true}})").pointer, "/wandb/enable");
  EXPECT_EQ(problem_of(R"({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}})").hint,
            "did you mean \"device\"?");
  // true is not the text "fp32".
  EXPECT_EQ(problem_of(R"({"data_types": {"grad_accum_dtype": true}})").what, "Zeroth cannot do this");
}

TEST(ConfigKeys, TheMeshHasDeepSpeedsNamesAndTakesWhatIsLeftForBatches) {
  const Config config = Config::from_json_text(
      R"({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 4}, "train_micro_batch_size_per_gpu": 3})",
      "x");
  EXPECT_EQ(config.mesh.sp, 2);
  EXPECT_EQ(config.mesh.tp, 4);
  EXPECT_EQ(describe(mesh_of(config, 24)), "dp=3 sp=2 tp=4");
  EXPECT_EQ(describe(mesh_of(Config{}, 5)), "dp=5 sp=1 tp=1");
  EXPECT_THROW(static_cast<void>(mesh_of(config, 12)), Error);
  const EngineSettings settings = make_settings(config, {.world = 24}, {GroupHyper{}});
  EXPECT_EQ(settings.batch_axes, std::vector<std::string>{"dp"});
  EXPECT_EQ(settings.plan.axes, (std::vector<std::string>{"dp", "sp"}));
  const Config images = Config::from_json_text(R"({"zeroth": {"mesh": {"rows": 4}}})", "x");
  EXPECT_EQ(describe(mesh_of(images, 12)), "dp=3 rows=4 sp=1 tp=1");
  EXPECT_THROW(static_cast<void>(mesh_of(images, 6)), Error);
  EXPECT_EQ(make_settings(images, {.world = 12}, {GroupHyper{}}).batch_axes, std::vector<std::string>{"dp"});
  EXPECT_EQ(make_settings(images, {.world = 12}, {GroupHyper{}}).plan.axes,
            (std::vector<std::string>{"dp", "rows", "sp"}));
  const Config both = Config::from_json_text(R"({"zeroth": {"mesh": {"rows": 2, "sp": 2}}})", "x");
  EXPECT_THROW(static_cast<void>(mesh_of(both, 4)), Error);
  const Config staged = Config::from_json_text(R"({"zeroth": {"mesh": {"pp": 2, "tp": 3}}})", "x");
  EXPECT_EQ(describe(mesh_of(staged, 12)), "pp=2 dp=2 sp=1 tp=3");
  EXPECT_EQ(make_settings(staged, {.world = 12}, {GroupHyper{}}).batch_axes, std::vector<std::string>{"dp"});
  const Config experts = Config::from_json_text(R"({"zeroth": {"mesh": {"ep": 2, "tp": 3}}})", "x");
  EXPECT_EQ(describe(mesh_of(experts, 12)), "dp=2 ep=2 sp=1 tp=3");
  EXPECT_EQ(data_ranks_of(experts, 12), 4);
  EXPECT_EQ(make_settings(experts, {.world = 12}, {GroupHyper{}}).batch_axes, (std::vector<std::string>{"dp", "ep"}));
  EXPECT_EQ(make_settings(experts, {.world = 12}, {GroupHyper{}}).plan.axes,
            (std::vector<std::string>{"dp", "ep", "sp"}));
  const Config images_of_experts = Config::from_json_text(R"({"zeroth": {"mesh": {"rows": 2, "ep": 2}}})", "x");
  EXPECT_THROW(static_cast<void>(mesh_of(images_of_experts, 4)), Error);
  for (const std::string ends : {"error", "drop", "join"}) {
    const Config of_experts =
        Config::from_json_text(R"({"zeroth": {"uneven": ")" + ends + R"(", "mesh": {"ep": 2}}})", "x");
    if (ends == "join") {
      EXPECT_THROW(static_cast<void>(mesh_of(of_experts, 4)), Error);
    } else {
      EXPECT_EQ(data_ranks_of(of_experts, 4), 4) << ends;
    }
  }
  EXPECT_EQ(problem_of(R"({"zeroth": {"mesh": {"cp": 2}}})").pointer, "/zeroth/mesh/cp");
  EXPECT_EQ(problem_of(R"({"sequence_parallel_size": 2, "zeroth": {"mesh": {"sp": 2}}})").pointer,
            "/sequence_parallel_size");
}

TEST(ParamAxes, ADistinctAxisOfThePlanIsNoneOfItsGroup) {
  EngineSettings settings;
  settings.mesh = {{{"dp", 2}, {"ep", 4}, {"sp", 2}}};
  settings.batch_axes = {"dp", "ep"};
  settings.plan = zero_plan(2, {"dp", "ep", "sp"});
  std::vector<ParamSpec> params(2);
  params[0].name = "router";
  params[1].name = "experts";
  const std::vector<ParamAxes> axes{{}, {.distinct = "ep"}};
  group_by_axes(params, axes, settings);
  ASSERT_EQ(settings.shard_groups.size(), 2U);
  const ShardGroupSpec& whole = settings.shard_groups[static_cast<std::size_t>(params[0].shard_group)];
  const ShardGroupSpec& split = settings.shard_groups[static_cast<std::size_t>(params[1].shard_group)];
  EXPECT_EQ(whole.plan.axes, (std::vector<std::string>{"dp", "ep", "sp"}));
  EXPECT_TRUE(whole.distinct_axes.empty());
  EXPECT_EQ(split.plan.axes, (std::vector<std::string>{"dp", "sp"}));
  EXPECT_EQ(split.distinct_axes, std::vector<std::string>{"ep"});
}

TEST(ParamAxes, CopiesCutAnAxisAndEachKindIsAGroup) {
  EngineSettings settings;
  settings.plan = zero_plan(3, {"dp", "sp"});
  settings.mesh = {{{"dp", 2}, {"sp", 1}, {"tp", 4}}};
  settings.batch_axes = {"dp"};
  std::vector<ParamSpec> params(4);
  const std::vector<ParamAxes> axes{{}, {.distinct = "tp"}, {.distinct = "tp", .copies = 2}, {.summed = {"tp"}}};
  group_by_axes(params, axes, settings);
  EXPECT_EQ(describe(settings.mesh), "dp=2 sp=1 tp.0=2 tp.1=2");
  const auto group = [&](std::size_t param) {
    return settings.shard_groups.at(static_cast<std::size_t>(params[param].shard_group));
  };
  EXPECT_EQ(group(0).plan.axes, (std::vector<std::string>{"dp", "sp"}));
  EXPECT_TRUE(group(0).distinct_axes.empty());
  EXPECT_EQ(group(1).distinct_axes, (std::vector<std::string>{"tp.0", "tp.1"}));
  EXPECT_EQ(group(2).distinct_axes, std::vector<std::string>{"tp.0"});
  EXPECT_EQ(group(2).plan.axes, (std::vector<std::string>{"dp", "sp", "tp.1"}));
  EXPECT_EQ(group(3).plan.axes, (std::vector<std::string>{"dp", "sp", "tp.0", "tp.1"}));
  const std::vector<ParamAxes> unknown{{}, {.distinct = "ep"}, {}, {}};
  EXPECT_THROW(group_by_axes(params, unknown, settings), Error);
  settings.mesh = {{{"dp", 1}, {"tp", 12}}};
  const std::vector<ParamAxes> crossing{{}, {.distinct = "tp", .copies = 4}, {.distinct = "tp", .copies = 6}, {}};
  EXPECT_THROW(group_by_axes(params, crossing, settings), Error);
}

std::string with_zero(const std::string& zero, const std::string& zeroth = "") {
  return R"({"zero_optimization": {)" + zero + "}, \"zeroth\": {" + zeroth + "}}";
}

TEST(ConfigDegrees, ValuesThatAskForNothingAreFineAtEveryStage) {
  for (const char* stage : {"0", "1", "2", "3"}) {
    const std::string text =
        std::string(R"("stage": )") + stage + R"(, "zero_hpz_partition_size": 1, "mics_shard_size": -1)";
    EXPECT_TRUE(problems_of(with_zero(text)).empty()) << stage;
  }
}

TEST(ConfigDegrees, NeedTheStageThatShards) {
  for (const char* key : {R"("zero_hpz_partition_size": 2)", R"("mics_shard_size": 2)"}) {
    const ConfigProblem problem = problem_of(with_zero(std::string(R"("stage": 2, )") + key));
    EXPECT_EQ(problem.what, "the key has no meaning here") << key;
    EXPECT_EQ(problem.hint, "it belongs to ZeRO stage 3") << key;
  }
  EXPECT_EQ(problem_of(with_zero(R"("stage": 2)", R"("parameter_degree": 2)")).hint, "it belongs to ZeRO stage 3");
  EXPECT_EQ(problem_of(with_zero(R"("stage": 0)", R"("optimizer_degree": 2)")).hint,
            "it belongs to ZeRO stages 1 to 3");
}

TEST(ConfigDegrees, OneSetOfKeysSaysThemAndTheyNest) {
  const std::string hpz = R"("stage": 3, "zero_hpz_partition_size": 4)";
  const std::string mics = R"("stage": 3, "mics_shard_size": 4)";
  EXPECT_EQ(problem_of(with_zero(hpz + R"(, "mics_shard_size": 4)")).pointer, "/zero_optimization/mics_shard_size");
  EXPECT_EQ(problem_of(with_zero(hpz, R"("parameter_degree": 4)")).pointer, "/zeroth/parameter_degree");
  EXPECT_EQ(problem_of(with_zero(mics, R"("parameter_degree": 4)")).pointer, "/zeroth/parameter_degree");
  EXPECT_EQ(problem_of(with_zero(mics, R"("optimizer_degree": 8)")).pointer, "/zeroth/optimizer_degree");
  EXPECT_TRUE(problems_of(with_zero(hpz, R"("optimizer_degree": 8)")).empty());
  EXPECT_EQ(problem_of(with_zero(hpz, R"("optimizer_degree": 6)")).expected, "a multiple of 4");
  EXPECT_EQ(problem_of(with_zero(R"("stage": 3)", R"("optimizer_degree": 6)")).expected,
            "a parameter_degree that divides it");
  EXPECT_EQ(problem_of(with_zero(R"("stage": 3)", R"("parameter_degree": 4, "optimizer_degree": 2)")).pointer,
            "/zeroth/optimizer_degree");
  for (const std::string& states : {hpz, mics, std::string(R"("stage": 3)")}) {
    for (const char* degree : {"2", "4", "8"}) {
      EXPECT_TRUE(problems_of(with_zero(states, std::string(R"("gradient_degree": )") + degree)).empty())
          << states << degree;
    }
  }
  for (const std::string& states : {hpz, mics}) {
    const ConfigProblem problem = problem_of(with_zero(states, R"("gradient_degree": 6)"));
    EXPECT_EQ(problem.pointer, "/zeroth/gradient_degree");
    EXPECT_EQ(problem.expected, "a divisor or a multiple of 4");
  }
}

EngineSettings settings_of(const std::string& text, int world) {
  return make_settings(read(text), {.world = world, .on_host = world}, {GroupHyper{}});
}

TEST(ConfigDegrees, BecomeThePlan) {
  const auto chooses_blocks = [](ShardingPlan plan) {
    plan.residency.chooses_blocks = true;
    return plan;
  };
  const ShardingPlan hpz = settings_of(with_zero(R"("stage": 3, "zero_hpz_partition_size": 2)"), 4).plan;
  EXPECT_EQ(hpz, chooses_blocks(hpz_plan(2, {"dp"})));
  const ShardingPlan mics = settings_of(with_zero(R"("stage": 3, "mics_shard_size": 2)"), 4).plan;
  EXPECT_EQ(mics, chooses_blocks(mics_plan(2, {"dp"})));
  const ShardingPlan both =
      settings_of(with_zero(R"("stage": 3)", R"("parameter_degree": 2, "optimizer_degree": 4)"), 8).plan;
  EXPECT_EQ(both.degrees(8), (Degrees{.parameter = 2, .gradient = 8, .sums = 4, .optimizer = 4, .world = 8}));
  const ShardingPlan one = settings_of(with_zero(R"("stage": 1)", R"("optimizer_degree": 2)"), 4).plan;
  EXPECT_EQ(one.degrees(4), (Degrees{.parameter = 1, .gradient = 4, .sums = 2, .optimizer = 2, .world = 4}));
  EXPECT_EQ(settings_of(with_zero(R"("stage": 3)"), 4).plan, chooses_blocks(zero_plan(3, {"dp"})));
  const std::string blocks = R"({"zeroth": {"offload": {"block_elements": 1024}}})";
  EXPECT_FALSE(settings_of(blocks, 4).plan.residency.chooses_blocks);
  EXPECT_EQ(settings_of(with_zero(R"("stage": 0)", R"("gradient_degree": 2)"), 4).plan.degrees(4).gradient, 2);
}

TEST(ConfigCodes, BecomeThePlan) {
  const auto plan_of = [](const std::string& zero, const std::string& zeroth = "") {
    return settings_of(with_zero(zero, zeroth), 4).plan;
  };
  const ShardingPlan weights = plan_of(R"("stage": 3, "zero_quantized_weights": true, "zero_hpz_partition_size": 2)");
  EXPECT_EQ(weights.codes, (WireCodes{.parameter_bits = 8, .node_degree = 2}));
  EXPECT_EQ(weights.degrees(4).parameter, 4) << "a group keeps what it has gathered beside shards of all ranks";
  const ShardingPlan gradients =
      plan_of(R"("stage": 3, "zero_quantized_gradients": true, "zero_hpz_partition_size": 2)");
  EXPECT_EQ(gradients.codes, (WireCodes{.gradient_bits = 4, .node_degree = 2}));
  EXPECT_EQ(gradients.degrees(4).parameter, 2);
  const ShardingPlan all =
      plan_of(R"("stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": true)",
              R"("codes": {"gradient_bits": 8, "feedback": false, "block": 64, "node_degree": 2})");
  EXPECT_EQ(all.codes,
            (WireCodes{.parameter_bits = 8, .gradient_bits = 8, .feedback = false, .node_degree = 2, .block = 64}));
  EXPECT_FALSE(plan_of(R"("stage": 3)").codes.any());
}

TEST(ConfigCodes, RefuseWhatTheyDoNotGoWith) {
  const std::string gradients = R"("zero_quantized_gradients": true)";
  EXPECT_EQ(problem_of(with_zero(R"("stage": 2, "zero_quantized_weights": true)")).hint, "it belongs to ZeRO stage 3");
  EXPECT_EQ(problem_of(with_zero(R"("stage": 2)", R"("codes": {"feedback": false})")).hint,
            "it belongs to zero_quantized_gradients");
  EXPECT_TRUE(problems_of(with_zero(R"("stage": 3, "mics_shard_size": 2, )" + gradients)).empty());
  EXPECT_EQ(problem_of(with_zero(R"("stage": 3, "zero_hpz_partition_size": 2, )" + gradients,
                                 R"("codes": {"node_degree": 2})"))
                .pointer,
            "/zeroth/codes/node_degree");
  EXPECT_EQ(problem_of(R"({"fp16": {"enabled": true}, "zero_optimization": {)" + gradients + "}}").pointer,
            "/zeroth/codes/feedback");
  EXPECT_TRUE(problems_of(R"({"fp16": {"enabled": true, "loss_scale": 128}, "zero_optimization": {)" + gradients + "}}")
                  .empty());
}

TEST(ConfigDegrees, MustDivideTheRanks) {
  for (const std::string& text :
       {with_zero(R"("stage": 3, "zero_hpz_partition_size": 3)"), with_zero(R"("stage": 3, "mics_shard_size": 8)"),
        with_zero(R"("stage": 2)", R"("optimizer_degree": 3)"),
        with_zero(R"("stage": 2)", R"("gradient_degree": 3)")}) {
    try {
      (void)settings_of(text, 4);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      const bool gradients = text.find("gradient_degree") != std::string::npos;
      EXPECT_NE(std::string(error.what()).find(gradients ? "zeroth.gradient_degree" : "zero_hpz_partition_size"),
                std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace zeroth::test
