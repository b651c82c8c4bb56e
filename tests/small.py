"""A model small enough for the suite, data it can learn, and the run that every mesh is compared by."""

import math
import os

import torch
import torch.distributed as dist

from config import Config, check
from mesh import Mesh, mesh_over_world
from parallel import build_model, check_weights, make_optimizer
from train_gpt2_tp import train_step

CPU = torch.device("cpu")


def small_config(world_size: int = 1, **keys) -> Config:
    """3 heads of 16, vocabulary 1,000 (padded to 1,024), 8 sequences of 32 tokens a step."""
    defaults = {"n_layer": 2, "n_head": 3, "n_embd": 48, "block_size": 32, "vocab_size": 1000, "dtype": "float32",
                "total_batch_size": 8 * 32, "micro_batch_size": 2, "max_steps": 10, "warmup_steps": 3,
                "learning_rate": 2e-3, "min_lr": 2e-4, "eval_interval": 0}
    config = Config(**(defaults | keys))
    check(config, world_size)
    return config


def batch(step: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (sequences, block_size): arithmetic progressions through every 20th id, on all shards."""
    generator = torch.Generator().manual_seed(step)
    begin, stride = (torch.randint(1, high, (config.sequences, 1), generator=generator) for high in (50, 4))
    tokens = (begin + stride * torch.arange(config.block_size + 1)) * 20 % config.vocab_size
    return tokens[:, :-1], tokens[:, 1:]


def run_steps(config: Config, mesh: Mesh, steps: int = 10) -> tuple[list[float], list[float]]:
    """Losses (over the global batch) and gradient norms of the trainer's own steps; replicas are checked at the end."""
    model = build_model(config, mesh)
    optimizer = make_optimizer(model, config)
    losses, norms = [], []
    with torch.no_grad():  # a validation comes before the first step, as in a run
        model(*(rows.chunk(mesh.dp)[mesh.dp_rank] for rows in batch(0, config)))
    for step in range(steps):
        inputs, targets = (rows.chunk(mesh.dp)[mesh.dp_rank] for rows in batch(step, config))
        loss, norm = train_step(model, optimizer, inputs, targets, step, config, mesh)
        losses.append(mesh.all_mean(loss).item())
        norms.append(norm.item())
    check_weights(model, config, mesh)
    return losses, norms


def run_cells(rank: int, world_size: int, cells: list[dict]) -> list:
    """`run_steps` for each dict of config keys, one after the other in one process group.

    `"shared": True` among the keys has tensor parallelism go through shared memory, not gloo.
    """
    results = []
    for keys in cells:
        share_memory("shared" in keys)
        config = small_config(world_size, **{key: value for key, value in keys.items() if key != "shared"})
        results.append(run_steps(config, mesh_over_world(config, CPU)))
    return results


def share_memory(yes: bool) -> None:
    """Whether the meshes made from now on use `shm.py`, however few cores there are."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() if yes else 0)
    os.sched_getaffinity = lambda pid: range(64)


def difference(run: tuple, reference: tuple) -> float:
    """The largest relative difference of losses and norms; all of them must be finite."""
    assert all(math.isfinite(x) for values in (*run, *reference) for x in values)
    return max(abs(a - b) / abs(b) for ours, theirs in zip(run, reference, strict=True)
               for a, b in zip(ours, theirs, strict=True))
