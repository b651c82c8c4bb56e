"""Tensor parallelism as a table: the plan, the sharded weights, and gradients across ranks.

Placements are DTensor's, over the `tp` dimension of the mesh: `Shard(d)` holds a slice of dimension d, `Replicate()`
the same whole tensor, `Partial()` a summand of it. Where tp = 1 parameters are plain tensors and nothing here
communicates but the gradient mean over data-parallel ranks.
"""

import warnings
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from config import Config
from mesh import Mesh
from model import GPT, Sizes, initial_value, real_shapes, seed_from
from styles import Colwise, Replicated, ReplicatedDropout, Rowwise, Vocab

# ---------------------------------------------------------------------------------------------------------------------
# the plan


def plan(config: Config) -> dict[str, ParallelStyle]:
    """Which style each module that owns parameters gets. B·T·C is a micro-batch's activation.

    Collectives a block, forward and backward, of B·T·C each: with sequence parallelism 4 all-gathers (into c_attn and
    c_fc; backward into both c_proj) and 4 reduce-scatters, without it 4 all-reduces.
    """
    # activations between blocks (B, T, C): each rank a slice of T, or each rank all of it
    between = Shard(1) if config.sequence_parallel else Replicate()
    column, row, replicated = Colwise(between), Rowwise(between), Replicated(between)
    vocab = Vocab(between, config.loss_parallel)
    whole = () if config.sequence_parallel else ("drop", "h.*.drop_1", "h.*.drop_2")
    return {
        # module            style        its parameters          its output
        "wte": vocab,                  # Shard(0): vocabulary    between
        "wpe": replicated,             # Replicate               (T/tp or T, C)
        "h.*.ln_1": replicated,        # Replicate               between
        "h.*.attn.c_attn": column,     # Shard(0): heads         (B, T, heads/tp · 3 · head_dim)
        "h.*.attn.c_proj": row,        # Shard(1), bias Repl.    between
        "h.*.ln_2": replicated,        # Replicate               between
        "h.*.mlp.c_fc": column,        # Shard(0): hidden        (B, T, hidden/tp)
        "h.*.mlp.c_proj": row,         # Shard(1), bias Repl.    between
        "ln_f": replicated,            # Replicate               between
        "lm_head": vocab,              # wte's                   loss, or whole logits
    } | dict.fromkeys(whole, ReplicatedDropout())


def apply_plan(model: GPT, config: Config, mesh: DeviceMesh) -> None:
    """Apply the plan to a model on meta; every key must match a module and every parameter become a DTensor."""
    styles = plan(config)
    names = [name for name, _ in model.named_modules()]
    for key in styles:
        assert any(_matches(name, key) for name in names), f"plan key {key!r} matches no module"
    parallelize_module(model, mesh, styles, src_data_rank=None)
    model.tie()
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), f"the plan leaves out {name}"


def _matches(name: str, key: str) -> bool:
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


# ---------------------------------------------------------------------------------------------------------------------
# FSDP, recomputation, compilation, dropout


def wrap_blocks(model: GPT, config: Config, mesh: Mesh) -> None:
    """Compile, recompute and shard (FSDP) each block, inside out, as the config says; shard the rest with the model."""
    for block in model.h:
        if config.compile:  # the forward alone: FSDP's hooks stay outside
            block.forward = torch.compile(block.forward, fullgraph=True)
        if config.activation_checkpointing == "block":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif config.activation_checkpointing == "selective" and not config.compile:  # the compiler does it by itself
            contexts = partial(create_selective_checkpoint_contexts, _keep)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    if config.async_tp and mesh.tp > 1:
        enable_async_tp(mesh.device_mesh["tp"])
    if mesh.dp_shard > 1:
        dims = ("dp_replicate", "dp_shard") if mesh.dp_replicate > 1 else ("dp_shard",)
        # the float32 residual stream enters a block as it is; weights are gathered in the compute dtype
        policy = MixedPrecisionPolicy(config.torch_dtype, torch.float32, cast_forward_inputs=False)
        options = {"mesh": mesh.device_mesh[dims], "mp_policy": policy,
                   "reshard_after_forward": config.reshard_after_forward}
        for block in model.h:
            fully_shard(block, **options)
        fully_shard(model, **options | {"reshard_after_forward": False})  # its backward begins where its forward ends


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Have the compiler cut GEMMs beside a collective in pieces that run while the others' pieces travel.

    Both switches are private in PyTorch. Without the second one the compiler leaves all as it was and says nothing,
    although up to 2.13 it is marked as needed no longer.
    """
    name = mesh.get_group().group_name
    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(name)
    assert symmetric_memory.is_symm_mem_enabled_for_group(name), "async_tp = true finds no symmetric memory"


def _keep(context, op, *args, **kwargs) -> CheckpointPolicy:
    """Selective recomputation keeps what costs most to make again: GEMMs, attention, and sums over ranks."""
    name = str(op)
    kept = ("aten.mm", "aten.addmm", "aten._scaled_dot_product", "reduce_scatter", "all_reduce", "sum_start")
    return CheckpointPolicy.MUST_SAVE if any(k in name for k in kept) else CheckpointPolicy.PREFER_RECOMPUTE


def sync_in_backward(model: GPT, config: Config, last: bool) -> None:
    """Before a micro-batch's backward: FSDP reduce-scatters gradients once a step, or each time; HSDP averages once."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or config.accumulate_sharded)
        model.set_requires_all_reduce(last)


