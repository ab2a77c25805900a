"""Balance of experts without a loss, for models that have a bias of the choice."""

from torch import nn

from zeroth import _C, _expert_use

__all__ = ["update_balance_bias"]


def update_balance_bias(model: nn.Module, rate: float = 1e-3) -> int:
    """Moves the buffers `e_score_correction_bias` of a model (DeepSeek-V3, GLM-4-MoE, ...) by `rate` towards experts
    with less than their part of the choices of the last step, on all ranks and of all its micro-batches. Returns how
    many there are. After Engine.step(), where that updated (StepResult.boundary):

        if engine.step().boundary:
            zeroth.nn.update_balance_bias(engine.module, 1e-3)

    A layer of zeroth.nn.MoE(balance="bias") does it itself. Collective: Engine.moe_report(everywhere=True). The buffers
    stay the same on all ranks. Raises Error USAGE for a model without an engine or without such buffers, or where they
    have 16 bits, which would lose small steps. Ref: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", 2024, algorithm 1."""
    layers = _expert_use.layers_of(model)
    found = [] if layers is None else list(_expert_use.biases(model, layers))
    if layers is None or not found:
        raise _C.make_error(
            "USAGE",
            "the model has no bias of the choice that could move",
            where="nn.balance",
            which=type(model).__name__,
            expected="a model of an Engine, with buffers e_score_correction_bias beside its layers of experts",
            got="no engine" if layers is None else f"layers of experts: {', '.join(layers.found) or 'none'}",
            hint='balance="bias" of zeroth.nn.MoE does it itself',
        )
    loads = {use.name: use.chosen for use in layers.everywhere()}
    for layer, bias in found:
        _C.update_balance_bias(bias.detach().view(-1), loads[layer], rate)
    return len(found)
