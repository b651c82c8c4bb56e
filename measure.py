"""Time the trainer's own step on random tokens under one mesh. `benchmark.py` starts it, a row at a time; by hand:

    torchrun --standalone --nproc-per-node=2 measure.py configs/gpt2_124m.toml --tp=2 --steps=5
"""

import itertools
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import config as configuration
from config import Config, UserError
from mesh import Collectives, Mesh, peak_memory, resident_bytes, run, start, start_silent, world_size
from metrics import device_name, elapsed, peak_flops, stamp
from parallel import build_model, make_optimizer
from train_gpt2_tp import train_step


@dataclass
class Measure(Config):
    """Time the trainer's step under the mesh of a config, on random tokens; needs no data folder."""

    steps: int = 5
    """Steps that are timed."""
    untimed_steps: int = 2
    """Steps before them: allocation, compilation, the optimizer's state."""
    communicate: bool = True
    """false: collectives return at once, so that the time without communication is measured."""
    result: str = ""
    """JSON file that rank 0 writes; empty: it prints."""
    profile: str = ""
    """Folder for a Chrome trace and a summary by operator of one step more."""
    memory: str = ""
    """Folder for a CUDA memory snapshot of one step more."""


def measure(c: Measure, mesh: Mesh) -> dict:
    """What one process group has to say of its mesh.

    Returns:
        `seconds` of each timed step on this rank, `memory` in bytes (the largest rank's peak: allocated on its GPU, or
        resident beyond what was before the model), `collectives` of one step as {kind: [count, bytes]} on this rank,
        `peak_flops` of all devices together and what that is, and the device's name.
    """
    torch.set_float32_matmul_precision("highest" if c.dtype == "float32" else "high")
    before = resident_bytes()
    model = build_model(c, mesh)
    optimizer = make_optimizer(model, c)
    generator = torch.Generator().manual_seed(c.seed + mesh.dp_rank)
    tokens = torch.randint(c.vocab_size, (c.sequences // mesh.dp, c.block_size + 1), generator=generator)
    tokens = tokens.to(mesh.device)

    def step(n: int) -> None:
        train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], n, c, mesh)

    for n in range(c.untimed_steps):
        with Collectives() if n == 0 else nullcontext() as counted:
            step(n)
        if n == 0:
            collectives = {kind: [count, counted.bytes[kind]] for kind, count in counted.counts.items()}
    mesh.barrier()
    stamps = [stamp(mesh.device)]
    for n in range(c.steps):
        step(c.untimed_steps + n)
        stamps.append(stamp(mesh.device))
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = [elapsed(a, b) for a, b in itertools.pairwise(stamps)]
    memory = mesh.max(peak_memory(before))
    if c.profile:
        profile_step(step, Path(c.profile), mesh)
    if c.memory:
        memory_snapshot(step, Path(c.memory), mesh)
    mesh.barrier()  # on a CPU all ranks time their GEMM at once
    peak, what = peak_flops(mesh.device, c.torch_dtype)
    return {"seconds": seconds, "memory": memory, "collectives": collectives, "peak_flops": peak * mesh.world_size,
            "peak_name": what, "device": device_name(mesh.device)}


def profile_step(step, folder: Path, mesh: Mesh) -> None:
    """Write `trace.json` (for chrome://tracing or ui.perfetto.dev) and `operators.txt` of one step of rank 0."""
    on_gpu = mesh.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, record_shapes=True) if mesh.is_main else nullcontext() as profiler:
        step(0)
        if on_gpu:
            torch.cuda.synchronize()
    if mesh.is_main:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        (folder / "operators.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=25))


def memory_snapshot(step, folder: Path, mesh: Mesh) -> None:
    """Write `memory.pickle` (for pytorch.org/memory_viz) of one step of rank 0."""
    if not mesh.is_main:
        step(0)
        return
    # private in PyTorch, and the way its documentation says
    torch.cuda.memory._record_memory_history()
    step(0)
    torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)


def main(argv: list[str]) -> None:
    c = configuration.parse(Measure, argv, toml=True)
    configuration.check(c, world_size())
    configuration.check_torch(torch.__version__)
    for name in ("steps", "untimed_steps"):
        if getattr(c, name) < 1:
            raise UserError(f"{name} = {getattr(c, name)}: it must be at least 1")
    if not c.communicate and world_size() > 1:
        start_silent()
    mesh = start(c)
    if c.memory and mesh.device.type != "cuda":
        raise UserError("memory = true on a machine without CUDA: only the CUDA allocator keeps such a history; the "
                        "table's memory column is the peak of a rank")
    result = json.dumps(measure(c, mesh))
    if mesh.is_main:
        if c.result:
            Path(c.result).write_text(result)
        else:
            print(result)
    mesh.close()


if __name__ == "__main__":
    run(main, "interrupted", "lower micro_batch_size or block_size, or raise tp")
