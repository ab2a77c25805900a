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
from errors import make_error
from rng import digest64, key_of, scaled_uniform
from torch import Tensor, nn

import zeroth
from zeroth.nn import TokenExchange, grouped_linear, route
from zeroth.parallel import (
    Cut,
    VocabEmbedding,
    all_to_all,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    require_same,
    slice_sizes,
    vocab_cross_entropy,
)

DEVIATION = 0.02
"""standard deviation of initial values"""
OTHER_SAMPLES = "ranks that share sequences were given different samples"
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
    experts: int = 0
    """of each block, in the place of one MLP; 0: none"""
    choices: int = 2
    """experts of a token"""

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


@dataclasses.dataclass(slots=True)
class SharedSequence:
    """How ranks share a sequence: each has a slice of it, and in attention a part of the heads of all of it.
    Ref: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3."""

    group: zeroth.Communicator
    sizes: list[int]
    """of each rank, in the forward that runs"""

    def own_slice(self, x_BT: Tensor) -> Tensor:
        own: Tensor = torch.split(x_BT, self.sizes, 1)[self.group.rank]
        return own.contiguous()


class Attention(nn.Module):
    """Causal self-attention with queries, keys and values from one matrix."""

    def __init__(self, options: ModelOptions, rotary: Rotary) -> None:
        super().__init__()
        width = options.d_model
        self.num_heads = options.heads
        self.head_dim = width // options.heads
        self.rotary = rotary
        self.sequence: SharedSequence | None = None
        self.qkv = Projection(width, 3 * width, DEVIATION, options.dtype)
        self.out = Projection(width, width, options.residual_deviation, options.dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD)
        heads = qkv.shape[2] // (3 * self.head_dim)
        qkv_BT3NH = qkv.view(B, T, 3, heads, self.head_dim)  # N: of this rank, if ranks share the heads
        sequence = self.sequence
        if sequence:  # T: of the whole sequence, N: a part of the heads
            qkv_BT3NH = all_to_all(qkv_BT3NH, 3, 1, sequence.group, None, sequence.sizes)
        qk_BT2NH = self.rotary.rotate(qkv_BT3NH.narrow(2, 0, 2))
        q_BNTH = qk_BT2NH.select(2, 0).transpose(1, 2)
        k_BNTH = qk_BT2NH.select(2, 1).transpose(1, 2)
        v_BNTH = qkv_BT3NH.select(2, 2).transpose(1, 2)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        y_BTNH = y_BNTH.transpose(1, 2)
        if sequence:
            shares = slice_sizes(heads, sequence.group.size)
            y_BTNH = all_to_all(y_BTNH, 1, 2, sequence.group, sequence.sizes, shares)
        y_BTD: Tensor = self.out(y_BTNH.reshape(B, T, heads * self.head_dim))
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


class GatedExperts(nn.Module):
    """Such MLPs of all experts, which zeroth.parallelize() leaves on the ranks of the mesh's ep."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.num_experts = options.experts
        sizes = (2 * options.hidden_width, options.d_model), (options.d_model, options.hidden_width)
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(options.experts, *size, dtype=options.dtype)) for size in sizes
        )

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, D]; experts and weights [tokens, choices]."""
        exchange = TokenExchange(experts, self.num_experts)
        gate, up = grouped_linear(exchange.send(x), self.gate_up, None, exchange.rows).chunk(2, -1)
        return exchange.bring(grouped_linear(F.silu(gate) * up, self.down, None, exchange.rows), weights)


