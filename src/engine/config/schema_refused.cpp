// Refused keys: they would change what is trained, where memory lies, or which files appear, and are not
// built. Each row says which values ask for nothing; those are accepted, because generated documents spell
// them out.
#include "engine/config/schema.h"

#include <array>

namespace zeroth::config {
namespace {

constexpr KeySpec value(std::string_view pointer, KeyKind kind, std::string_view off, std::string_view why) {
  return {.pointer = pointer, .key_class = KeyClass::kRefused, .kind = kind, .text = why, .off = off};
}
constexpr KeySpec flag(std::string_view pointer, std::string_view why, std::string_view off = "false") {
  return value(pointer, KeyKind::kAny, off, why);
}
constexpr KeySpec section(std::string_view pointer, std::string_view members, std::string_view why,
                          std::string_view off = "?enabled=false") {
  return {.pointer = pointer,
          .key_class = KeyClass::kRefused,
          .kind = KeyKind::kSection,
          .text = why,
          .members = members,
          .off = off};
}

constexpr std::string_view kOffload = "offload_optimizer and offload_param say where states rest";
constexpr std::string_view kLowReduction = "gradients are summed and accumulated in fp32, from what was computed";
constexpr std::string_view kMonitor = "no monitor is built; the program writes its own records";
constexpr std::string_view kData = "the program owns its data; data schedules are not built";
constexpr std::string_view kCompression = "compression is not built";
constexpr std::string_view kCheckpoint =
    "engine.save() and engine.load() write and read checkpoints; zeroth ckpt convert reads universal ones";
constexpr std::string_view kActivations =
    "recompute in the model; zeroth.activations says where inputs of what is recomputed rest";
constexpr std::string_view kRule = "this variant of the update is not built";
constexpr std::string_view kParallel = "zeroth.mesh.ep says how many ranks have other experts";
constexpr std::string_view kSplit = "plan and corrections are arguments of zeroth.parallelize()";
constexpr std::string_view kMasters = "masters, moments and accumulated gradients are fp32";

constexpr std::array kKeys{
    flag("/managed_gradient_accumulation", "every call of step() ends a micro-step, and the last one updates", "true"),
    flag("/gradient_allreduce_op", "gradients are averaged over ranks and micro-steps", "\"mean\""),
    value("/communication_data_type", KeyKind::kAny, "null|\"fp32\"", kLowReduction),
    flag("/disable_allgather", "updated parameters must reach every rank"),
    flag("/dataloader_drop_last", "the program owns its data; it decides about the last batch"),
    flag("/use_data_before_expert_parallelism", "ranks with other experts are neighbours: ep lies inside dp"),

    flag("/fp16/fp16_master_weights_and_grads", kMasters),
    flag("/bf16/bf16_master_weights_and_grads", kMasters),
    flag("/bf16/bf16_optimizer_states", kMasters),
    section("/torch_autocast", "enabled|dtype|lower_precision_safe_modules", "autocast is not built; use bf16.enabled"),
    section("/amp", "", "apex is not supported; use bf16.enabled"),
    value("/data_types/grad_accum_dtype", KeyKind::kAny, "null|\"fp32\"", kLowReduction),
    value("/data_types/param_dtype", KeyKind::kAny, "null",
          "parameters have the dtype of the model, or of bf16 or fp16"),
    value("/data_types/buffer_dtype", KeyKind::kAny, "null", "buffers have the dtype of the model"),

    flag("/optimizer/params/amsgrad", kRule),
    flag("/optimizer/params/fp32_optimizer_states", kMasters, "true"),
    flag("/optimizer/params/maximize", kRule),
    value("/optimizer/params/max_grad_norm", KeyKind::kAny, "null|0", "clipping is set by gradient_clipping"),
    value("/scheduler/params/last_batch_iteration", KeyKind::kAny, "-1", "a schedule starts at the first step"),

    flag("/zero_optimization/elastic_checkpoint", kCheckpoint),
    flag("/zero_optimization/ignore_unused_parameters",
         "an unused parameter contributes zero, on one rank as on all; making it an error is not built", "true"),
    flag("/zero_optimization/offload_optimizer/super_offload", "zeroth.update.inside_backward does this"),
    value("/zero_optimization/cpu_offload", KeyKind::kAny, "null|false", kOffload),
    value("/zero_optimization/cpu_offload_param", KeyKind::kAny, "null|false", kOffload),
    value("/zero_optimization/zenflow", KeyKind::kAny, "null", kOffload),
    flag("/zero_optimization/zero_quantized_nontrainable_weights",
         "zero_quantized_weights takes matrices that are not trained, too"),
    value("/zero_optimization/zeropp_loco_param", KeyKind::kAny, "null",
          "zeroth.codes.feedback keeps errors; they are neither averaged nor reset"),
    flag("/zero_optimization/save_muon_momentum_buffer_in_memory", "Muon is not built"),
    flag("/zero_optimization/legacy_stage1", "there is one path for all stages"),

    flag("/activation_checkpointing/partition_activations", kActivations),
    flag("/activation_checkpointing/contiguous_memory_optimization", kActivations),
    flag("/checkpoint/load_universal", kCheckpoint),
    section("/nebula", "", kCheckpoint),
    section("/datastates_ckpt", "", kCheckpoint, ""),

    value("/tensor_parallel/dtype", KeyKind::kAny, "null", kSplit),
    flag("/tensor_parallel/tp_overlap_comm", kSplit),
    value("/tensor_parallel/tp", KeyKind::kAny, "null|{}|{\"tp_size\":1}",
          "the size is autotp_size, or zeroth.mesh.tp"),
    value("/tensor_parallel/partition_config", KeyKind::kAny, "null", kSplit),
    value("/tensor_parallel/preset_model", KeyKind::kAny, "null", kSplit),
    value("/tensor_parallel/injection_policy_tuple", KeyKind::kAny, "null", kSplit),
    flag("/tensor_parallel/keep_module_on_host", kSplit),
    section("/expert_parallel", "", kParallel),
    section("/compile", "", "DeepCompile is not built", "?deepcompile=false"),
    section("/elasticity", "", "a job keeps the ranks it started with"),
    section("/hybrid_engine", "", "generation is not built"),
    section("/autotuning", "", "nothing is tuned by trial runs"),
    section("/sparse_attention", "", "attention is the model's own", "mode=\"dense\""),

    section("/tensorboard", "enabled|output_path|job_name", kMonitor),
    section("/csv_monitor", "enabled|output_path|job_name", kMonitor),
    section("/wandb", "enabled|team|group|project", kMonitor),
    section("/comet",
            "enabled|samples_log_interval|project|workspace|api_key|experiment_name|experiment_key|online|mode",
            kMonitor),

    section("/data_efficiency", "", kData),
    section("/curriculum_learning", "", kData),
    section("/progressive_layer_drop", "", "skipping layers is not built"),
    section("/compression_training", "", kCompression, ""),
    section("/quantize_training", "", kCompression),
    section("/weight_quantization", "", kCompression, ""),
    section("/eigenvalue", "", kCompression),
};

constexpr std::array kAliases{
    KeyAlias{"/bfloat16", "/bf16"},
    KeyAlias{"/sequence_parallel_size", "/zeroth/mesh/sp"},
    KeyAlias{"/tensor_parallel/autotp_size", "/zeroth/mesh/tp"},
    KeyAlias{"/pipeline/stages", "/zeroth/mesh/pp"},
    KeyAlias{"/pipeline/partition", "/zeroth/pipeline/split"},
    KeyAlias{"/optimizer/params/adamw_mode", "/optimizer/params/adam_w_mode"},
    KeyAlias{"/zero_optimization/stage3_gather_fp16_weights_on_model_save",
             "/zero_optimization/stage3_gather_16bit_weights_on_model_save"},
};

}  // namespace

std::span<const KeySpec> refused_keys() {
  return kKeys;
}
std::span<const KeyAlias> key_aliases() {
  return kAliases;
}

}  // namespace zeroth::config