def seed_dropout(model: GPT, config: Config, mesh: Mesh, step: int, micro: int) -> None:
    """Make the masks of a micro-batch a function of (seed, step, micro-batch, layer, data and tensor rank).

    The default generator, different on each rank, serves what is sharded: attention's heads, and with sequence
    parallelism the residual stream. A replicated stream's modules (`SharedDropout`) get a seed that TP peers share.
    """
    if config.dropout:
        place = f"{config.seed}/{step}/{micro}/{mesh.dp_rank}"
        torch.manual_seed(seed_from(f"{place}/{mesh.tp_rank}"))
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.seed = seed_from(f"{place}/{name}")


# ---------------------------------------------------------------------------------------------------------------------
# weights


@torch.no_grad()
def build_model(config: Config, mesh: Mesh, draw: bool = True) -> GPT:
    """GPT-2 with this rank's shards of the initial weights. No rank holds more than its shards and one parameter.

    `draw = False` leaves them zero, for `checkpoint.load` or `hf.load` to fill.
    """
    with torch.device("meta"):
        model = GPT(config, Sizes.padded(config, mesh.tp))
    if mesh.tp > 1:
        apply_plan(model, config, mesh.device_mesh["tp"])
    wrap_blocks(model, config, mesh)
    model.to_empty(device=mesh.device)
    model.tie()
    shapes = real_shapes(config)
    for name, p in model.named_parameters():
        if draw:
            fill(p, initial_value(name, shapes[name], config))
        else:
            local(p).zero_()
    assert model.lm_head.weight is model.wte.weight, "the tie is lost"
    check_weights(model, config, mesh)
    return model


def box(p: torch.Tensor) -> tuple[list[int], list[int]]:
    """Where this rank's part lies in the whole (padded) parameter `p`: offsets and sizes, one of each a dimension.

    tp cuts first, dp_shard what tp has left, in pieces as torch.chunk makes them, so a part is one contiguous box.
    """
    offsets, sizes = [0] * p.ndim, list(p.shape)
    if isinstance(p, DTensor):
        placements = dict(zip(p.device_mesh.mesh_dim_names, p.placements, strict=True))
        for dim in ("tp", "dp_shard"):
            # FSDP's placement of a dimension that tp cuts too is no Shard by class, but has a `dim` as Shard has
            if (d := getattr(placements.get(dim), "dim", None)) is not None:
                mesh = p.device_mesh[dim]
                piece = -(-sizes[d] // mesh.size())
                begin = min(mesh.get_local_rank() * piece, sizes[d])
                offsets[d], sizes[d] = offsets[d] + begin, min(piece, sizes[d] - begin)
    return offsets, sizes


def real_part(p: torch.Tensor, real: torch.Size) -> tuple[torch.Tensor, list[int]]:
    """This rank's part of `p` (or of a moment laid out as `p` is) without padding, as a view, and its offsets.

    `real` is the parameter's shape without padding (`model.real_shapes`). The view is empty on a rank that holds
    nothing but padding; its offsets are then inside `real`.
    """
    offsets, sizes = box(p)
    part = local(p)
    for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        begin = min(offset, real[d])
        part = part.narrow(d, 0, min(size, real[d] - begin))
        offsets[d] = begin
    return part, offsets


@torch.no_grad()
def fill(p: torch.Tensor, value: torch.Tensor) -> None:
    """Copy this rank's part of `value`, whole and without padding, into `p`; padding becomes zero."""
    local(p).zero_()
    part, offsets = real_part(p, value.shape)
    part.copy_(value[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))])


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, gradient or moment; shares its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_replicated(x: torch.Tensor) -> bool:
    """Whether every TP rank holds the same part of `x`."""
    if not isinstance(x, DTensor) or "tp" not in x.device_mesh.mesh_dim_names:
        return False
    return x.placements[x.device_mesh.mesh_dim_names.index("tp")].is_replicate()


