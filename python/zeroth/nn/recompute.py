"""Layers that are computed again in backward, and whose calls between ranks are made once."""

from contextlib import AbstractContextManager

from zeroth import _C

__all__ = ["keep_calls"]


def keep_calls() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Keeps the results of calls between ranks of a checkpointed region, so that its recompute makes none.

        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=zeroth.nn.keep_calls)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": zeroth.nn.keep_calls})

    The rows that experts got and brought, and what ranks along tp and sp summed and gathered, stay in memory from the
    forward to the recompute. Bits are those without it. A region that calls otherwise when it is computed again raises
    Error MISMATCH, and so does one that writes in place to the result of a call. It is not for use_reentrant=True,
    which takes no contexts."""
    kept = _C.KeptCalls()
    return kept.record(), kept.hand_out()
