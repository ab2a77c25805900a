// Hints: keys that tune how DeepSpeed works, or what it prints. They take any value: programs that fill in a
// document for DeepSpeed put there what DeepSpeed takes, such as infinity for steps_per_print.
#include "engine/config/schema.h"

#include <array>

namespace zeroth::config {
namespace {

constexpr KeySpec hint(std::string_view pointer, std::string_view default_text, std::string_view instead) {
  return {.pointer = pointer,
          .key_class = KeyClass::kHint,
          .kind = KeyKind::kAny,
          .text = instead,
          .default_text = default_text};
}
constexpr KeySpec section(std::string_view pointer, std::string_view members, std::string_view instead) {
  return {.pointer = pointer,
          .key_class = KeyClass::kHint,
          .kind = KeyKind::kSection,
          .text = instead,
          .default_text = "absent",
          .members = members};
}

constexpr std::string_view kUnits = "a unit (by default one repeated block) is the grain of communication";
constexpr std::string_view kAhead = "gathering ahead is set by zeroth.prefetch_units";
constexpr std::string_view kLive = "gathered parameters live in zeroth.ring_slots fixed slots";
constexpr std::string_view kBucket = "one bucket per unit, sized from the plan";
constexpr std::string_view kInMemory = "max_in_cpu says it, in blocks of zeroth.offload.block_elements";
constexpr std::string_view kFactor = "ranks only sum; averaging is one factor in the update";
constexpr std::string_view kFused = "the update is always one fused pass over flat state";
constexpr std::string_view kTransport = "messages go over the transport of the job";
constexpr std::string_view kNoTape = "engine.save() writes checkpoints its own way, on any ranks, for any stage";
constexpr std::string_view kScatter = "zeroth.pipeline.scatter says whether ranks of tp send slices";
constexpr std::string_view kReport = "StepResult and the engine's report hold the figures; the program prints them";

constexpr std::array kKeys{
    hint("/steps_per_print", "null", "the program prints what StepResult holds"),
    hint("/prescale_gradients", "false", kFactor),
    hint("/gradient_predivide_factor", "1.0", kFactor),
    hint("/seq_parallel_communication_data_type", "\"fp32\"", "sequences are not split over ranks"),
    hint("/dump_state", "false", "the engine logs each value and where it came from"),
    hint("/memory_breakdown", "false", kReport),
    hint("/wall_clock_breakdown", "false", kReport),
    hint("/zero_allow_untested_optimizer", "false", "every optimizer that is built works at every stage"),
    hint("/zero_force_ds_cpu_optimizer", "true", "the optimizer runs where the state lies"),
    hint("/graph_harvesting", "false", "there are no CUDA graphs on the CPU"),
    hint("/log_level", "null", "the program gives the engine its Logger"),
    hint("/vocabulary_size", "null", "the model is trained as it is; padding the vocabulary is its own matter"),

    hint("/sparse_gradients", "false", "sparse gradients of embeddings become dense ones, as torch computes them"),
    hint("/bf16/immediate_grad_update", "false", "gradients go into their bucket as soon as they are there"),
    hint("/bf16/check_grad_overflow", "true", "non-finite gradients are found in the copy into the bucket, always"),

    hint("/optimizer/legacy_fusion", "false", kFused),
    hint("/optimizer/params/torch_adam", "false", kFused),
    hint("/optimizer/params/fused", "null", kFused),
    hint("/optimizer/params/cuda_aware", "false", kTransport),
    hint("/optimizer/params/comm_backend_name", "\"nccl\"", kTransport),
    hint("/optimizer/params/foreach", "null", kFused),
    hint("/optimizer/params/set_grad_none", "true", "the gradient of a parameter is released once it is in its bucket"),

    hint("/zero_optimization/mics_hierarchical_params_gather", "false",
         "what crosses between nodes does so once, wherever the transport has two levels"),
    hint("/zero_optimization/contiguous_gradients", "true", "gradients are copied into flat buckets, always"),
    hint("/zero_optimization/reduce_scatter", "true", "gradients are reduced to their owners, always"),
    hint("/zero_optimization/use_multi_rank_bucket_allreduce", "true", "gradients are reduced to their owners, always"),
    hint("/zero_optimization/reduce_bucket_size", "500000000", kBucket),
    hint("/zero_optimization/allgather_bucket_size", "500000000", kBucket),
    hint("/zero_optimization/allgather_partitions", "true", "updated shards are gathered in place, always"),
    hint("/zero_optimization/overlap_comm", "null", "on the CPU, work runs inline; nothing is there to overlap with"),
    hint("/zero_optimization/load_from_fp32_weights", "true", kNoTape),
    hint("/zero_optimization/round_robin_gradients", "false", "buckets close in the order of the units"),
    hint("/zero_optimization/sub_group_size", "1000000000", "the update runs block by block over each shard"),
    hint("/zero_optimization/stage3_prefetch_bucket_size", "50000000", kAhead),
    hint("/zero_optimization/stage3_param_persistence_threshold", "100000", kUnits),
    hint("/zero_optimization/stage3_model_persistence_threshold", "9223372036854775807", kUnits),
    hint("/zero_optimization/stage3_max_live_parameters", "1000000000", kLive),
    hint("/zero_optimization/stage3_max_reuse_distance", "1000000000", kLive),
    hint("/zero_optimization/stage3_gather_16bit_weights_on_model_save", "false",
         "an export streams the weights unit by unit from rank 0"),
    hint("/zero_optimization/stage3_module_granularity_threshold", "0", kUnits),
    hint("/zero_optimization/stage3_use_all_reduce_for_fetch_params", "false", "shards are pulled into their slot"),
    hint("/zero_optimization/stage3_allgather_sequential", "false", "shards are pulled into their slot"),
    hint("/zero_optimization/memory_efficient_linear", "true", "autograd sees the gathered slot; nothing is patched"),
    hint("/zero_optimization/override_module_apply", "true", "a model is whole while it is built; nothing is patched"),
    hint("/zero_optimization/pipeline_loading_checkpoint", "false", kNoTape),
    hint("/zero_optimization/log_trace_cache_warnings", "false", "slots that overflow are counted in the report"),
    hint("/zero_optimization/enable_sanity_checks", "false", "both sides of every message compare its tag, always"),
    section("/zero_optimization/leaf_module", "classes|names|name_suffixes", "units are chosen in the program"),
    hint("/zero_optimization/cpu_offload_use_pin_memory", "false", "ranks of a CPU have one memory"),
    hint("/zero_optimization/offload_optimizer/pin_memory", "false", "ranks of a CPU have one memory"),
    hint("/zero_optimization/offload_optimizer/pipeline_read", "false", "blocks are always read ahead"),
    hint("/zero_optimization/offload_optimizer/pipeline_write", "false", "blocks are always written behind"),
    hint("/zero_optimization/offload_optimizer/fast_init", "false", "a block that nobody wrote takes no transfer"),
    hint("/zero_optimization/offload_param/pin_memory", "false", "ranks of a CPU have one memory"),
    hint("/zero_optimization/offload_param/buffer_count", "5", kInMemory),
    hint("/zero_optimization/offload_param/buffer_size", "1e8", kInMemory),
    hint("/zero_optimization/offload_optimizer/cpuadam_cores_perc", "0.8", "zeroth.threads says it"),

    hint("/activation_checkpointing/number_checkpoints", "null", "the model decides what it recomputes"),
    hint("/activation_checkpointing/synchronize_checkpoint_boundary", "false", "the model decides what it recomputes"),
    hint("/activation_checkpointing/profile", "false", kReport),
    hint("/aio/intra_op_parallelism", "1", "the kernel moves the bytes; the engine `threads` has four threads"),
    hint("/aio/thread_count", "1", "the kernel moves the bytes; the engine `threads` has four threads"),
    hint("/aio/single_submit", "false", "what is asked for at once is submitted at once"),
    hint("/aio/overlap_events", "true", "transfers always overlap"),
    hint("/aio/use_gds", "false", "bytes pass through host memory"),
    hint("/checkpoint/tag_validation", "\"Warn\"", kNoTape),
    hint("/checkpoint/use_node_local_storage", "false", kNoTape),
    section("/checkpoint/parallel_write", "pipeline_stage", kNoTape),
    hint("/checkpoint/checkpoint_serialization", "true", kNoTape),
    section("/checkpoint/writer",
            "type|decoupled|io_buffer_size|io_buffer_double|show_statistics|data_parallel|io_multiplier", kNoTape),
    hint("/pipeline/seed_layers", "false", "every layer of a list has a seed of its own, always"),
    hint("/pipeline/pipe_partitioned", "true", kScatter),
    hint("/pipeline/grad_partitioned", "true", kScatter),
    hint("/pipeline/use_reentrant", "true", "layers of a list are recomputed without reentrance"),
    section("/timers", "throughput", kReport),
    section("/comms_logger", "enabled|verbose|prof_all|debug|prof_ops", "bytes and calls are counted in the report"),
    section("/flops_profiler",
            "enabled|recompute_fwd_factor|profile_step|module_depth|top_modules|detailed|output_file", kReport),
};

}  // namespace

std::span<const KeySpec> hint_keys() {
  return kKeys;
}

}  // namespace zeroth::config
