"""Collectives of CPU ranks on one box, through memory that they share: the same sums and gathers as gloo's, bit for bit
those of a fixed order of ranks, in a third of the time.

gloo passes a tensor to a thread of its own on either side, and waking those up costs a core that had nothing to do
more than the copy itself. Here a rank writes its tensor where the others can read it and counts up; who needs it
watches the counter. Each rank has two slots and uses them in turn: whoever has seen a rank's tensor number n knows that
this rank has read all of number n − 1, so that slot is free again. This holds while collectives of a group begin and
end one after another, which `styles.py` sees to.

They are operators, so that torch.compile leaves them in their place and `mesh.Collectives` counts them.
"""

import os
import platform
import sys
import time
from contextlib import suppress
from functools import reduce
from select import select

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from config import cores

_groups: dict[str, "Shared | None"] = {}  # by name; None: it has none


def connect(group: dist.ProcessGroup) -> bool:
    """Give the ranks of `group` memory in common. A collective of the group, and the same answer on each rank: False
    where it cannot be (GPUs, several boxes) or would not pay (more ranks than cores, which cannot all watch).
    """
    name = group.group_name
    if dist.get_backend(group) != "gloo":
        return False
    if name not in _groups or (_groups[name] and _groups[name].group is not group):
        # other processors than x86 may show a counter before what it counts
        possible = sys.platform == "linux" and platform.machine() == "x86_64" and (
            int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == dist.get_world_size() <= cores())
        shared = Shared(group)
        _groups[name] = shared if all(shared.tell(possible)) and shared.grow(2**20) else None
    return _groups[name] is not None


class Shared:
    """What the ranks of a group write for each other: a page that says what, then two slots, for each rank."""

    PAGE = 4096

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.number = self.capacity = 0  # of the last tensor; bytes of a slot

    def tell(self, what) -> list:
        """What each rank has to say, by gloo."""
        said = [None] * self.size
        dist.all_gather_object(said, what, self.group)
        return said

    def grow(self, capacity: int) -> bool:
        """Map slots of so many bytes anew; False, on each rank, if one of them may not open another's."""
        file = os.memfd_create("nanotp")  # goes with the processes that map it
        os.ftruncate(file, self.PAGE + 2 * capacity)
        files, parts = self.tell((os.getpid(), file)), None
        with suppress(RuntimeError, OSError):
            ends = [os.pidfd_open(pid) for pid, _ in files]
            parts = [torch.from_file(f"/proc/{pid}/fd/{number}", shared=True, size=self.PAGE + 2 * capacity,
                                     dtype=torch.uint8) for pid, number in files]
        opened = self.tell(parts is not None)
        os.close(file)
        if not all(opened):
            return False
        self.ends, self.capacity = ends, capacity  # the former are readable once a rank's process has ended
        self.heads = [part[:24].view(torch.int64).numpy() for part in parts]  # number; bytes of the odd, the even one
        self.slots = [part[self.PAGE :].chunk(2) for part in parts]
        return True

    def view(self, rank: int, like: torch.Tensor, number: int) -> torch.Tensor:
        """Tensor `number` of a rank, which is as `like` is."""
        slot = self.slots[rank][number % 2]
        return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def write(self, x: torch.Tensor) -> int:
        """Show `x` to the other ranks; returns its number."""
        size = x.numel() * x.element_size()
        if size > self.capacity:  # on every rank at this tensor, as their shapes are the same
            grown = self.grow(-(-size // self.PAGE) * self.PAGE)
            assert grown, "ranks no longer share memory"
        self.number += 1
        self.view(self.rank, x, self.number).copy_(x)
        head = self.heads[self.rank]
        head[1 + self.number % 2] = size
        head[0] = self.number
        return self.number

    def read(self, x: torch.Tensor, number: int) -> list[torch.Tensor]:
        """Tensor `number` of each rank, this one's being `x`; waits for those that are not there yet."""
        assert number == self.number, "collectives of a group overlap"
        size, found = x.numel() * x.element_size(), []
        for rank, head in enumerate(self.heads):
            if rank != self.rank:
                self._wait(rank, number)
                assert head[1 + number % 2] == size, f"rank {rank} sends {head[1 + number % 2]} bytes, not {size}"
            found.append(x if rank == self.rank else self.view(rank, x, number))
        return found

    def _wait(self, rank: int, number: int) -> None:
        head, begin, asked = self.heads[rank], time.monotonic(), 0
        while head[0] < number:
            waited = time.monotonic() - begin
            if waited > 0.05:  # it does something else, such as a checkpoint: leave the core to others
                time.sleep(2e-4)
            if waited > asked + 1:
                asked = waited
                ended = select([self.ends[rank]], [], [], 0)[0]
                if ended or waited > default_pg_timeout.total_seconds():
                    raise RuntimeError(f"rank {rank} of the tensor-parallel group sends nothing any more")


# ---------------------------------------------------------------------------------------------------------------------
# operators: a start returns the number of x, which the collective takes together with the same x

LIBRARY = torch.library.Library("nanotp", "DEF")


def operator(schema: str, like):
    """Register a function on CPU tensors as an operator; `like` makes an empty result from the same arguments."""
    def register(function):
        name = LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CPU")
        torch.library.register_fake(f"nanotp::{name}", like, lib=LIBRARY)
        return function
    return register


def number_of(x, *_):
    return torch.empty((), dtype=torch.int64)


# two names for one thing: selective recomputation keeps sums, and with them what started them, and repeats gathers
@operator("gather_start(Tensor x, str group) -> Tensor", number_of)
@operator("sum_start(Tensor x, str group) -> Tensor", number_of)
def start(x, group):
    return torch.tensor(_groups[group].write(x))


@operator("all_gather(Tensor x, Tensor number, str group, int size) -> Tensor",
          lambda x, number, group, size: x.new_empty(x.shape[0], x.shape[1] * size, *x.shape[2:]))
def all_gather(x, number, group, size):
    """(B, T/tp, C) → (B, T, C)."""
    return torch.cat(_groups[group].read(x, int(number)), dim=1)


@operator("reduce_scatter(Tensor x, Tensor number, str group, int size) -> Tensor",
          lambda x, number, group, size: x.new_empty(x.shape[0], x.shape[1] // size, *x.shape[2:]))
def reduce_scatter(x, number, group, size):
    """(B, T, C) → (B, T/tp, C): this rank's slice of the sum."""
    shared = _groups[group]
    return reduce(torch.add, [x.chunk(size, dim=1)[shared.rank] for x in shared.read(x, int(number))])


@operator("all_reduce(Tensor x, Tensor number, str group, bool max=False) -> Tensor", lambda x, *_: torch.empty_like(x))
def all_reduce(x, number, group, max=False):
    return reduce(torch.maximum if max else torch.add, _groups[group].read(x, int(number)))


def all_reduce_(x: torch.Tensor, op, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce `x` over the group in place, by SUM or MAX: through memory that `connect` gave it, or else as usual."""
    name = group.group_name
    if not (_groups.get(name) and _groups[name].group is group):
        dist.all_reduce(x, op, group=group)
        return x
    number = torch.ops.nanotp.sum_start(x, name)
    return x.copy_(torch.ops.nanotp.all_reduce(x, number, name, op == dist.ReduceOp.MAX))
