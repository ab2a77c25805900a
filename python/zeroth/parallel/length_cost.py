"""What a sequence costs on so many ranks: a formula, for plan_batch()."""

import dataclasses

__all__ = ["SequenceCost"]

_MEETING_TOKENS = 64
"""tokens whose products take as long as the calls of a shared sequence: 4 calls a layer and direction of 20 us against
2.5 us a token and layer, as with h = 1024 at 30 Tflop/s"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCost:
    """Time of a sequence of s tokens, forward and backward, on each of the k ranks that share it:

        (linear s + attention s^2) / k + exchange s (k - 1) / k^2 + fixed, and + meeting if k > 1

    in whatever unit the coefficients have; only their relations matter to a plan. A frozen value; call it with (s, k).
    """

    linear: float = 1.0
    """of a token: products with weights"""
    attention: float = 0.0
    """of a pair of tokens"""
    exchange: float = 0.0
    """of a token that goes to other ranks: Ulysses moves 4 s h / k (k - 1) / k elements a rank and layer"""
    fixed: float = 0.0
    """of a sequence by itself"""
    meeting: float | None = None
    """of a sequence that ranks share: what their calls take however short it is. None: 64 tokens' linear time"""

    def __call__(self, length: int, ranks: int) -> float:
        compute = (self.linear * length + self.attention * length * length) / ranks
        alone = compute + self.exchange * length * (ranks - 1) / (ranks * ranks) + self.fixed
        meeting = _MEETING_TOKENS * self.linear if self.meeting is None else self.meeting
        return alone + meeting if ranks > 1 else alone

    @classmethod
    def of_decoder(
        cls,
        *,
        hidden: int,
        layers: int,
        intermediate: int | None = None,
        kv_share: float = 1.0,
        flops_per_s: float,
        bytes_per_s: float,
        call_s: float = 20e-6,
        element_bytes: int = 2,
    ) -> "SequenceCost":
        """In seconds, of a decoder with causal attention. `intermediate`: of a gated MLP, default 8 h / 3; `kv_share`:
        key and value heads by query heads; `call_s`: time of a call between ranks, four a layer in each direction.
        Backward computes twice what forward does, and exchanges as much. Ref: Megatron-LM's 24 s h^2 + 4 s^2 h
        operations a layer (Narayanan et al., 2021, arXiv 2104.04473), half of the second under a causal mask; volume of
        Ulysses: Jacobs et al., 2023, arXiv 2309.14509."""
        weights = (2 + 2 * kv_share) * hidden * hidden + 3 * hidden * (intermediate or 8 * hidden / 3)
        return cls(
            linear=3 * 2 * weights * layers / flops_per_s,
            attention=3 * 2 * hidden * layers / flops_per_s,
            exchange=2 * (2 + 2 * kv_share) * hidden * layers * element_bytes / bytes_per_s,
            meeting=2 * 4 * layers * call_s,
        )
