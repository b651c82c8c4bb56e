"""tensor_parallel.py beside float64 on one process, PyTorch's own DTensor styles, and a user's torchrun."""

import copy
import functools
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT
from ranks import run_ranks
from small import CPU, small_config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import tensor_parallel as tp
from config import UserError
from mesh import Mesh, mesh_over_world
from parallel import build_model, is_replicated, local, reduce_gradients
from quantize import FloatLinear, quantize

C, T = 24, 12
OPERATORS = ("mlp", "mlp sequence-parallel")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.c_fc, self.c_proj = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(self.ln(x))))


def relative(got, want):
    """Largest difference over largest value; infinite where the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30)).item()


def share(tensor, dim, group):
    return tensor.chunk(group.size(), dim)[group.rank()]


def whole_case(*shape):
    """A linear 24 → 36 in float64: x, w, b, grad_y and y, grad_x, grad_w, grad_b from plain autograd."""
    torch.manual_seed(1)
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((*shape, C), (36, C), (36,)))
    y = F.linear(x, w, b)
    grad_y = torch.randn_like(y)
    return x.detach(), w.detach(), b.detach(), grad_y, (y.detach(), *torch.autograd.grad(y, (x, w, b), grad_y))


def plain_functions(group):
    """Both plain pairs over several leading shapes, with and without bias, x split and whole."""
    found = {}
    for shape in ((), (5,), (2, 3), (2, 1, 3)):
        x, w, b, grad_y, (y, grad_x, grad_w, grad_b) = whole_case(*shape)
        for bias in (True, False):
            got = tp.column_linear_forward(x, share(w, 0, group), group, share(b, 0, group) if bias else None)
            found[f"column y {shape} {bias}"] = relative(got, share(y if bias else y - b, -1, group))
            got = tp.row_linear_forward(share(x, -1, group), share(w, 1, group), group, b if bias else None)
            found[f"row y {shape} {bias}"] = relative(got, y if bias else y - b)
        got = tp.column_linear_backward(share(grad_y, -1, group), x, share(w, 0, group), group)
        for name, a, e in zip("xwb", got, (grad_x, share(grad_w, 0, group), share(grad_b, 0, group)), strict=True):
            found[f"column grad_{name} {shape}"] = relative(a, e)
        got = tp.row_linear_backward(grad_y, share(x, -1, group), share(w, 1, group), group)
        for name, a, e in zip("xwb", got, (share(grad_x, -1, group), share(grad_w, 1, group), grad_b), strict=True):
            found[f"row grad_{name} {shape}"] = relative(a, e)
        found[f"row y whole x {shape}"] = relative(
            tp.row_linear_forward(x, share(w, 1, group), group, b, input_is_split=False), y)
        got = tp.row_linear_backward(grad_y, x, share(w, 1, group), group, input_is_split=False)
        for name, a, e in zip("xwb", got, (grad_x, share(grad_w, 1, group), grad_b), strict=True):
            found[f"row whole grad_{name} {shape}"] = relative(a, e)
    return found


def by_hand(model, x, group, sequence_parallel):
    """`model` with f and g over the shares of its weights; x and y are this rank's. Returns y and its leaves."""
    p = {"x": x, "ln.weight": model.ln.weight, "ln.bias": model.ln.bias,
         "c_fc.weight": share(model.c_fc.weight, 0, group), "c_fc.bias": share(model.c_fc.bias, 0, group),
         "c_proj.weight": share(model.c_proj.weight, 1, group), "c_proj.bias": model.c_proj.bias}
    p = {name: tensor.detach().clone().requires_grad_() for name, tensor in p.items()}
    h = tp.f(F.layer_norm(p["x"], (C,), p["ln.weight"], p["ln.bias"]), group, sequence_parallel)
    h = F.gelu(F.linear(h, p["c_fc.weight"], p["c_fc.bias"]))
    return tp.g(F.linear(h, p["c_proj.weight"]), group, sequence_parallel) + p["c_proj.bias"], p


