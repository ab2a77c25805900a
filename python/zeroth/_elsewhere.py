"""Names that DeepSpeed, DDP and FSDP give their engines, and what they are here.

An engine has names of its own. A program that was written for another library learns the place of a name from the
AttributeError, which leaves hasattr() and getattr(..., default) as they are.
"""

from typing import Any

__all__ = ["Value", "missing"]

_BY_HAND = "leave it out"
_BATCH = 'engine.config.batch_sizes(engine.world_size)["{}"]'
_SAVE = "engine.save(folder, client_state=...) writes a checkpoint on any number of ranks"
_LOAD = "engine.load(folder) brings the newest checkpoint, and returns its client_state"
_EXPORT = "engine.export_safetensors(path) writes all weights in one file"
_WEIGHTS = "engine.state_dict() gives whole weights on rank 0, or on ranks=...; all ranks call it"
_LOADED = "engine.load_state_dict(values) takes rank 0's whole weights; all ranks call it"
_BOUNDARY = (
    "engine.step() ends a micro-step, and gradient_accumulation_steps says which one ends a step: result.boundary tells"
)
_NORM = "result.grad_norm of result = engine.step()"
_REDUCED = f"{_BY_HAND}: engine.step() takes gradients that are reduced over the ranks"
_SCALE = "engine.loss_scale, a number; result.loss_scale is that of a step"
_SCHEDULER = "the fourth value of zeroth.initialize() is the scheduler; engine.learning_rates has the rates"
_ACCUMULATE = (
    f"{_BY_HAND}: engine.step() after each micro-batch knows which one ends a step; zeroth.reduction_policy says when "
    "gradients are summed over ranks"
)
_CLIP = "gradient_clipping in the configuration bounds the norm; result.grad_norm of engine.step() is the norm"
_GATHER = "with engine.gathered(parameters): ... has whole parameters at every stage"
_BATCH_FIXED = "batch sizes are the configuration's, for as long as the engine lives"
_TIERS = "zero_optimization.offload_optimizer and offload_param say where states rest, for as long as the engine lives"
_COUNTED = "count in your loop: engine.step() returns a result for each micro-step"
_MESH = "engine.config.mesh(engine.world_size)[{!r}]"
_GROUP = "zeroth.World.from_environment().mesh(engine.config.mesh(engine.world_size)).axis({!r})"
_REPORTS = "the result of engine.step() holds the figures, and engine.memory_report() and wire_report() the rest"

