"""A decoder-only transformer for byte tokens: pre-norm RMSNorm, rotary positions, SwiGLU, tied embedding.

The operations, their order, the names of the parameters and their initial values are those of
examples/gpt_cpp/model.cpp: both trainers compute the same bits.

Shape letters: B batch, T sequence, D model width, N heads, H head width (D / N), h = H / 2, F hidden width of the MLP,
V vocabulary.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from rng import digest64, key_of, scaled_uniform
from torch import Tensor, nn

import zeroth
from zeroth.parallel import Cut, VocabEmbedding, copy_to_group, gather_from_group, vocab_cross_entropy

DEVIATION = 0.02
"""standard deviation of initial values"""
ROTARY_BASE = 10000.0
NORM_EPSILON = 1e-6


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class ModelOptions:
    layers: int
    d_model: int
    heads: int
    seq: int
    """longest sequence"""
    seed: int
    """of the initial values"""
    dtype: torch.dtype
    vocab: int = 256

    @property
    def hidden_width(self) -> int:
        """Of the SwiGLU MLP: 8/3 of D, rounded to a multiple of 32, so that a block holds about 12 D^2 numbers."""
        return max(32, (self.d_model * 8 // 3 + 16) // 32 * 32)

    @property
    def residual_deviation(self) -> float:
        """Projections that write into the residual stream start smaller, so that its variance does not grow with the
        depth.
        Ref: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3."""
        return DEVIATION / math.sqrt(2.0 * self.layers)


class Projection(nn.Linear):
    """A matrix without bias and without torch's own initialisation; Gpt fills it."""

    def __init__(self, num_in: int, num_out: int, deviation: float, dtype: torch.dtype) -> None:
        """Weight [num_out, num_in]; initial standard deviation `deviation`."""
        super().__init__(num_in, num_out, bias=False, dtype=dtype)
        self.deviation = deviation

    def reset_parameters(self) -> None:
        pass


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension. Ref: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019,
    eq. 4."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPSILON)


