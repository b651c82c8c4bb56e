"""Every mesh against one process, and one process against plain PyTorch. Real gloo ranks."""

import copy
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from ranks import run_ranks
from small import CPU, batch, difference, run_cells, run_steps, share_memory, small_config
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import cross_entropy

import parallel
import shm
from mesh import Collectives, Mesh, mesh_over_world
from model import Block, Sizes
from parallel import build_model, check_weights, clip_grad_norm, make_optimizer, reduce_gradients
from train_gpt2_tp import learning_rate, train_step

BOUND = 1e-5
CLIPS = (0.01, 1.0)
ROOT_MARK = "parity"  # `pytest -m parity` prints the table


@pytest.fixture(scope="module")
def one_process():
    """Losses and norms of one process, by clip."""
    return {clip: run_steps(small_config(grad_clip=clip), Mesh(CPU)) for clip in CLIPS}


@pytest.mark.parametrize("clip", CLIPS)
def test_one_process_equals_plain_pytorch(clip, one_process):
    """Whole-batch cross_entropy, torch's clip_grad_norm_ and unfused AdamW on the plain model."""
    config = small_config(grad_clip=clip)
    model = build_model(config, Mesh(CPU))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95), fused=False, foreach=False)
    losses, norms = [], []
    for step in range(10):
        inputs, targets = batch(step, config)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3  # it learns: equality is not that of runs that stand still
    assert difference(one_process[clip], (losses, norms)) < BOUND


