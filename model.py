"""GPT-2 in plain PyTorch. It knows nothing of ranks, meshes or collectives: `parallel.py` applies those from outside.

Two things differ from nanoGPT, both so that a contiguous slice of a weight is a fair share of the work:
`c_attn` holds its rows head by head, `(n_head, 3, head_dim, n_embd)` flattened, and the dimensions that tensor
parallelism splits may be padded with zeros (`Sizes`). Under a plan the same code runs on a rank's part: heads, hidden
units and vocabulary rows are then this rank's, and T between blocks this rank's slice of the sequence.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import Config


@dataclass(frozen=True)
class Sizes:
    """The dimensions that tensor parallelism splits."""

    heads: int
    hidden: int
    vocab: int

    @classmethod
    def real(cls, config: Config) -> "Sizes":
        return cls(config.n_head, 4 * config.n_embd, config.vocab_size)

    @classmethod
    def padded(cls, config: Config, tp: int = 1) -> "Sizes":
        """Rounded up to multiples of `tp`, the vocabulary of lcm(128, tp) too, which GEMMs like.

        The extra rows and columns are zero and stay zero. A zero head has q = k = v = 0, so its output is 0 and, its
        `c_proj` columns being 0, so is its gradient; gelu(0) = 0 makes a zero hidden unit the same; a zero
        vocabulary row is left out of the loss. Zero gradients make zero AdamW updates, weight decay included.
        """
        def up(n, multiple):
            return math.ceil(n / multiple) * multiple
        real = cls.real(config)
        return cls(up(real.heads, tp), up(real.hidden, tp), up(real.vocab, math.lcm(128, tp)))


class Linear(nn.Linear):
    """A float32 master weight applied in the dtype of its input."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the float32 residual stream, handed on in the compute dtype."""

    def __init__(self, config: Config):
        super().__init__(config.n_embd, eps=1e-5)
        self.dtype = config.torch_dtype

    def forward(self, x):
        return self.normalize(x, self.weight, self.bias)

    def normalize(self, x, weight, bias):
        return F.layer_norm(x, self.normalized_shape, weight.to(x.dtype), bias.to(x.dtype), self.eps).to(self.dtype)


class Attention(nn.Module):
    """Causal self-attention over however many heads `c_attn` puts out."""

    def __init__(self, config: Config, heads: int):
        super().__init__()
        self.head_dim, self.dropout = config.n_embd // config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, heads * 3 * self.head_dim)
        self.c_proj = Linear(heads * self.head_dim, config.n_embd)

    def forward(self, x):
        qkv = self.c_attn(x)
        B, T, _ = qkv.shape  # T is whole here even where x is a slice of the sequence
        q, k, v = qkv.view(B, T, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)  # each (B, heads, T, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config: Config, hidden: int):
        super().__init__()
        self.c_fc = Linear(config.n_embd, hidden)
        self.c_proj = Linear(hidden, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: Config, sizes: Sizes):
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, sizes.heads)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config, sizes.hidden)
        self.drop_1, self.drop_2 = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.drop_1(self.attn(self.ln_1(x)))
        return x + self.drop_2(self.mlp(self.ln_2(x)))


class Head(nn.Linear):
    """The output projection, tied to `wte`: logits, or the mean cross-entropy without whole float32 logits."""

    def __init__(self, config: Config, sizes: Sizes):
        super().__init__(config.n_embd, sizes.vocab, bias=False)
        self.vocab_size = config.vocab_size

    def forward(self, x, targets=None, position: int | None = None):
        """x (B, T, n_embd); targets (B, T) or None; `position` keeps one position's logits of T.

        Returns the mean loss, a float32 scalar, or float32 logits (B, T or 1, vocab_size).
        """
        if targets is not None:
            return linear_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), self.vocab_size)
        if position is not None:
            x = x[:, position : position + 1]
        return F.linear(x, self.weight.to(x.dtype))[..., : self.vocab_size].float()


class GPT(nn.Module):
    """GPT-2: learned positions, pre-LayerNorm, biases, tanh GELU, tied embeddings."""

    def __init__(self, config: Config, sizes: Sizes | None = None):
        super().__init__()
        sizes = sizes or Sizes.padded(config)
        self.block_size = config.block_size
        self.wte = nn.Embedding(sizes.vocab, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, sizes) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config)
        self.lm_head = Head(config, sizes)
        self.tie()

    def tie(self):
        """One table for input and output. Whatever replaces parameters (a plan, a move off meta) must call it again."""
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None, position: int | None = None):
        """Token ids (B, T) → mean loss if `targets` (B, T) are given, else logits; see `Head.forward`."""
        # (B, T, n_embd), float32 even where the weights come gathered in the compute dtype
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx).float() + self.wpe(positions).float())
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x), targets, position)


