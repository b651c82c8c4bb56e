"""Tensor parallelism written out by hand: linear layers cut over the ranks of a group, with every collective in sight.

    torchrun --standalone --nproc-per-node=2 tensor_parallel.py     a guided walk; 1, 2, 3 or 4 processes

A linear layer is y = x Wᵀ + b, and there are two ways to cut W, (out, in), over tp ranks:

    column-parallel    rank r holds out/tp rows of W (columns of Wᵀ) and of b, sees all of x and computes its own
                       features of y. No collective forward; backward sums the ranks' shares of grad_x.
    row-parallel       rank r holds in/tp columns of W and the matching features of x, and computes a partial sum of
                       all of y. Forward adds up the partial sums, then b, once; no collective backward.

What a column linear leaves on a rank is what a row linear wants there, so an MLP, or attention cut by heads, costs one
all-reduce forward and one backward: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053). Sequence parallelism
(Korthikanti et al. 2022, arXiv:2205.05198) makes of each all-reduce a reduce-scatter and, later, an all-gather; in
between a rank keeps T/tp of the tokens: the same bytes on the wire, activations tp times smaller.

`parallel.py` and `styles.py` do this to the trainer's model and share nothing with this file, so that each can check
the other.
In shapes, B is the batch, T the tokens, C the width of the residual stream, tp the size of the group.
"""

import os
import sys
from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode  # here: imported after init, it keeps the group alive

from config import UserError

# Collectives as operators that return a new tensor, which torch.compile can put in a graph. The name is private, but
# the public wrappers changed theirs between torch 2.11 and 2.13 and these did not.
_ops = torch.ops._c10d_functional

# ---- 1. Plain functions on local tensors, without autograd. Paper: Shoeybi et al. 2019, section 3 -----------------
# x is (…, in), y (…, out), with any leading dimensions; the backward functions return grad_x, grad_w, grad_b.


def _my_features(x, group):
    """(…, n) on all ranks → (…, n/tp), this rank's. No communication. Raises UserError if tp does not divide n."""
    if x.size(-1) % group.size():
        raise UserError(f"{x.size(-1)} features do not divide over {group.size()} ranks")
    return x.chunk(group.size(), dim=-1)[group.rank()]


@torch.no_grad()
def column_linear_forward(x, w_local, group, b_local=None):
    """x whole on every rank, w_local (out/tp, in), b_local (out/tp,) → this rank's features of y, (…, out/tp).

    Collectives: none; `group` is here for the four signatures to agree."""
    return F.linear(x, w_local, b_local)


@torch.no_grad()
def column_linear_backward(grad_y, x, w_local, group):
    """grad_y (…, out/tp), x whole → grad_x whole, grad_w (out/tp, in), grad_b (out/tp,).

    Collectives: one all-reduce, of grad_x."""
    grad_x = grad_y @ w_local  # every feature of y saw all of x: this is only what came through this rank's features
    dist.all_reduce(grad_x, group=group)
    return grad_x, torch.einsum("...o,...i->oi", grad_y, x), torch.einsum("...o->o", grad_y)


@torch.no_grad()
def row_linear_forward(x, w_local, group, bias=None, *, input_is_split=True):
    """x (…, in/tp), w_local (out, in/tp), bias (out,) → y whole on every rank.

    Collectives: one all-reduce, of y. With input_is_split=False each rank takes its features of a whole x; raises
    UserError if they do not divide."""
    y = F.linear(x if input_is_split else _my_features(x, group), w_local)
    dist.all_reduce(y, group=group)
    return y if bias is None else y + bias  # after the sum: inside it, the bias would count tp times


@torch.no_grad()
def row_linear_backward(grad_y, x, w_local, group, *, input_is_split=True):
    """grad_y whole, x as in the forward → grad_x (…, in/tp), grad_w (out, in/tp), grad_b (out,).

    Collectives: none. With input_is_split=False grad_x is whole on every rank, by one all-gather."""
    grad_x = grad_y @ w_local
    if not input_is_split:
        x, pieces = _my_features(x, group), [torch.empty_like(grad_x) for _ in range(group.size())]
        dist.all_gather(pieces, grad_x, group=group)
        grad_x = torch.cat(pieces, dim=-1)
    return grad_x, torch.einsum("...o,...i->oi", grad_y, x), torch.einsum("...o->o", grad_y)


# ---- 2. Under autograd: an operator f before a column linear, g after a row linear --------------------------------


def _all_reduce(x, group):
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _all_gather(x, group):
    """(…, T/tp, C) → (…, T, C). The collective stacks the ranks in front; the moves bring them beside the tokens."""
    y = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return y.unflatten(0, (group.size(), -1)).movedim(0, -3).flatten(-3, -2)


