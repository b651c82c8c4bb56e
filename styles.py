"""The styles of the plan table in `parallel.py`: how a module's parameters are cut, and what its forward sends.

Cut is as PyTorch's styles of these names cut: parameters are DTensors with DTensor's placements. The forward is ours
and works on local tensors, but for whole logits. DTensor would decide anew, for every operator, what to send and how
the result lies; here it is written down, and a column-parallel linear sends its input's gradient while it computes its
weight's.

In shapes, `between` is how activations lie between blocks: `Shard(1)`, (B, T/tp, C) on a rank, which is sequence
parallelism, or `Replicate()`, (B, T, C) on every rank.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

import shm
from model import Head, LayerNorm, Linear, linear_cross_entropy

# Collectives as operators, which torch.compile can put in a graph. The name is private, but the public wrappers changed
# theirs between torch 2.11 and 2.13 and these did not.
_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """The tp ranks as a module sees them.

    `split`: activations between blocks are slices of the sequence. `shared`: they cross through memory in common
    (`shm.py`), else NCCL or gloo takes them.
    """

    group: str
    size: int
    rank: int
    split: bool
    shared: bool


# ---------------------------------------------------------------------------------------------------------------------
# collectives on local tensors; a `start` does not wait for other ranks, its `end` does


def _gather_start(x, tp: Ranks) -> tuple:
    x = x.contiguous()
    if tp.shared:
        return x, torch.ops.nanotp.gather_start(x, tp.group)
    return (_ops.all_gather_into_tensor(x, tp.size, tp.group),)


def _gather_end(pending: tuple, tp: Ranks):
    if tp.shared:
        return torch.ops.nanotp.all_gather(*pending, tp.group, tp.size)
    return torch.cat(_ops.wait_tensor(*pending).chunk(tp.size), dim=1)


def _gather(x, tp: Ranks):
    """(B, T/tp, C) → (B, T, C)."""
    return _gather_end(_gather_start(x, tp), tp)


def _sum_start(x, tp: Ranks) -> tuple:
    """Begin to add up (B, T, C) over ranks; `_sum_end` takes the result."""
    if tp.shared:
        x = x.contiguous()
        return x, torch.ops.nanotp.sum_start(x, tp.group)
    if tp.split:
        x = torch.cat(x.chunk(tp.size, dim=1))  # the ranks' slices one after another
        return (_ops.reduce_scatter_tensor(x, "sum", tp.size, tp.group),)
    return (_ops.all_reduce(x.contiguous(), "sum", tp.group),)


def _sum_end(pending: tuple, tp: Ranks):
    """The sum as activations lie between blocks: (B, T/tp, C) or (B, T, C)."""
    if tp.shared:
        if tp.split:
            return torch.ops.nanotp.reduce_scatter(*pending, tp.group, tp.size)
        return torch.ops.nanotp.all_reduce(*pending, tp.group)
    return _ops.wait_tensor(*pending)


def _sum(x, tp: Ranks):
    return _sum_end(_sum_start(x, tp), tp)


class _Enter(torch.autograd.Function):
    """From between blocks to (B, T, C) on every rank; back, ranks' shares of the gradient are added up."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return _gather(x, tp) if tp.split else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _sum(grad, ctx.tp), None


class _Leave(torch.autograd.Function):
    """From a summand (B, T, C) on each rank to the sum as it lies between blocks; to it `bias` is added, once.

    The bias's gradient comes from the gathered one: whole on every rank, nothing to add up.
    """

    @staticmethod
    def forward(ctx, x, bias, tp):
        ctx.tp, ctx.dtype = tp, None if bias is None else bias.dtype
        y = _sum(x, tp)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = _gather(grad, ctx.tp) if ctx.tp.split else grad
        return grad, ctx.dtype and grad.flatten(0, 1).sum(0).to(ctx.dtype), None