def real_shapes(config: Config) -> dict[str, torch.Size]:
    """Every parameter's shape without padding, by name; the tied table once, as `wte.weight`."""
    with torch.device("meta"):
        return {name: p.shape for name, p in GPT(config, Sizes.real(config)).named_parameters()}


def seed_from(text: str) -> int:
    """A generator's seed that follows from `text`, unlike those of all other texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def initial_value(name: str, shape: torch.Size, config: Config) -> torch.Tensor:
    """The float32 value a parameter starts from: a function of (seed, name, shape) alone, whatever the mesh.

    N(0, 0.02), the projections into the residual stream scaled by 1/√(2·n_layer), biases 0, LayerNorm gains 1.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if ".ln_" in f".{name}":
        return torch.ones(shape)
    std = 0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02
    generator = torch.Generator().manual_seed(seed_from(f"{config.seed}/{name}"))
    return torch.empty(shape).normal_(0, std, generator=generator)


def linear_cross_entropy(x, weight, targets, real: int, first: int = 0, all_max=lambda x: x, all_sum=lambda x: x):
    """Mean cross-entropy of `softmax(x @ weight.T)`, over vocabulary shards if the reductions are given.

    Args:
        x: (N, C) in the compute dtype, the same on every rank that holds a shard.
        weight: (V, C) float32; the vocabulary's rows from `first` on.
        targets: (N,) token ids in the whole vocabulary.
        real: how many rows of `weight` are tokens; the padding after them takes no part.
        all_max, all_sum: reduce a float32 tensor over the ranks that hold the other rows.

    Returns:
        A float32 scalar, the same on every rank. Gradients are this shard's: the one of `x` is a partial sum.
    """
    return _LinearCrossEntropy.apply(x, weight, targets, real, first, all_max, all_sum)


class _LinearCrossEntropy(torch.autograd.Function):
    """Logits live once, in the compute dtype; float32 copies exist for a few rows at a time.

    With M the row maximum and S = Σ exp(logit − M) over the whole vocabulary, the logits are overwritten by
    E = exp(logit − M), less S at the target, so that d loss / d logits = E / (S·N): the row factor is applied to
    the small operands of the two backward GEMMs, not to E.
    """

    # float32 elements at a time: on a CPU what stays in its cache, on a GPU enough to fill it
    CHUNK: ClassVar = {"cpu": 2**20, "cuda": 2**26}

    @staticmethod
    def forward(ctx, x, weight, targets, real, first, all_max, all_sum):
        w = weight.to(x.dtype)
        logits = x @ w.t()  # (N, V)
        N, V = logits.shape
        column = targets - first
        mine = ((column >= 0) & (column < real))[:, None]  # the rows whose target this shard holds
        column = column.clamp(0, V - 1)[:, None]
        target_logit = torch.where(mine, logits.gather(1, column).float(), 0.0)[:, 0]
        if real > 0:
            maximum = logits[:, :real].amax(1).float()
        else:  # a shard of nothing but padding
            maximum = logits.new_full((N,), -math.inf, dtype=torch.float32)
        maximum = all_max(maximum)
        partial = torch.empty_like(maximum)
        step = max(1, _LinearCrossEntropy.CHUNK[x.device.type] // V)
        for start in range(0, N, step):
            z = logits[start : start + step].float()
            z.sub_(maximum[start : start + step, None]).exp_()
            z[:, real:] = 0
            partial[start : start + step] = z.sum(1)
            logits[start : start + step] = z
        total, target_logit = all_sum(torch.stack([partial, target_logit]))
        E = logits.gather(1, column)
        at_target = torch.where(mine, (E.float() - total[:, None]).to(x.dtype), E)
        rows = torch.arange(N, device=x.device)
        logits.index_put_((rows, column[:, 0]), at_target[:, 0])  # scatter_ would copy all logits on a CPU
        ctx.save_for_backward(x, w, logits, total)
        return (total.log() + maximum - target_logit).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, w, E, total = ctx.saved_tensors
        factor = (grad / (total * len(total)))[:, None]
        grad_x = ((E @ w) * factor).to(x.dtype)
        grad_w = (E.t() @ (x * factor).to(x.dtype)).float()
        return grad_x, grad_w, None, None, None, None, None