def beside_dtensor(group):
    """f and g beside stock DTensor styles: float32, the same weights, forward and every gradient."""
    found, mesh = {}, DeviceMesh.from_group(group, "cpu")
    for case, sequence_parallel in zip(OPERATORS, (False, True), strict=True):
        torch.manual_seed(2)
        model, x, grad_y = MLP(), torch.randn(2, T, C), torch.randn(2, T, C)
        if sequence_parallel:
            x, grad_y = share(x, 1, group), share(grad_y, 1, group)
        y, p = by_hand(model, x, group, sequence_parallel)
        y.backward(grad_y)
        if sequence_parallel:
            plan = {"ln": SequenceParallel(), "c_fc": ColwiseParallel(input_layouts=Shard(1)),
                    "c_proj": RowwiseParallel(output_layouts=Shard(1))}
        else:
            plan = {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()}
        theirs = parallelize_module(copy.deepcopy(model), mesh, plan)
        x = x.clone().requires_grad_()
        theirs_y = theirs(x)
        theirs_y.backward(grad_y)
        pairs = {"y": (y, theirs_y), "x": (p["x"].grad, x.grad)}
        for name, parameter in theirs.named_parameters():
            got, want = p[name].grad, parameter.grad
            if isinstance(want, DTensor):
                partial = want.placements[0].is_partial() or (sequence_parallel and want.placements[0].is_replicate())
                if partial:  # ours is this rank's term: add up
                    dist.all_reduce(got, group=group)
                    want = want.full_tensor()
                else:
                    want = want.to_local()
            pairs[name] = got, want
        found |= {f"{case} {name}": relative(a.detach(), b.detach()) for name, (a, b) in pairs.items()}
    return found


def beside_float64(group):
    """The same operators beside the unsharded module in float64 with plain autograd."""
    found = {}
    for case, sequence_parallel in zip(OPERATORS, (False, True), strict=True):
        torch.manual_seed(3)
        model = MLP().double()
        x, grad_y = torch.randn(2, T, C).double().requires_grad_(), torch.randn(2, T, C).double()
        want = {"y": model(x)}
        want["y"].backward(grad_y)
        want |= {"x": x.grad} | {name: parameter.grad for name, parameter in model.named_parameters()}
        cut = functools.partial(share, dim=1, group=group) if sequence_parallel else lambda tensor: tensor
        y, p = by_hand(model, cut(x.detach()), group, sequence_parallel)
        y.backward(cut(grad_y))
        for name in ("ln.weight", "ln.bias", "c_proj.bias") if sequence_parallel else ():
            dist.all_reduce(p[name].grad, group=group)
        dims = {"c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1} | (
            {"x": 1, "y": 1} if sequence_parallel else {})
        for name, tensor in want.items():
            got = y if name == "y" else p[name].grad
            found[f"{case} {name}"] = relative(
                got.detach(), share(tensor.detach(), dims[name], group) if name in dims else tensor.detach())
    return found


def sharded_modules(group):
    """shard_linear: a module's forward and gradients, fused splits, and quantised rows and columns."""
    found, world = {}, group.size()
    torch.manual_seed(4)
    model = MLP().double()
    x, grad_y = torch.randn(2, T, C).double(), torch.randn(2, T, C).double()
    want = model(x)
    want.backward(grad_y)
    mine = copy.deepcopy(model)
    tp.shard_linear(mine.c_fc, "column", group)
    tp.shard_linear(mine.c_proj, "row", group)
    mine.zero_grad()
    got = mine(x)
    got.backward(grad_y)
    found["module y"] = relative(got.detach(), want.detach())
    for name, dim in {"c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1, "c_proj.bias": None,
                      "ln.weight": None}.items():
        whole = model.get_parameter(name).grad
        whole = whole if dim is None else share(whole, dim, group)
        found[f"module {name}"] = relative(mine.get_parameter(name).grad, whole)
    assert mine.c_fc.out_features == 4 * C // world and mine.c_proj.in_features == 4 * C // world

    fused = nn.Linear(C, 24 + 12 + 12).double()  # k and v half as wide as q
    q, k, v = fused(x).split([24, 12, 12], -1)
    tp.shard_linear(fused, "column", group, weight_splits=[24, 12, 12])
    want = torch.cat([share(part, -1, group) for part in (q, k, v)], -1)
    found["fused q, k, v"] = relative(fused(x).detach(), want.detach())

    for bits, group_size in ((8, 0), (4, 8)):  # 96 inputs: groups of 8 fall whole on 1, 2, 3 and 4 ranks
        for style, n_in, n_out in (("column", 24, 96), ("row", 96, 24)):
            whole = quantize(nn.Linear(n_in, n_out).double(), bits, group_size)
            x = torch.randn(3, n_in).double()
            splits = None if style == "row" else [48, 24, 24]
            sharded = tp.shard_linear(copy.deepcopy(whole), style, group, splits)
            got = sharded(x if style == "column" else share(x, -1, group))
            want = whole(x)
            if style == "column":
                want = torch.cat([share(part, -1, group) for part in want.split(splits, -1)], -1)
            found[f"int{bits} {style}"] = relative(got, want)
            assert sharded.weight.numel() * world == whole.weight.numel(), "the weights are really cut"
    return found