class Rotary:
    """Tables of rotary positions, shared by all blocks; neither parameters nor buffers.
    Ref: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, eq. 34."""

    def __init__(self, head_width: int, seq: int, dtype: torch.dtype) -> None:
        position_T = torch.arange(seq, dtype=torch.float64)
        exponent_h = torch.arange(0, head_width, 2, dtype=torch.float64) / float(head_width)
        angle_T11h = torch.outer(position_T, torch.pow(ROTARY_BASE, -exponent_h)).view(seq, 1, 1, -1)
        self.cos_T11h = angle_T11h.cos().to(dtype)
        self.sin_T11h = angle_T11h.sin().to(dtype)

    def rotate(self, x_BT2NH: Tensor) -> Tensor:
        """Rotates the pairs (h, h + H/2) of queries and keys [B, T, 2, N, H], in their dtype."""
        length = x_BT2NH.size(1)
        cos = self.cos_T11h.narrow(0, 0, length).to(x_BT2NH.dtype)
        sin = self.sin_T11h.narrow(0, 0, length).to(x_BT2NH.dtype)
        first, second = x_BT2NH.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal self-attention with queries, keys and values from one matrix."""

    def __init__(self, options: ModelOptions, rotary: Rotary) -> None:
        super().__init__()
        width = options.d_model
        self.num_heads = options.heads
        self.head_dim = width // options.heads
        self.rotary = rotary
        self.qkv = Projection(width, 3 * width, DEVIATION, options.dtype)
        self.out = Projection(width, width, options.residual_deviation, options.dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        qkv_BT3NH = self.qkv(x_BTD).view(B, T, 3, -1, self.head_dim)  # N: of this rank, if ranks share the heads
        qk_BT2NH = self.rotary.rotate(qkv_BT3NH.narrow(2, 0, 2))
        q_BNTH = qk_BT2NH.select(2, 0).transpose(1, 2)
        k_BNTH = qk_BT2NH.select(2, 1).transpose(1, 2)
        v_BNTH = qkv_BT3NH.select(2, 2).transpose(1, 2)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        y_BTD: Tensor = self.out(y_BNTH.transpose(1, 2).reshape(B, T, -1))
        return y_BTD


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)). Ref: Shazeer, "GLU Variants Improve Transformer", 2020, eq. 6."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.gate_up = Projection(options.d_model, 2 * options.hidden_width, DEVIATION, options.dtype)
        self.down = Projection(options.hidden_width, options.d_model, options.residual_deviation, options.dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, -1)
        y_BTD: Tensor = self.down(F.silu(gate_BTF) * up_BTF)
        return y_BTD


class Block(nn.Module):
    """The grain in which Zeroth gathers parameters and reduces gradients; embedding and last norm belong to the root
    unit."""

    def __init__(self, options: ModelOptions, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(options.d_model, options.dtype)
        self.attention = Attention(options, rotary)
        self.mlp_norm = RmsNorm(options.d_model, options.dtype)
        self.mlp = Mlp(options)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD: Tensor = x_BTD + self.attention(self.attention_norm(x_BTD))
        y_BTD: Tensor = h_BTD + self.mlp(self.mlp_norm(h_BTD))
        return y_BTD


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class SharedVocabulary:
    group: zeroth.Communicator
    embedding: VocabEmbedding
    sizes: list[int]
    """rows of each rank"""


class Gpt(nn.Module):
    def __init__(self, options: ModelOptions) -> None:
        """Initial values are a function of `options.seed` and the parameter's name only; no torch generator is
        touched."""
        super().__init__()
        self.vocab = options.vocab
        self.shared: SharedVocabulary | None = None
        self.embedding = nn.Parameter(torch.empty(options.vocab, options.d_model, dtype=options.dtype))
        rotary = Rotary(options.d_model // options.heads, options.seq, options.dtype)
        self.blocks = nn.ModuleList(Block(options, rotary) for _ in range(options.layers))
        self.last_norm = RmsNorm(options.d_model, options.dtype)
        _fill(self.embedding, "embedding", options.seed, DEVIATION)
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                _fill(module.weight, name, options.seed, module.deviation)

    def forward(self, x_BT: Tensor, y_BT: Tensor | None = None) -> Tensor:
        """`x_BT`: int64 tokens; `y_BT`: int64 next tokens. Returns the mean cross entropy in nats (a scalar; float32,
        or float64 in such a model), or without y the logits [B, T, V]."""
        shared = self.shared
        h_BTD = shared.embedding(x_BT) if shared else F.embedding(x_BT, self.embedding)
        for block in self.blocks:
            h_BTD = block(h_BTD)
        h_BTD = self.last_norm(h_BTD)
        if shared:
            h_BTD = copy_to_group(h_BTD, shared.group)
        logits_BTV = F.linear(h_BTD, self.embedding)
        if logits_BTV.dtype.itemsize == 2:
            logits_BTV = logits_BTV.float()  # 16 bits are too few for a sum over the vocabulary
        if shared and y_BT is not None:
            rows = logits_BTV.flatten(0, 1)
            return vocab_cross_entropy(rows, y_BT.flatten(), shared.group, vocab_sizes=shared.sizes)
        if shared:
            return gather_from_group(logits_BTV, -1, shared.group, shared.sizes)
        return logits_BTV if y_BT is None else F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())

    def share(self, config: zeroth.Config, world: zeroth.World) -> None:
        """The ranks of the mesh's tp share the heads, the hidden width and the vocabulary of a model that they have
        alike: each keeps its part. Raises what zeroth.parallelize() does."""
        group = zeroth.parallelize(self, config, world=world).mesh.axis("tp")
        cut = Cut("tp", group.rank, group.size)
        table = nn.Embedding(self.vocab, self.embedding.shape[1], _weight=self.embedding.data)
        table.weight = self.embedding  # which stays the model's own: the table is no module of it
        self.shared = SharedVocabulary(
            group=group, embedding=VocabEmbedding.of(table, group, cut), sizes=cut.sizes(self.vocab)
        )


@torch.no_grad()
def _fill(weight: Tensor, name: str, seed: int, deviation: float) -> None:
    values = scaled_uniform(weight.numel(), key_of(seed, digest64(name.encode())), deviation)
    weight.copy_(torch.from_numpy(values).view_as(weight))
