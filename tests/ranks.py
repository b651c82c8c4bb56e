"""Run a function on several real processes joined by gloo, and collect what each rank returns."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

mp.set_forkserver_preload(["train_gpt2_tp"])  # imported once, by the server that all ranks are forked from


def run_ranks(function, world_size: int, *args) -> list:
    """`function(rank, *args)` on `world_size` processes with an initialised gloo group; results by rank.

    `function` must be importable (module level), its results picklable. An exception on any rank fails the caller.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_start, args=(function, world_size, folder, args), nprocs=world_size,
                           start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _start(rank: int, function, world_size: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