def packed_floats(group):
    """FloatLinear, cut and then packed, beside the whole one as it is."""
    found = {}
    for style, n_in, n_out in (("column", 24, 96), ("row", 96, 24)):
        torch.manual_seed(8)
        whole, x = FloatLinear(n_in, n_out).requires_grad_(False), torch.randn(3, n_in)
        sharded = tp.shard_linear(copy.deepcopy(whole), style, group).pack()
        got, want = sharded(x if style == "column" else share(x, -1, group)), whole(x)
        found[f"packed {style}"] = relative(got, want if style == "row" else share(want, -1, group))
    return found


def block_by_hand(block, x, group, s):
    """A block of `model.py` with f and g over the shares of its weights; x and y are this rank's."""
    cuts = {"attn.c_attn.weight": 0, "attn.c_attn.bias": 0, "attn.c_proj.weight": 1, "mlp.c_fc.weight": 0,
            "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 1}
    p = {name: (share(q, cuts[name], group) if name in cuts else q).detach().clone().requires_grad_()
         for name, q in block.named_parameters()}
    leaf = x.detach().clone().requires_grad_()
    h = tp.f(F.layer_norm(leaf, x.shape[-1:], p["ln_1.weight"], p["ln_1.bias"]), group, s)
    qkv = F.linear(h, p["attn.c_attn.weight"], p["attn.c_attn.bias"])
    q, k, v = qkv.unflatten(-1, (-1, 3, block.attn.head_dim)).transpose(1, 3).unbind(1)  # (B, heads/tp, T, head_dim)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = leaf + tp.g(F.linear(y, p["attn.c_proj.weight"]), group, s) + p["attn.c_proj.bias"]
    h = tp.f(F.layer_norm(x, x.shape[-1:], p["ln_2.weight"], p["ln_2.bias"]), group, s)
    h = F.gelu(F.linear(h, p["mlp.c_fc.weight"], p["mlp.c_fc.bias"]), approximate="tanh")
    return x + tp.g(F.linear(h, p["mlp.c_proj.weight"]), group, s) + p["mlp.c_proj.bias"], p | {"x": leaf}


def beside_the_plan(group):
    """A block of the trainer's model under `parallel.py`'s plan beside f and g on the same weights, float32."""
    found = {}
    for s in (False, True):
        config = small_config(group.size(), tp=group.size(), n_head=4, n_layer=1, sequence_parallel=s)
        mesh = mesh_over_world(config, CPU)
        planned, whole = build_model(config, mesh), build_model(config, Mesh(CPU))  # the weights follow from the seed
        generator = torch.Generator().manual_seed(9)
        x, grad_y = (torch.randn(2, config.block_size, config.n_embd, generator=generator) for _ in range(2))
        if s:
            x, grad_y = share(x, 1, group), share(grad_y, 1, group)
        y, p = block_by_hand(whole.h[0], x, group, s)
        y.backward(grad_y)
        theirs_x = x.clone().requires_grad_()
        theirs_y = planned.h[0](theirs_x)
        theirs_y.backward(grad_y)
        reduce_gradients(list(planned.h[0].parameters()), mesh)
        pairs = {"y": (y.detach(), theirs_y.detach()), "x": (p["x"].grad, theirs_x.grad)}
        for name, q in planned.h[0].named_parameters():
            got = p[name].grad
            if s and is_replicated(q):  # ours met this rank's tokens only
                dist.all_reduce(got, group=group)
            pairs[name] = got, local(q.grad)
        found |= {f"plan, sequence_parallel = {s}: {name}": relative(a, b) for name, (a, b) in pairs.items()}
    return found


def compiled(group):
    """torch.compile takes f, g and sharded modules whole, and gives what eager gives."""
    torch.manual_seed(5)
    model, x, found = MLP(), torch.randn(2, T, C), {}
    weights = share(model.c_fc.weight, 0, group), share(model.c_fc.bias, 0, group), share(model.c_proj.weight, 1, group)

    def both_ways(x, w_column, b_column, w_row):
        for s in (False, True):
            x = share(x, 1, group) if s else x
            h = F.gelu(F.linear(tp.f(x, group, s), w_column, b_column))
            x = tp.g(F.linear(h, w_row), group, s)
        return x

    results = []
    for function in (both_ways, torch.compile(both_ways, backend="aot_eager", fullgraph=True)):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *weights)]
        y = function(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    found |= {f"compiled {i}": relative(got, want) for i, (want, got) in enumerate(zip(*results, strict=True))}
    rows = nn.ModuleList(tp.shard_linear(make(nn.Linear(96, 32)), "row", group)
                         for make in (lambda linear: linear, lambda linear: quantize(linear, 8)))
    with torch.no_grad():
        x = torch.randn(2, 96 // group.size())
        got = torch.compile(lambda x: [row(x) for row in rows], backend="aot_eager", fullgraph=True)(x)
        found |= {f"compiled row {i}": relative(got[i], row(x)) for i, row in enumerate(rows)}
    return found


def refused(group):
    """The message of each wrong call, for a group of 2."""
    def message(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except UserError as error:
            return str(error)
        return "accepted"

    shard, whole = tp.shard_linear, lambda *shape: nn.Linear(*shape)
    done = shard(whole(8, 8), "row", group)
    packed = quantize(whole(64, 64), 4).pack()
    return {
        "outputs": message(shard, whole(8, 9), "column", group),
        "inputs": message(shard, whole(9, 8), "row", group),
        "a part": message(shard, whole(8, 12), "column", group, [6, 3, 3]),
        "the sum": message(shard, whole(8, 12), "column", group, [4, 4, 2]),
        "style": message(shard, whole(8, 8), "diagonal", group),
        "twice": message(shard, done, "row", group),
        "packed": message(shard, packed, "row", group),
        "groups": message(shard, quantize(whole(96, 8), 4, 32), "row", group),
        "plain": message(tp.row_linear_forward, torch.ones(9), torch.ones(2, 4), group, input_is_split=False),
        "tokens": message(tp.g, torch.ones(2, 5, 4), group, True),
    }


def broken_walks(group):
    """What the walk raises when the file has a mistake in it, and what for sizes that do not divide."""
    row, enter, found = tp.row_linear_forward, tp.f, {}
    breaks = {
        "bias": ("row_linear_forward", lambda x, w, group, b: row(x, w, group, 2 * b)),  # added on both ranks
        "no sum backward": ("f", lambda x, group, s=False: tp.Mirrored.apply(x, group, None, None)),
        "a collective too many": ("f", lambda x, group, s=False: enter(tp.Mirrored.apply(
            x, group, lambda x, group: tp._all_reduce(x, group) / 2, None), group, s)),
        "heads": ("N_HEAD", 3)}
    for name, (attribute, broken) in breaks.items():
        right = getattr(tp, attribute)
        setattr(tp, attribute, broken)
        try:
            tp._walk(group, torch.device("cpu"))
        except (ArithmeticError, UserError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        setattr(tp, attribute, right)
    return found


def compare(group):
    return {"float64": plain_functions(group) | beside_float64(group) | sharded_modules(group),
            "float32": beside_dtensor(group) | packed_floats(group)}


def two_ranks(rank):
    group = dist.group.WORLD
    found = compare(group)
    found["float32"] |= compiled(group) | beside_the_plan(group)
    return found, refused(group), broken_walks(group)


def one_three_and_four_ranks(rank):
    """All four ranks; then rank 0 alone beside a group of 1, 2, 3, whose ranks in the group are others."""
    alone, three = dist.new_group([0]), dist.new_group([1, 2, 3])
    return compare(dist.group.WORLD), compare(alone if rank == 0 else three)


def assert_equal(found, where):
    for precision, limit in (("float64", 1e-12), ("float32", 1e-6)):
        assert found[precision]
        for name, difference in found[precision].items():
            assert difference <= limit, f"{name} {where}: {difference}"


def test_two_ranks():
    for rank, (found, refusals, broken) in enumerate(run_ranks(two_ranks, 2)):
        assert_equal(found, f"on rank {rank} of 2")
        for name, text in refusals.items():
            assert text != "accepted" and "\n" not in text, f"{name}: {text}"
        assert len(broken) == 4, broken
        for name, text in broken.items():
            expected = "UserError: 2 processes" if name == "heads" else "ArithmeticError"
            assert text.startswith(expected), f"{name}: {text}"


def test_one_three_and_four_ranks():
    for rank, (four, fewer) in enumerate(run_ranks(one_three_and_four_ranks, 4)):
        assert_equal(four, f"on rank {rank} of 4")
        assert_equal(fewer, f"on rank {rank}, of a group of 1 or 3")


def test_walk_as_a_user_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "tensor_parallel.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "Rank 0: SUCCESS"
    shapes = [line.split(":")[0].strip() for line in lines if line.startswith("    rank ")]
    assert shapes == ["rank 0", "rank 1"] * 7, "shapes of the ranks in order"
    assert "    rank 1: x (2, 12, 96), w (48, 96), b (48,), y (2, 12, 48)" in lines


@pytest.mark.parametrize(("arguments", "broken", "code", "last"), [
    ([], False, 0, "Rank 0: SUCCESS"),
    (["--fast"], False, 2, "error: unexpected argument '--fast': tensor_parallel.py takes none"),
    ([], True, 1, "Rank 0: FAILED: y on rank 0 is off the unsharded computation by "),
])
def test_walk_without_torchrun(arguments, broken, code, last, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", *arguments])
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if broken:
        right = tp.row_linear_forward
        monkeypatch.setattr(tp, "row_linear_forward", lambda x, w, group, b: right(x, w, group, 2 * b))
    assert tp.main() == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    assert not dist.is_initialized()