# the parity matrix: config keys by world size; 3 heads are padded wherever tp = 2 or 4
CELLS = {
    2: [{"tp": 2}, {"tp": 2, "loss_parallel": False}, {"tp": 2, "sequence_parallel": False},
        {"tp": 2, "sequence_parallel": False, "loss_parallel": False}, {"tp": 2, "micro_batch_size": 8},
        {"tp": 2, "activation_checkpointing": "block"}, {"tp": 2, "activation_checkpointing": "selective"},
        {"dp_replicate": 2}, {"dp_replicate": 2, "micro_batch_size": 4}, {"dp_shard": 2}, {"dp_shard": 2,
         "micro_batch_size": 4}, {"dp_shard": 2, "accumulate_sharded": False},
        {"dp_shard": 2, "reshard_after_forward": False, "activation_checkpointing": "block"},
        {"tp": 2, "compile": True}, {"tp": 2, "shared": True}, {"tp": 2, "sequence_parallel": False, "shared": True},
        {"tp": 2, "shared": True, "activation_checkpointing": "block"},
        {"tp": 2, "shared": True, "activation_checkpointing": "selective"}, {"tp": 2, "shared": True, "compile": True}],
    4: [{"tp": 4}, {"tp": 4, "sequence_parallel": False}, {"tp": 4, "loss_parallel": False},
        {"tp": 2, "dp_replicate": 2}, {"tp": 2, "dp_replicate": 2, "sequence_parallel": False},
        {"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2, "sequence_parallel": False},
        {"tp": 2, "dp_shard": 2, "micro_batch_size": 4}, {"tp": 2, "dp_shard": 2, "accumulate_sharded": False},
        {"tp": 2, "dp_shard": 2, "activation_checkpointing": "selective"},
        {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1},
        {"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1, "accumulate_sharded": False},
        {"tp": 2, "dp_shard": 2, "compile": True, "activation_checkpointing": "block"},
        {"tp": 4, "shared": True}, {"tp": 2, "dp_shard": 2, "sequence_parallel": False, "shared": True}],
}


@pytest.mark.parity
@pytest.mark.parametrize("world_size", CELLS)
def test_every_mesh_equals_one_process(world_size, one_process, capsys):
    # one clip a cell (every other cell the tight one), and both for the first
    clips = [CLIPS[i % 2] for i in range(len(CELLS[world_size]))]
    cells = [keys | {"grad_clip": clip} for keys, clip in zip(CELLS[world_size], clips, strict=True)]
    cells.append(CELLS[world_size][0] | {"grad_clip": 1.0})
    results = run_ranks(run_cells, world_size, world_size, cells)
    lines, worst = [], 0.0
    for i, keys in enumerate(cells):
        runs = [results[rank][i] for rank in range(world_size)]
        assert all(run == runs[0] for run in runs), f"ranks disagree: {keys}"
        (losses, norms), (ref_losses, ref_norms) = runs[0], one_process[keys["grad_clip"]]
        loss, norm = difference((losses,), (ref_losses,)), difference((norms,), (ref_norms,))
        worst = max(worst, loss, norm)
        c = small_config(world_size, **{key: value for key, value in keys.items() if key != "shared"})
        rest = [f"{key}={value}" for key, value in keys.items() if key not in (
            "tp", "dp_shard", "dp_replicate", "micro_batch_size", "grad_clip", "shared")]
        rest += ["shared memory"] * ("shared" in keys)
        lines.append(f"{c.tp:>3} {c.dp_replicate:>3} {c.dp_shard:>3} {c.accumulation:>4} {c.grad_clip:>5}  "
                     f"{loss:>8.1e} {norm:>8.1e}  {' '.join(rest)}")
    if ROOT_MARK in sys.argv:
        with capsys.disabled():
            print(f"\n{world_size} ranks against one process, largest relative difference in 10 steps"
                  "\n tp rep shd accu  clip      loss     norm  else\n" + "\n".join(lines))
    assert worst < BOUND, "\n".join(lines)


# (n_head, tp, n_embd) by world size: tp does not divide n_head; data parallelism takes what tp leaves
HEADS = {4: [(25, 2, 100), (25, 4, 100), (3, 2, 48), (5, 4, 40)], 8: [(12, 8, 48)]}


def head_config(world_size: int, n_head: int, tp: int, n_embd: int):
    return small_config(world_size, n_head=n_head, tp=tp, n_embd=n_embd, n_layer=1, micro_batch_size=4, max_steps=20,
                        grad_clip=0.5)


def padded_heads(rank, world_size):
    runs = []
    for case in HEADS[world_size]:
        config = head_config(world_size, *case)
        runs.append(run_steps(config, mesh_over_world(config, CPU), steps=20))  # asserts the padding at its end
    return runs


@pytest.mark.parity
@pytest.mark.parametrize("world_size", HEADS)
def test_padded_heads_train_the_unpadded_model(world_size):
    runs = run_ranks(padded_heads, world_size, world_size)[0]
    for (n_head, tp, n_embd), run in zip(HEADS[world_size], runs, strict=True):
        reference = run_steps(head_config(1, n_head, 1, n_embd), Mesh(CPU), steps=20)
        assert reference[0][-1] < reference[0][0] - 1
        assert difference(run, reference) < BOUND, (n_head, tp)


def count_collectives(config, mesh) -> dict[str, int]:
    """Collectives of one whole training step of one micro-batch, by kind; our own count must agree on either way."""
    inputs, targets = batch(0, config)
    counted = []
    for shared in (False, True):
        share_memory(shared)
        model = build_model(config, mesh)
        optimizer = make_optimizer(model, config)
        with CommDebugMode() as counter, Collectives() as ours:
            train_step(model, optimizer, inputs, targets, 0, config, mesh)
        counted.append((ours.counts, ours.bytes))
        if not shared:
            found = {str(op).split(".")[-1]: n for op, n in counter.get_comm_counts().items()}
    assert counted[0] == counted[1], counted
    assert sum(found.values()) == sum(counted[0][0].values()), (found, counted)
    return found


def beside_stock_styles(mesh) -> dict[str, float]:
    """A block under our styles and under PyTorch's own: largest differences of its output and gradients."""
    found = {}
    for sequence_parallel, shared in itertools.product((True, False), repeat=2):
        share_memory(shared)
        between = Shard(1) if sequence_parallel else Replicate()
        config = small_config(2, tp=2, sequence_parallel=sequence_parallel)
        torch.manual_seed(0)
        block = Block(config, Sizes.padded(config, 2))
        stock = {"attn.c_attn": ColwiseParallel(input_layouts=between), "attn.c_proj": RowwiseParallel(
            output_layouts=between), "mlp.c_fc": ColwiseParallel(input_layouts=between), "mlp.c_proj": RowwiseParallel(
            output_layouts=between)}
        if sequence_parallel:
            stock |= dict.fromkeys(("ln_1", "ln_2"), SequenceParallel(use_local_output=True))
        ours = {key.removeprefix("h.*."): style for key, style in parallel.plan(config).items() if key in (
            f"h.*.{name}" for name in (*stock, "ln_1", "ln_2"))}
        x, grad, results = torch.randn(2, 8, 48), torch.randn(2, 8, 48), []
        for styles in (ours, stock):
            sharded = parallelize_module(copy.deepcopy(block), mesh, styles)
            mine = [t.chunk(2, 1)[mesh.get_local_rank()] if sequence_parallel else t for t in (x, grad)]
            entered = mine[0].clone().requires_grad_()
            y = sharded(entered)
            y.backward(mine[1])
            grads = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                     for name, p in sharded.named_parameters()}
            results.append({"y": y.detach(), "x": entered.grad} | grads)
        for name, want in results[1].items():
            off = (results[0][name] - want).abs().max() / want.abs().max()
            found[f"{name}, sequence_parallel={sequence_parallel}, shared={shared}"] = off.item()
    return found


def graphs_of_compiled_blocks(mesh) -> list[int]:
    """How many graphs three blocks are compiled to, forward and backward run once."""
    counts, inductor = [], torch.compile
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for keys in ({}, {"sequence_parallel": False}, {"sequence_parallel": False, "activation_checkpointing": "block"}):
        share_memory("activation_checkpointing" in keys)
        config = small_config(2, tp=2, n_layer=3, compile=True, **keys)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        build_model(config, mesh)(*batch(0, config)).backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compile = inductor
    return counts


def async_tp(mesh) -> tuple[list, dict, float]:
    """A compiled pass with async TP beside an eager one: what each counts, fused operators by name, and how far their
    gradients differ.

    The compiler's pass is the real one, told that there is NCCL. Its fused operators, which exist on CUDA only, are
    played by PyTorch's own fallbacks.
    """
    library, fused = torch.library.Library("symm_mem", "IMPL"), Counter()

    def play(name):
        def run(*args, **kwargs):
            fused[name] += 1
            return getattr(symmetric_memory, f"_{name}_fallback")(*args, **kwargs)
        library.impl(name, run, "CPU")

    play("fused_all_gather_matmul")
    play("fused_matmul_reduce_scatter")
    torch._dynamo.reset()
    share_memory(False)
    counts, grads = [], []
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(_micro_pipeline_tp=False):
        patch.setattr(dist, "is_nccl_available", lambda: True)
        for compiled in (False, True):
            config = small_config(2, tp=2, n_layer=1, compile=compiled, async_tp=compiled)
            model = build_model(config, mesh)
            with Collectives() as counted:
                model(*batch(0, config)).backward()
            counts.append((dict(counted.counts), dict(counted.bytes)))
            grads.append([p.grad.to_local() for p in model.parameters()])
    off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*grads, strict=True))
    return counts, dict(fused), off