@torch.no_grad()
def check_weights(model: GPT, config: Config, mesh: Mesh) -> None:
    """Assert that padding is zero, and that what ranks hold in common (replicated over tp, or over dp_replicate) is
    equal to the bit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward alone it may show its gathered copies
    named, shapes = dict(model.named_parameters()), real_shapes(config)
    for name, p in named.items():
        padding = local(p).count_nonzero() - real_part(p, shapes[name])[0].count_nonzero()
        assert padding == 0, f"the padding of {name} is no longer zero"
    for dim in ("dp_replicate", "tp") if mesh.world_size > 1 else ():
        names = [n for n, p in named.items() if dim == "dp_replicate" or is_replicated(p)]
        if mesh.device_mesh[dim].size() == 1 or not names:
            continue
        sums = torch.stack([local(named[n]).view(torch.int32).sum(dtype=torch.int64) for n in names])
        lowest, highest = sums.clone(), sums
        group = mesh.device_mesh[dim].get_group()
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        drifted = [n for n, same in zip(names, (lowest == highest).tolist(), strict=True) if not same]
        assert not drifted, f"ranks along {dim} hold different values of {', '.join(drifted[:3])}"


# ---------------------------------------------------------------------------------------------------------------------
# gradients

BUCKET = 2**23  # elements of a data-parallel all-reduce: 32 MB


@torch.no_grad()
def reduce_gradients(params: list[nn.Parameter], mesh: Mesh) -> None:
    """Make gradients whole, once a step: replicated parameters' in one all-reduce, the others averaged over dp.

    With sequence parallelism such a gradient is Partial (but for row-parallel biases): summed over tp, averaged over
    dp. Where it is whole it travels only for dp, and then too over all ranks at once: they end with the same bits.
    FSDP (dp_shard > 1) has done all this in the backward, parameter by parameter.
    """
    if mesh.dp_shard > 1:
        return
    replicated = [p for p in params if is_replicated(p) and (mesh.dp > 1 or p.grad.placements[0].is_partial())]
    if replicated:
        for p in replicated:
            copies = mesh.dp if p.grad.placements[0].is_partial() else mesh.world_size
            p.grad = DTensor.from_local(p.grad.to_local().div_(copies), p.device_mesh, p.placements, run_check=False)
        _reduce_flat([p.grad.to_local() for p in replicated], mesh.sum_)
    if mesh.dp > 1:
        over_dp = partial(dist.all_reduce, group=mesh.dp_group)
        bucket, size = [], 0
        for p in params:
            if is_replicated(p):
                continue
            grad = local(p.grad).div_(mesh.dp)
            if bucket and size + grad.numel() > BUCKET:
                _reduce_flat(bucket, over_dp)
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.numel()
        _reduce_flat(bucket, over_dp)


def _reduce_flat(tensors: list[torch.Tensor], all_reduce) -> None:
    """Sum each tensor over ranks in place, by one call of `all_reduce`."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        all_reduce(tensors[0])
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))


@torch.no_grad()
def clip_grad_norm(params: list[nn.Parameter], max_norm: float, mesh: Mesh, foreach: bool | None = None):
    """Scale gradients so that their global norm is at most `max_norm` (0: leave them) and return the norm before.

    Call it after `reduce_gradients`. Sharded gradients count once each, replicated ones once in all. One all-reduce of
    one number. The norm is a float32 scalar on the device, equal on every rank.
    """
    grads = [local(p.grad) for p in params]
    # TP peers hold the same part of a replicated gradient: the first of them counts it for all
    counted = [g for g, p in zip(grads, params, strict=True) if mesh.tp_rank == 0 or not is_replicated(p)]
    square = torch.nn.utils.get_total_norm(counted, foreach=foreach).square()
    if mesh.dp_shard * mesh.tp > 1:  # over all copies of the model at once: the same bits on every rank
        mesh.sum_(square)
        square /= mesh.dp_replicate
    norm = square.sqrt()
    if max_norm:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)  # the 1e-6 is torch.nn.utils.clip_grad_norm_'s
        if foreach is not False:
            torch._foreach_mul_(grads, scale)
        else:
            for grad in grads:
                grad.mul_(scale)
    return norm


def make_optimizer(model: GPT, config: Config, **options) -> torch.optim.AdamW:
    """Fused AdamW on this rank's shards: matrices decay, vectors do not. `options` override (tests force `foreach`)."""
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
    options = options or {"fused": True}
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-8, **options)