_PLACES: dict[str, str] = {
    # checkpoints and weights
    "save_checkpoint": _SAVE,
    "load_checkpoint": _LOAD,
    "save_16bit_model": _EXPORT,
    "save_fp16_model": _EXPORT,
    "module_state_dict": _WEIGHTS,
    "_zero3_consolidated_16bit_state_dict": _WEIGHTS,
    "_consolidated_16bit_state_dict": _WEIGHTS,
    "load_module_state_dict": _LOADED,
    "checkpoint_engine": _SAVE,
    "zero_gather_16bit_weights_on_model_save": _WEIGHTS,
    "loaded_checkpoint_dp_world_size": "engine.load(folder) returns world_size, the ranks that wrote the checkpoint",
    "loaded_checkpoint_mp_world_size": "engine.load(folder) returns world_size, the ranks that wrote the checkpoint",
    # counts
    "global_steps": "engine.steps, which counts committed steps; skipped ones are in neither",
    "skipped_steps": "count results of engine.step() with boundary and without committed",
    "was_step_applied": "result.committed of result = engine.step()",
    "global_samples": "add up result.batches, the micro-batches of all ranks in a step",
    "micro_steps": _COUNTED,
    "overflow": "result.cause of engine.step() is 'overflow'",
    # accumulation and gradients
    "is_gradient_accumulation_boundary": _BOUNDARY,
    "set_gradient_accumulation_boundary": _BOUNDARY,
    "no_sync": _ACCUMULATE,
    "require_backward_grad_sync": _ACCUMULATE,
    "set_requires_gradient_sync": _ACCUMULATE,
    "coalesce_grad_reduction": _ACCUMULATE,
    "allreduce_gradients": _REDUCED,
    "reduce_gradients": _REDUCED,
    "get_global_grad_norm": _NORM,
    "clip_grad_norm_": _CLIP,
    "gradient_clipping": "gradient_clipping in the configuration; engine.config.describe() has its value",
    "scale": f"{_BY_HAND}: loss.backward() and engine.backward(loss) apply the loss scale",
    "cur_scale": _SCALE,
    "dynamic_loss_scale": _SCALE,
    "loss_scaler": _SCALE,
    # sizes
    "train_batch_size": _BATCH.format("train_batch_size"),
    "train_micro_batch_size_per_gpu": _BATCH.format("train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": "engine.config.micro_steps(engine.world_size)",
    "get_batch_info": "engine.config.batch_sizes(engine.world_size)",
    "set_train_batch_size": _BATCH_FIXED,
    "set_train_micro_batch_size": _BATCH_FIXED,
    "set_gradient_accumulation_steps": _BATCH_FIXED,
    # configuration
    "_config": "engine.config",
    "zero_optimization_stage": "engine.config.zero_stage",
    "zero_optimization": "engine.config.zero_stage > 0",
    "zero_optimization_partition_weights": "engine.config.zero_stage == 3",
    "zero_optimization_partition_gradients": "engine.config.zero_stage >= 2",
    "fp16_enabled": "next(engine.module.parameters()).dtype == torch.float16",
    "bfloat16_enabled": "next(engine.module.parameters()).dtype == torch.bfloat16",
    "monitor": "no monitor is built: write what the result of engine.step() holds",
    "wall_clock_breakdown": _REPORTS,
    "timers": _REPORTS,
    "tput_timer": _REPORTS,
    "flops_profiler": _REPORTS,
    # rates and optimizers
    "lr_scheduler": _SCHEDULER,
    "client_lr_scheduler": _SCHEDULER,
    "get_lr": "engine.learning_rates",
    "set_lr": 'group["lr"] = rate for each group of engine.optimizer.param_groups',
    "get_mom": 'engine.optimizer.param_groups[0]["betas"], or ["momentum"] of SGD',
    "client_optimizer": "engine.optimizer; the configuration names its type",
    "basic_optimizer": "engine.optimizer; the configuration names its type",
    "parameter_offload": _GATHER,
    # ranks
    "global_rank": "engine.rank",
    "local_rank": "zeroth.World.from_environment().local_rank",
    "dp_world_size": _MESH.format("dp"),
    "mp_world_size": _MESH.format("tp"),
    "seq_dp_world_size": _MESH.format("dp"),
    "get_data_parallel_world_size": _MESH.format("dp"),
    "get_data_parallel_rank": _GROUP.format("dp") + ".rank",
    "get_data_parallel_group": _GROUP.format("dp"),
    "data_parallel_group": _GROUP.format("dp"),
    "get_model_parallel_world_size": _MESH.format("tp"),
    "get_model_parallel_rank": _GROUP.format("tp") + ".rank",
    "get_model_parallel_group": _GROUP.format("tp"),
    "get_sequence_parallel_group": _GROUP.format("sp"),
    "mpu": _GROUP.format("tp"),
    "process_group": _GROUP.format("dp"),
    # data
    "deepspeed_io": "make a DataLoader, with a DistributedSampler over engine.world_size",
    "training_dataloader": "your own DataLoader; engine.batches(loader) takes ranks with different numbers of batches",
    "set_data_post_process_func": "engine.set_batch_fn(fn)",
    "data_iterator": "engine.set_dataiterator(iterator), or train_batch(iterator)",
    # the model
    "compile": "engine.module.compile(), before or after the engine is built",
    "is_compiled": "engine.module.compile() compiles",
    "param_names": "{parameter: name for name, parameter in engine.module.named_parameters()}",
    "summon_full_params": _GATHER,
    "unshard": _GATHER,
    "reshard": _GATHER,
    "offload_states": _TIERS,
    "reload_states": _TIERS,
    "empty_partition_cache": f"{_BY_HAND}: gathered parameters lie in slots that are planned",
    # the end
    "destroy": "engine.close()",
}
"""Each name, and what is meant: a call or value of the same meaning, or what to do instead."""


class Value(float):
    """A number that another library has as a method: a call says so."""

    def __new__(cls, value: float, name: str) -> "Value":
        self = super().__new__(cls, value)
        self._name = name
        return self

    _name: str

    def __call__(self) -> float:
        raise TypeError(f"{self._name} is a number: write it without ()")


def missing(name: str, module: Any) -> str:
    """What an AttributeError of an engine says about a name that it has not. `module`: that it trains; None while it
    is being built."""
    text = f"zeroth.Engine has no {name!r}"
    if name in _PLACES:
        return f"{text}: {_PLACES[name]}"
    return f"{text}, its module has: engine.module.{name}" if hasattr(module, name) else text