def ranks_worker(rank):
    """What needs two ranks but no training run; asserts here, counts returned."""
    counts = {}
    for sequence_parallel in (True, False):
        for n_layer in (1, 3):
            config = small_config(2, tp=2, n_layer=n_layer, sequence_parallel=sequence_parallel, micro_batch_size=8)
            counts[sequence_parallel, n_layer] = count_collectives(config, mesh_over_world(config, CPU))

    config = small_config(2, tp=2)
    mesh = mesh_over_world(config, CPU)
    model = build_model(config, mesh)
    params = list(model.parameters())
    assert model.lm_head.weight is model.wte.weight and len(params) == len({id(p) for p in params})
    assert all(isinstance(p, DTensor) for p in params)

    inputs, targets = batch(0, config)
    model(inputs, targets).backward()
    grad = model.wte.weight.grad
    assert grad.placements == (Shard(0),) and grad.to_local().shape == (512, 48)  # of 1,024 padded rows
    reduce_gradients(params, mesh)
    assert all(not p.grad.placements[0].is_partial() for p in params)

    # every way of clipping and stepping ends in the same weights
    whole = [p.grad.clone() for p in params]
    outcomes = []
    for foreach, options in ((True, {"foreach": True}), (False, {"foreach": False}), (None, {"fused": True})):
        model = build_model(config, mesh)
        for p, grad in zip(model.parameters(), whole, strict=True):
            p.grad = grad.clone()
        norm = clip_grad_norm(list(model.parameters()), 0.1, mesh, foreach=foreach)
        make_optimizer(model, config, **options).step()
        outcomes.append((norm, [p.to_local().clone() for p in model.parameters()]))
    expected_norm = torch.stack([g.full_tensor().double().square().sum() for g in whole]).sum().sqrt()
    for norm, weights in outcomes:
        assert abs(norm.item() - expected_norm.item()) < 1e-6 * expected_norm.item()
        for ours, theirs in zip(weights, outcomes[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

    # a replicated parameter that drifts is found
    with torch.no_grad():
        model.ln_f.bias.to_local()[3] += 1e-7 * rank
    with pytest.raises(AssertionError, match=r"ln_f\.bias"):
        check_weights(model, config, mesh)
    dist.barrier()

    # so is a plan that does not fit the model
    real_plan = parallel.plan
    extra = {"h.*.mlp.c_fx": parallel.Replicated(Shard(1))}
    for change, message in ((extra, "c_fx"), ({"ln_f": None}, "leaves out ln_f")):
        parallel.plan = lambda c, change=change: {k: v for k, v in (real_plan(c) | change).items() if v}
        with pytest.raises(AssertionError, match=message):
            build_model(config, mesh)
    parallel.plan = real_plan
    return counts, beside_stock_styles(mesh.device_mesh["tp"]), graphs_of_compiled_blocks(mesh), async_tp(mesh)


def waits_for_one_that_dies(rank, folder):
    """Two ranks share memory, the second leaves without a word; how long the first then waits for it, in s."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    share_memory(True)
    assert shm.connect(dist.group.WORLD)
    name = dist.group.WORLD.group_name

    def total():
        x = torch.ones(3)
        return shm.all_reduce(x, shm.start(x, name), name).tolist()

    assert total() == [2, 2, 2]
    if rank:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of the tensor-parallel group sends nothing any more"):
        total()
    Path(folder, "waited").write_text(str(time.monotonic() - begin))
    os._exit(0)


def test_a_rank_that_dies_frees_the_one_that_waits(tmp_path):
    """Also while nobody has asked how it ended, so that its process is still listed."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=waits_for_one_that_dies, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(60)
    waited = tmp_path / "waited"
    for process in ranks:
        process.kill()
        process.join()
    assert float(waited.read_text()) < 5


def test_collectives_and_guards():
    counts, off, graphs, (by_step, fused, off_fused) = run_ranks(ranks_worker, 2)[0]
    assert by_step[0] == by_step[1]
    assert fused == {"fused_all_gather_matmul": 4, "fused_matmul_reduce_scatter": 4}
    assert off_fused < 1e-5
    assert max(off.values()) < 1e-5, off
    assert len(off) == 2 * 2 * 14
    assert graphs == [1, 1, 1]  # no block is compiled by itself, or a deep model would meet the limit on that
    for sequence_parallel, per_block in ((True, {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}),
                                         (False, {"all_reduce": 4})):
        shallow, deep = counts[sequence_parallel, 1], counts[sequence_parallel, 3]
        grown = {op: deep[op] - shallow.get(op, 0) for op in deep if deep[op] != shallow.get(op, 0)}
        assert grown == {op: 2 * n for op, n in per_block.items()}
        # the rest of a step: wte forward and backward, lm_head's, 2 for the loss, 1 for the norm, 1 for what is Partial
        rest = sum(shallow.values()) - sum(per_block.values())
        assert rest == (4 + 2 + 1 + 1 if sequence_parallel else 2 + 2 + 1), shallow