class Moe(nn.Module):
    """A token's sum over the MLPs that the router chooses. Ref: Jiang et al., "Mixtral of Experts", 2024, section
    2.1."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.choices = options.choices
        self.router = Projection(options.d_model, options.experts, DEVIATION, options.dtype)
        self.experts = GatedExperts(options)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD.flatten(0, 1)
        experts, weights, _ = route(self.router(x), self.choices)
        y: Tensor = self.experts(x, experts, weights)
        return y.view_as(x_BTD)


class Block(nn.Module):
    """The grain in which Zeroth gathers parameters and reduces gradients; embedding and last norm belong to the root
    unit."""

    def __init__(self, options: ModelOptions, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(options.d_model, options.dtype)
        self.attention = Attention(options, rotary)
        self.mlp_norm = RmsNorm(options.d_model, options.dtype)
        self.moe = Moe(options) if options.experts else None
        self.mlp = None if options.experts else Mlp(options)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD: Tensor = x_BTD + self.attention(self.attention_norm(x_BTD))
        y_BTD: Tensor = h_BTD + (self.mlp or self.moe)(self.mlp_norm(h_BTD))  # type: ignore[misc]
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
        self.options = options
        self.shared: SharedVocabulary | None = None
        self.sequence: SharedSequence | None = None
        self.embedding = nn.Parameter(torch.empty(options.vocab, options.d_model, dtype=options.dtype))
        rotary = Rotary(options.d_model // options.heads, options.seq, options.dtype)
        self.blocks = nn.ModuleList(Block(options, rotary) for _ in range(options.layers))
        self.last_norm = RmsNorm(options.d_model, options.dtype)
        _fill(self.embedding, "embedding", options.seed, DEVIATION)
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                _fill(module.weight, name, options.seed, module.deviation)
            if isinstance(module, GatedExperts):
                _fill(module.gate_up, f"{name}.gate_up", options.seed, DEVIATION)
                _fill(module.down, f"{name}.down", options.seed, options.residual_deviation)

    def forward(self, x_BT: Tensor, y_BT: Tensor | None = None) -> Tensor:
        """`x_BT`: int64 tokens; `y_BT`: int64 next tokens. Returns the mean cross entropy in nats (a scalar; float32,
        or float64 in such a model), or without y the logits [B, T, V]."""
        shared, sequence = self.shared, self.sequence
        own_x_BT = x_BT  # T: of this rank
        if sequence:
            require_same({"x": x_BT, "y": y_BT}, sequence.group, where="train.py --mesh", what=OTHER_SAMPLES)
            sequence.sizes = slice_sizes(x_BT.shape[1], sequence.group.size)
            own_x_BT = sequence.own_slice(x_BT)
        h_BTD = shared.embedding(own_x_BT) if shared else F.embedding(own_x_BT, self.embedding)
        for block in self.blocks:
            h_BTD = block(h_BTD)
        h_BTD = self.last_norm(h_BTD)
        if shared:
            h_BTD = copy_to_group(h_BTD, shared.group)
        logits_BTV = F.linear(h_BTD, self.embedding)
        if logits_BTV.dtype.itemsize == 2:
            logits_BTV = logits_BTV.float()  # 16 bits are too few for a sum over the vocabulary
        if y_BT is not None:
            return self.loss(logits_BTV, y_BT)
        if shared:
            logits_BTV = gather_from_group(logits_BTV, -1, shared.group, shared.sizes)
        return gather_from_group(logits_BTV, 1, sequence.group, sequence.sizes) if sequence else logits_BTV

    def loss(self, logits_BTV: Tensor, y_BT: Tensor) -> Tensor:
        """Of this rank's logits; of all ranks that share them. Its gradient is this rank's part."""
        shared, sequence = self.shared, self.sequence
        y = (sequence.own_slice(y_BT) if sequence else y_BT).flatten()
        logits = logits_BTV.flatten(0, 1)
        if shared:
            loss = vocab_cross_entropy(logits, y, shared.group, vocab_sizes=shared.sizes)
        else:
            loss = F.cross_entropy(logits, y)
        if not sequence:
            return loss
        return reduce_from_group(loss * (logits_BTV.shape[1] / y_BT.shape[1]), sequence.group)

    def share(self, config: zeroth.Config, world: zeroth.World) -> None:
        """The ranks of the mesh's tp share the heads, the hidden width and the vocabulary of a model that they have
        alike, and each keeps its part. The ranks of sp share each sequence; x and y are whole, and so are the loss and
        logits. Raises what zeroth.parallelize() does, USAGE for more ranks of sp than heads or tokens."""
        axes = config.mesh(world.size)
        mesh = world.mesh(axes, config)
        heads = self.options.heads // axes["tp"]
        # Of sp it knows nothing: Attention exchanges heads by itself.
        group = zeroth.parallelize(self, {"zeroth": {"mesh": {"tp": axes["tp"]}}}, world=world).mesh.axis("tp")
        zeroth.experts(self, mesh, **config.experts)
        if group.size > 1:
            cut = Cut("tp", group.rank, group.size)
            table = nn.Embedding(self.options.vocab, self.options.d_model, _weight=self.embedding.data)
            table.weight = self.embedding  # which stays the model's own: the table is no module of it
            self.shared = SharedVocabulary(
                group=group, embedding=VocabEmbedding.of(table, group, cut), sizes=cut.sizes(self.options.vocab)
            )
        group = mesh.axis("sp")
        least = min(heads, self.options.seq)
        if group.size > least:
            raise make_error(
                "USAGE",
                "there are more ranks than heads or tokens, so some would have nothing to compute",
                where="train.py --mesh",
                which="sp",
                expected=f"at most {least} ranks for {heads} heads and {self.options.seq} tokens",
                got=f"{group.size} ranks",
            )
        if group.size > 1:
            what = "ranks that share sequences have other weights"
            hint = "give every rank the same --seed and --init"
            require_same(dict(self.named_parameters()), group, where="train.py --mesh", what=what, hint=hint)
            self.sequence = SharedSequence(group, [])
            for module in self.modules():
                if isinstance(module, Attention):
                    module.sequence = self.sequence


@torch.no_grad()
def _fill(weight: Tensor, name: str, seed: int, deviation: float) -> None:
    values = scaled_uniform(weight.numel(), key_of(seed, digest64(name.encode())), deviation)
    weight.copy_(torch.from_numpy(values).view_as(weight))
