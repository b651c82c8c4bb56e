"""Many ranks in one process: PyTorch's fake process group answers every collective at once, with whatever was there.

Good for what does not depend on values: shapes, memory, and which collectives are issued.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore


def simulate(function, world_size: int, *args):
    """The result of `function(*args)` in a fresh process that believes itself rank 0 of `world_size`."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_start, args=(function, world_size, folder, args), nprocs=1)
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _start(_, function, world_size: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    torch.save(function(*args), Path(folder) / "result.pt")
