"""Collectives and memory at 2 to 8 ranks, by simulated ranks."""

import math

import pytest
import torch.distributed as dist
from simulated import simulate
from small import CPU, batch, small_config

from config import Config, check
from mesh import Collectives, mesh_over_world, resident_bytes
from model import real_shapes
from parallel import build_model, local, make_optimizer
from train_gpt2_tp import train_step


def one_step(tp: int, **keys) -> tuple[dict, dict]:
    """Counts and bytes of the collectives of one step of one micro-batch, by kind."""
    config = small_config(tp, tp=tp, micro_batch_size=8, **keys)
    mesh = mesh_over_world(config, CPU)
    model = build_model(config, mesh)
    with Collectives() as counted:
        train_step(model, make_optimizer(model, config), *batch(0, config), 0, config, mesh)
    return dict(counted.counts), dict(counted.bytes)


def steps(tp: int) -> dict:
    return {(sequence_parallel, n_layer): one_step(tp, n_layer=n_layer, sequence_parallel=sequence_parallel)
            for sequence_parallel in (True, False) for n_layer in (1, 3)}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_blocks_communicate_as_little_as_megatron(tp):
    measured = simulate(steps, tp, tp)
    activation = 8 * 32 * 48 * 4  # bytes of B·T·C in float32
    for sequence_parallel, floor in ((True, {"all-gather": 4, "reduce-scatter": 4}), (False, {"all-reduce": 4})):
        (counts_1, bytes_1), (counts_3, bytes_3) = (measured[sequence_parallel, n] for n in (1, 3))
        for kind in counts_3:  # two more blocks cost two floors, and nothing else grows but what clipping flattens
            assert counts_3[kind] - counts_1[kind] == 2 * floor.get(kind, 0)
        for kind, n in floor.items():
            assert bytes_3[kind] - bytes_1[kind] == 2 * n * activation  # a ratio of exactly 1.0
        if sequence_parallel:  # the replicated gradients travel flattened: 2 LayerNorms, 2 biases a block and no more
            assert bytes_3["all-reduce"] - bytes_1["all-reduce"] == 2 * 4 * 48 * 4


def build_xl(tp: int) -> tuple[int, int, int, int]:
    config = Config(n_layer=48, n_head=25, n_embd=1600, tp=tp, total_batch_size=1024, micro_batch_size=1)
    check(config, tp)
    mesh = mesh_over_world(config, CPU)
    before = resident_bytes()
    model = build_model(config, mesh)
    shard = sum(local(p).numel() * 4 for p in model.parameters())
    largest = max(math.prod(shape) * 4 for shape in real_shapes(config).values())
    dist.destroy_process_group()
    return resident_bytes(peak=True), resident_bytes(peak=True) - before, shard, largest


@pytest.mark.slow
def test_a_rank_of_gpt2_xl_needs_its_shard_and_one_parameter():
    peak, grown, shard, largest = simulate(build_xl, 8, 8)
    assert peak < 6 * 2**30
    assert shard < 1.09 * 1_558e6 * 4 / 8 * 1.05  # 32 heads for 25
    assert grown < shard + largest + 200e6, (grown, shard, largest)