def gather_features(x, group):
    """(N, n/tp), a share of the features on each rank → (N, n) on every rank, by one all-gather. Without autograd."""
    return _all_gather(x.T, group).T


def _reduce_scatter(x, group):
    """(…, T, C), a partial sum on each rank → (…, T/tp, C), this rank's tokens of the sum."""
    if x.size(-2) % group.size():
        raise UserError(f"a sequence of {x.size(-2)} tokens does not divide over {group.size()} ranks")
    x = x.unflatten(-2, (group.size(), -1)).movedim(-3, 0).flatten(0, 1).contiguous()
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))


class Mirrored(torch.autograd.Function):
    """One collective forward and its mirror backward: of a sum a copy (None), of a gather a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group, collective, mirror):
        ctx.group, ctx.mirror = group, mirror
        return collective(x, group) if collective else x.view_as(x)

    @staticmethod
    def backward(ctx, grad_y):
        return ctx.mirror(grad_y, ctx.group) if ctx.mirror else grad_y, None, None, None


def f(x, group, sequence_parallel=False):
    """Enter a column linear. (…, C) on every rank → the same; backward all-reduces, as each rank's use adds to grad_x.

    With sequence_parallel (…, T/tp, C) → (…, T, C): all-gather forward, reduce-scatter backward."""
    return Mirrored.apply(x, group, *((_all_gather, _reduce_scatter) if sequence_parallel else (None, _all_reduce)))


def g(x, group, sequence_parallel=False):
    """Leave a row linear. Partial sums (…, C) → their sum on every rank, by all-reduce; backward sends nothing.

    With sequence_parallel (…, T, C) → (…, T/tp, C): reduce-scatter forward, all-gather backward; raises UserError if
    tp does not divide T. Add the bias after this, and sum its gradient over the group, as it meets T/tp tokens only."""
    return Mirrored.apply(x, group, *((_reduce_scatter, _all_gather) if sequence_parallel else (_all_reduce, None)))


# ---- 3. shard_linear, which cuts a linear where it stands ----------------------------------------------------------


def _column_forward(self, x):
    return type(self).forward(self, f(x, self.tp_group))


def _row_forward(self, x):
    y = g(self.product(x) if hasattr(self, "product") else F.linear(x, self.weight), self.tp_group)
    return y if self.bias is None else y + self.bias


@torch.no_grad()
def shard_linear(linear, style: str, group, weight_splits: list[int] | None = None):
    """Cut a linear in place to this rank's share, its forward too; returns `linear`.

    Args:
        linear: an nn.Linear, or one of quantize.py's, whose `product(x)` is x Wᵀ without the bias. It holds the same
            whole weight on every rank. A tie of its weight to another module's is cut.
        style: "column", (…, in) on every rank → (…, out/tp): weight, scale and bias keep this rank's outputs.
            "row", (…, in/tp) → (…, out) on every rank: the weight and 4-bit scales keep this rank's inputs; an 8-bit
            scale and the bias stay whole, and the bias is added once, after the sum.
        weight_splits: sizes of parts fused along the cut dimension, [Q, K, V], K and V perhaps narrower: each is cut
            by itself, so that a rank holds [Q_r | K_r | V_r]. None: one part. nanoTP's c_attn needs none: in its order
            (n_head, 3, head_dim) a contiguous share is whole heads, if tp divides n_head.

    Collectives: column one all-reduce backward, row one all-reduce forward. Paper: Shoeybi et al. 2019. Raises
    UserError: parts that do not add up or that tp does not divide (a 4-bit row: into whole groups); called too late."""
    if style not in ("column", "row") or hasattr(linear, "tp_group") or getattr(linear, "packed", False):
        raise UserError(f"style = {style!r} of {linear}: 'column' or 'row', of what is not yet sharded or packed")
    column, bits = style == "column", getattr(linear, "bits", None)
    size, unit = (linear.out_features, 1) if column else (linear.in_features, linear.group_size if bits == 4 else 1)
    splits = weight_splits or [size]
    if sum(splits) != size or any(part % (group.size() * unit) for part in splits):
        raise UserError(f"{size} features in parts of {splits} do not divide over {group.size()} ranks"
                        + f" in whole groups of {unit}" * (unit > 1))

    def cut(name, dim, features=1):
        """Keep this rank's share of each part of the tensor; an entry along `dim` stands for so many features."""
        whole = getattr(linear, name)
        parts = whole.split([part // features for part in splits], dim)
        share = torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts], dim)
        setattr(linear, name, nn.Parameter(share, whole.requires_grad) if isinstance(whole, nn.Parameter) else share)

    cut("weight", 0 if column else 1, features=2 if bits == 4 and not column else 1)
    if column and linear.bias is not None:
        cut("bias", 0)
    if bits and (column or bits == 4):
        cut("scale", 1 if column else 0, features=unit)
    setattr(linear, "out_features" if column else "in_features", size // group.size())
    linear.tp_group, linear.forward = group, MethodType(_column_forward if column else _row_forward, linear)
    return linear


# ---- 4. The walk: float64, so that "equal" means to 1e-10 ---------------------------------------------------------

B, T, N_HEAD, HEAD_DIM, C = 2, 12, 12, 4, 48  # T, heads and features divide over 1, 2, 3 and 4 ranks


def _heads(qkv):
    """Causal attention of whole heads, each with its q, k and v side by side: (B, T, 3C/tp) → (B, T, C/tp)."""
    q, k, v = qkv.unflatten(-1, (-1, 3, HEAD_DIM)).transpose(1, 3).unbind(1)  # each (B, n_head/tp, T, head_dim)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _say(text):
    if dist.get_rank() == 0:  # one rank prints for all: lines from several would mix
        print(text, flush=True)


def _check(shapes, got, want):
    """Print the shapes on each rank; compare `got` with `want`, name by name, on all. Raises ArithmeticError."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items()),
                                   {name: (got[name] - want[name]).abs().max().item() for name in want}))
    for rank, (shown, off) in enumerate(ranks):
        _say(f"    rank {rank}: {shown}")
        for name, difference in off.items():
            if not difference < 1e-10:  # put this way, NaN fails too
                raise ArithmeticError(f"{name} on rank {rank} is off the unsharded computation by {difference:.1e}")
    _say(f"    equal: {', '.join(want)}")


def _autograd(function, grad_y, p):
    """y and the gradients of function(p), by name, and the collectives of its forward and of its backward."""
    p = {name: tensor.clone().requires_grad_() for name, tensor in p.items()}
    with CommDebugMode() as forward:
        y = function(p)
    with CommDebugMode() as backward:
        gradients = torch.autograd.grad(y, list(p.values()), grad_y)
    counts = [{str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()} for mode in (forward, backward)]
    return {"y": y.detach()} | dict(zip(p, gradients, strict=True)), counts


def _walk(group, device):
    """All steps. Raises UserError if the group does not divide the heads, ArithmeticError if a comparison fails."""
    tp = group.size()
    if N_HEAD % tp:
        raise UserError(f"{tp} processes do not divide the walk's {N_HEAD} heads: --nproc-per-node can be 1, 2, 3 or 4")
    random = torch.Generator().manual_seed(0)  # the same on every rank: each makes the whole and keeps its share

    def make(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(device) / 4

    def share(tensors, **cuts):
        """This rank's share of the tensors that `cuts` gives a dimension, the others whole."""
        return {name: tensor.chunk(tp, cuts[name])[group.rank()] if name in cuts else tensor
                for name, tensor in tensors.items()}

    _say(f"{tp} process{'es' * (tp > 1)} on {device.type}; B = {B}, T = {T}, C = {C}, {N_HEAD} heads of {HEAD_DIM}.\n"
         "'equal' compares y and the gradient of each input with the unsharded computation under autograd.\n\n"
         "1. Column-parallel linear. A rank has 4C/tp rows of w (4C, C) and all of x: its features of y need nothing\n"
         "   from others. Backward, a rank knows what reached x through its features only: one all-reduce.")
    whole, grad_y = {"x": make(B, T, C), "w": make(4 * C, C), "b": make(4 * C)}, {"y": make(B, T, 4 * C)}
    want, _ = _autograd(lambda p: F.linear(*p.values()), grad_y["y"], whole)
    mine, column_y = share(whole, w=0, b=0), want["y"]
    y = y_local = column_linear_forward(mine["x"], mine["w"], group, mine["b"])
    gradients = column_linear_backward(share(grad_y, y=-1)["y"], mine["x"], mine["w"], group)
    _check(mine | {"y": y}, dict(zip(want, (y, *gradients), strict=True)), share(want, y=-1, w=0, b=0))

    _say("\n2. Row-parallel linear. A rank has 4C/tp columns of w (C, 4C) and those features of x: its product is one\n"
         "   term of y. The all-reduce adds the terms, then comes the bias, once. Backward needs no other rank.")
    whole, grad_y = {"x": make(B, T, 4 * C), "w": make(C, 4 * C), "b": make(C)}, make(B, T, C)
    want, _ = _autograd(lambda p: F.linear(*p.values()), grad_y, whole)
    mine = share(whole, x=-1, w=1)
    y = row_linear_forward(mine["x"], mine["w"], group, mine["b"])
    gradients = row_linear_backward(grad_y, mine["x"], mine["w"], group)
    _check(mine | {"y": y}, dict(zip(want, (y, *gradients), strict=True)), share(want, x=-1, w=1))

    _say("\n3. GELU acts on each feature alone. After a column split a rank has whole features: GELU there is right.\n"
         "   After a row split, before the all-reduce, it has a term of each, and GELU of a sum is no sum of GELUs.")
    _check({"y": y_local}, {"GELU": F.gelu(y_local)}, share({"GELU": F.gelu(column_y)}, GELU=-1))
    terms = F.gelu(mine["x"] @ mine["w"].T)
    dist.all_reduce(terms, group=group)
    off = (terms - F.gelu(whole["x"] @ whole["w"].T)).abs().max()
    _say(f"    row: GELU of each term, then the sum, is off by {off:.2g}" + " (one process has all terms)" * (tp == 1))

    def step(middle, n_column, n_row, sequence_parallel, collectives):
        """x + row(middle(column(LN(x)))): plain linears on whole weights, beside f and g with shares of them."""
        cuts = {"w_column": 0, "b_column": 0, "w_row": 1} | ({"x": 1, "y": 1} if sequence_parallel else {})
        whole = {"x": make(B, T, C), "ln": make(C), "w_column": make(n_column, C), "b_column": make(n_column),
                 "w_row": make(C, n_row), "b_row": make(C)}

        def half_block(p, enter, leave):
            h = enter(F.layer_norm(p["x"], (C,), p["ln"]))
            h = middle(F.linear(h, p["w_column"], p["b_column"]))
            return p["x"] + leave(F.linear(h, p["w_row"])) + p["b_row"]

        grad_y, mine = {"y": make(B, T, C)}, share(whole, **cuts)
        want, _ = _autograd(lambda p: half_block(p, lambda x: x, lambda x: x), grad_y["y"], whole)
        got, counts = _autograd(lambda p: half_block(p, lambda x: f(x, group, sequence_parallel),
                                lambda x: g(x, group, sequence_parallel)), share(grad_y, **cuts)["y"], mine)
        if sequence_parallel:  # these met a rank's tokens only: add their gradients up, in one go
            flat = torch.cat((got["ln"], got["b_row"]))
            dist.all_reduce(flat, group=group)
            got["ln"], got["b_row"] = flat.split(C)
        _check(mine | {"y": got["y"]}, got, share(want, **cuts))
        if counts != [collectives, collectives]:
            raise ArithmeticError(f"forward and backward took {counts}, not {collectives} each")
        _say("    forward and backward each took " + " and ".join(f"{n} {op}" for op, n in collectives.items()))

    _say("\n4. MLP: LayerNorm, f, column linear, GELU, row linear, g, residual. Between f and g nothing is sent: g\n"
         "   all-reduces y in the forward, f all-reduces grad_x in the backward.")
    step(F.gelu, 4 * C, 4 * C, False, {"all_reduce": 1})
    _say("\n5. Attention by heads. The rows of w_column lie (n_head, 3, head_dim), so that a share is n_head/tp whole\n"
         "   heads. Of [Q | K | V] it would be a piece of Q alone: `shard_linear` cuts each of the three by itself.")
    step(_heads, 3 * C, C, False, {"all_reduce": 1})
    _say("\n6. Both with sequence parallelism. LayerNorm and residual act on each token alone: there a rank has T/tp\n"
         "   tokens, f all-gathers them, g reduce-scatters the sum. The gradients of ln and b_row, which meet only\n"
         "   a rank's tokens, still have to be added up: one more all-reduce a step, for all layers together.")
    step(F.gelu, 4 * C, 4 * C, True, {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1})
    step(_heads, 3 * C, C, True, {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1})


def main() -> int:
    """Join the group (NCCL if each process has a GPU, else gloo), walk, and return the exit code: 0, 1 or 2."""
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    try:
        if sys.argv[1:]:
            raise UserError(f"unexpected argument {sys.argv[1]!r}: tensor_parallel.py takes none")
        _walk(dist.group.WORLD, device)
        code, line = 0, "\nRank 0: SUCCESS"
    except (ArithmeticError, UserError) as error:
        code, line = (2, f"error: {error}") if isinstance(error, UserError) else (1, f"\nRank 0: FAILED: {error}")
    _say(line)
    dist.barrier()  # nobody leaves before rank 0's line is out: torchrun stops the others at the first exit
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