class _Column(torch.autograd.Function):
    """`_Enter`, then a linear; the gradient of x travels while that of the weight is computed."""

    @staticmethod
    def forward(ctx, x, weight, bias, tp):
        ctx.tp, ctx.dtype = tp, weight.dtype
        gathered = _gather_start(x, tp) if tp.split else None
        w = weight.to(x.dtype)
        x = _gather_end(gathered, tp) if tp.split else x
        ctx.save_for_backward(x, w)
        if torch.compiler.is_compiling():  # async TP knows GEMMs without a bias only, and the addition is fused anyway
            return F.linear(x, w) + bias.to(x.dtype)
        return F.linear(x, w, bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_x = _sum_start(grad @ w, ctx.tp)
        grad, x = grad.flatten(0, 1), x.flatten(0, 1)
        grad_w, grad_b = (grad.t() @ x).to(ctx.dtype), grad.sum(0).to(ctx.dtype)
        return _sum_end(grad_x, ctx.tp), grad_w, grad_b, None


# ---------------------------------------------------------------------------------------------------------------------
# what modules become


class ColumnLinear(Linear):
    """(B, T/tp or T, in) → (B, T, out/tp): this rank's features."""

    def forward(self, x):
        return _Column.apply(x, self.weight.to_local(), self.bias.to_local(), self.tp)


class RowLinear(Linear):
    """(B, T, in/tp) → (B, T/tp or T, out); the bias is added once, to the sum."""

    def forward(self, x):
        return _Leave.apply(F.linear(x, self.weight.to_local().to(x.dtype)), self.bias.to_local(), self.tp)


class LocalNorm(LayerNorm):
    """LayerNorm of the activations a rank has, (B, T/tp or T, C). No collective."""

    def forward(self, x):
        return self.normalize(x, _replicated(self.weight, self.tp), _replicated(self.bias, self.tp))


class VocabEmbedding(nn.Embedding):
    """`wte` by rows: a rank looks up the ids it holds, the sum over ranks is the embedding, (B, T/tp or T, C).

    The gradient never has the whole vocabulary's size. The head is lent the local rows, until it has run: as gradients
    of one plain tensor the two uses add up in place, as DTensors they would not.
    """

    def forward(self, idx):
        assert not self.tp.split or idx.shape[1] % self.tp.size == 0, "tp does not divide the sequence"
        rows = self.weight.to_local()
        self.lent[:] = [rows]
        idx = idx - self.tp.rank * len(rows)
        elsewhere = (idx < 0) | (idx >= len(rows))
        x = F.embedding(idx.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0)
        return _Leave.apply(x, None, self.tp)


class PositionEmbedding(nn.Embedding):
    """`wpe`, replicated and read only for this rank's slice of the sequence. No collective."""

    def forward(self, positions):  # (T,) → (T/tp or T, C)
        mine = positions.chunk(self.tp.size)[self.tp.rank] if self.tp.split else positions
        return F.embedding(mine, _replicated(self.weight, self.tp))


class VocabHead(Head):
    """`lm_head` into vocabulary shards, and the loss on them: whole logits exist on no rank.

    One all-gather forward and one reduce-scatter backward (one all-reduce backward without sequence parallelism), and
    two small all-reduces for the loss. `loss_parallel = False` gathers the logits instead, for study. Without targets
    the logits are gathered.
    """

    def forward(self, x, targets=None, position=None):
        x = _Enter.apply(x, self.tp)
        weight = self.lent.pop()
        if targets is not None and self.loss_parallel:
            first = self.tp.rank * len(weight)
            real = min(max(self.vocab_size - first, 0), len(weight))
            return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), real, first,
                                        *(partial(shm.all_reduce_, op=op, group=self.tp_mesh.get_group())
                                          for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM)))
        if position is not None:
            x = x[:, position : position + 1]
        logits = DTensor.from_local(F.linear(x, weight.to(x.dtype)), self.tp_mesh, [Shard(2)], run_check=False)
        logits = logits.full_tensor()[..., : self.vocab_size].float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SharedDropout(nn.Dropout):
    """Dropout of activations that every rank holds whole: the same mask on all of them, from a seed of the module's.

    Elsewhere activations are sharded and the ranks' own generators make their masks; see `parallel.seed_dropout`.
    """

    def forward(self, x):
        if not (self.training and self.p):
            return x
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            torch.manual_seed(self.seed)
            return F.dropout(x, self.p)


def _replicated(p: DTensor, tp: Ranks):
    """A replicated parameter's tensor. Used on a slice of the sequence, its gradient is a summand."""
    return p.to_local(grad_placements=[Partial() if tp.split else Replicate()])


# ---------------------------------------------------------------------------------------------------------------------
# styles


def _become(kind: type, module: nn.Module, mesh: DeviceMesh, between, **attributes) -> nn.Module:
    """Give `module` the forward of `kind`, by its class: a forward bound to each module would have torch.compile make
    every block anew."""
    module.__class__ = kind
    assert isinstance(module, kind.__base__), f"a {type(module).__name__} cannot become a {kind.__name__}"
    group = mesh.get_group()
    module.tp = Ranks(group.group_name, mesh.size(), mesh.get_local_rank(), between.is_shard(), shm.connect(group))
    vars(module).update(attributes)
    return module


class Colwise(ColwiseParallel):
    """Weight and bias `Shard(0)`, output features. An all-gather forward and a reduce-scatter backward; without
    sequence parallelism nothing and an all-reduce."""

    def __init__(self, between):
        super().__init__(input_layouts=between)
        self.between = between

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, mesh, self._partition_linear_fn)
        return _become(ColumnLinear, module, mesh, self.between)


class Rowwise(RowwiseParallel):
    """Weight `Shard(1)`, input features; bias `Replicate`. A reduce-scatter forward and an all-gather backward; without
    sequence parallelism an all-reduce and nothing."""

    def __init__(self, between):
        super().__init__(output_layouts=between)
        self.between = between

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, mesh, self._partition_linear_fn)
        return _become(RowLinear, module, mesh, self.between)


class Replicated(SequenceParallel):
    """LayerNorm and `wpe`: parameters `Replicate`, no collective."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, mesh, self._replicate_module_fn)
        return _become(LocalNorm if isinstance(module, LayerNorm) else PositionEmbedding, module, mesh, self.between)


class Vocab(ParallelStyle):
    """`wte`, by rows, and `lm_head`, which has no parameter of its own: `GPT.tie` gives it wte's."""

    def __init__(self, between, loss_parallel: bool):
        self.between, self.loss_parallel, self.lent = between, loss_parallel, []

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, Head):
            return _become(VocabHead, module, mesh, self.between, loss_parallel=self.loss_parallel, lent=self.lent,
                           tp_mesh=mesh)
        rows = module.weight.chunk(mesh.size())[mesh.get_local_rank()]
        module.weight = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], run_check=False))
        return _become(VocabEmbedding, module, mesh, self.between, lent=self.lent)


class ReplicatedDropout(ParallelStyle):
    """Dropout of activations that every rank holds whole."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.__class__ = SharedDropout
        return module
