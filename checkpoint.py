"""Save and resume: `torch.distributed.checkpoint`, each rank its shard, and a JSON file beside it.

A checkpoint is `<out_dir>/checkpoints/step_000100/`. It is written under a temporary name and renamed when all ranks
are done, so a folder of that name is complete.
"""

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from config import Config, UserError
from mesh import Mesh
from model import GPT

# A run that resumes with another value of one of these is another run.
FIXED = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "total_batch_size", "seed", "tp")


def folder(config: Config, step: int) -> Path:
    return Path(config.out_dir) / "checkpoints" / f"step_{step:06d}"


def steps(config: Config) -> list[int]:
    """The steps of the complete checkpoints of a run, oldest first."""
    names = (p.name for p in Path(config.out_dir).glob("checkpoints/step_*") if p.is_dir())
    return sorted(int(m[1]) for m in map(re.compile(r"step_(\d+)").fullmatch, names) if m)


def save(config: Config, mesh: Mesh, model: GPT, optimizer: torch.optim.Optimizer, step: int, **extra) -> Path:
    """Write model, optimizer and step; `extra` goes into the JSON. All ranks call it. Returns the folder."""
    target = folder(config, step)
    partial = target.with_name(target.name + ".partial")

    def prepare():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.on_main(prepare)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process has no group
        dcp.save(_state(model, optimizer), checkpoint_id=partial, no_dist=mesh.world_size == 1)

    def finish():
        meta = {"step": step, "config": vars(config)} | extra
        (partial / "run.json").write_text(json.dumps(meta, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in steps(config)[: -config.keep_checkpoints]:
            shutil.rmtree(folder(config, old))
    mesh.on_main(finish)
    return target


def read(config: Config) -> dict | None:
    """What run.json of the newest checkpoint says, or None where there is none.

    Raises:
        UserError: the checkpoint is of another run: a key of FIXED differs.
    """
    if not (found := steps(config)):
        return None
    path = folder(config, found[-1]) / "run.json"
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path.parent} cannot be read ({error}): delete it to resume from the one before") \
            from None
    for key in FIXED:
        if meta["config"].get(key) != getattr(config, key):
            raise UserError(f"resume: {path.parent} was made with {key} = {meta['config'].get(key)}, this run has "
                            f"{key} = {getattr(config, key)}: set it back, or choose another out_dir")
    return meta


def load(config: Config, mesh: Mesh, model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Fill model and optimizer, in place, from the checkpoint of `step`. All ranks call it."""
    _start_state(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(_state(model, optimizer), checkpoint_id=folder(config, step), no_dist=mesh.world_size == 1)


def _state(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters (the tied table once) and AdamW's moments and step, by name; every tensor is the live one."""
    state = {}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p.detach()
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    return state


@torch.no_grad()
def _start_state(optimizer: torch.optim.Optimizer) -> None:
    """The state that AdamW makes at its first step, so that there is something to load into."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p),
                                  "exp_avg_sq": torch.zeros_like(p)}
