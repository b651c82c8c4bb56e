"""Where a process stands: torchrun's process group, the device mesh over it, and how all ranks leave together."""

import ctypes
import importlib
import os
import resource
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shm
from config import Config, Failure, UserError, cores


@dataclass
class Mesh:
    """Where this process stands: `(dp_replicate, dp_shard, tp)`, tp innermost so that its ranks are neighbours."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    # numbers, not properties of the device mesh, which works for a tenth of a millisecond to tell one
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    device_mesh: DeviceMesh | None = None  # None: one process, no process group
    dp_group: dist.ProcessGroup | None = None  # (dp_replicate, dp_shard) flattened: one group, one collective
    group: dist.ProcessGroup | None = None  # all ranks; the tp group where it is those, as it may share memory

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp(self) -> int:
        """Data-parallel degree, sharded or not: how many ways a global batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    def all_mean(self, x: torch.Tensor) -> torch.Tensor:
        """Mean of `x` over data-parallel ranks; TP peers hold equal values already. One all-reduce."""
        if self.dp > 1:
            dist.all_reduce(x, group=self.dp_group)
            x /= self.dp
        return x

    def sum_(self, x: torch.Tensor) -> None:
        """Add up `x` over all ranks, in place."""
        shm.all_reduce_(x, dist.ReduceOp.SUM, self.group)

    def max(self, value: int) -> int:
        """The largest `value` of any rank. A collective on a host tensor, so the device is not waited for."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        shm.all_reduce_(tensor, dist.ReduceOp.MAX, self.group)
        return int(tensor)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return bool(self.max(int(flag)))

    def on_main(self, function):
        """The result of `function()`, run on rank 0, on every rank; a UserError of its is raised on every rank."""
        result = error = None
        if self.is_main:
            try:
                result = function()
            except UserError as e:
                error = e
        if self.world_size > 1:
            box = [result, error]
            dist.broadcast_object_list(box, src=0)
            result, error = box
        if error is not None:
            raise error
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            self.any(False)

    def close(self) -> None:
        if self.world_size > 1:
            dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the collectives issued under it, by kind, and the bytes of their payload on this rank.

    The payload of a collective is its whole tensor: what an all-gather puts out, a reduce-scatter takes in.
    """

    KINDS: ClassVar = {"reducescatter": "reduce-scatter", "allgather": "all-gather", "allreduce": "all-reduce"}

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile goes on compiling under it, and what it compiled still passes here

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor comes first: then what it does to local tensors passes here
        result = op(*args, **(kwargs or {}))
        if "c10d" in op.namespace or op.namespace == "nanotp":  # the latter are shm.py's
            name = op.__name__.replace("_", "")
            for key, kind in self.KINDS.items():
                if key in name:
                    tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
                    self.counts[kind] += 1
                    self.bytes[kind] += max(t.numel() * t.element_size() for t in tensors)
                    break
        elif op.namespace == "symm_mem" and "matmul" in op.__name__:  # async TP's: (A, B or Bs, …), a GEMM in one
            gathers = "gather" in op.__name__
            rows, like = (result[1][0], args[0]) if gathers else (args[0], result)  # all rows; as wide as the payload
            kind = "all-gather" if gathers else "reduce-scatter"
            self.counts[kind] += 1
            self.bytes[kind] += rows.numel() // rows.shape[-1] * like.shape[-1] * like.element_size()
        return result


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def start(config: Config) -> Mesh:
    """Join the process group that torchrun describes in the environment and lay the mesh over it.

    Raises:
        UserError: more processes on this box than GPUs.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        torch.use_deterministic_algorithms(True)
    if config.async_tp and not torch.cuda.is_available():
        raise UserError("async_tp = true on a machine without CUDA: it needs symmetric GPU memory; set it to false")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if local_world > torch.cuda.device_count():
            raise UserError(f"--nproc-per-node={local_world} on a box with {torch.cuda.device_count()} GPU(s): "
                            "one process a GPU; start fewer, or CUDA_VISIBLE_DEVICES= to run on the CPU")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # threads beyond the cores wait for each other in busy loops: steps take 20 times as long
        share = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size())))
        torch.set_num_threads(min(share, torch.get_num_threads()))
    if world_size() == 1:
        return Mesh(device)
    if config.compile:
        importlib.import_module("torch._dynamo")  # imported after the process group it keeps gloo's threads at exit
    if not dist.is_initialized():
        # torchrun keeps its store when it restarts the workers: under the same names they would find, and try to reach,
        # the addresses of those that died
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        # gloo beside NCCL carries what the host needs to agree on without waiting for the device
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=size)
    return mesh_over_world(config, device)


def start_silent() -> None:
    """Before `start`: join a group of torchrun's ranks whose collectives return at once, with this rank's own data.

    What is then timed is a step without its communication; the results are wrong.
    """
    # PyTorch registers this backend nowhere but in its own test helpers
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=world_size())


def keep_freed_memory() -> None:
    """Have glibc hand freed activations out again instead of returning them to the kernel.

    Every large tensor is else a fresh mapping whose pages fault one by one: about 13% of a CPU step.
    """
    with suppress(OSError, AttributeError):  # another C library: nothing to do
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: take large blocks from the heap
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: and never shrink it


def mesh_over_world(config: Config, device: torch.device) -> Mesh:
    """The mesh over an initialised process group."""
    def over(**dims: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    sizes = {"dp_replicate": config.dp_replicate, "dp_shard": config.dp_shard, "tp": config.tp}
    dp = over(dp=config.dp_replicate * config.dp_shard, tp=config.tp)["dp"]
    device_mesh = over(**sizes)
    only_tp = config.tp == dist.get_world_size() and device.type == "cpu"  # with GPUs only the world's has gloo too
    return Mesh(device, dist.get_rank(), dist.get_world_size(), **sizes, device_mesh=device_mesh,
                dp_group=dp.get_group(), group=device_mesh["tp"].get_group() if only_tp else dist.group.WORLD)


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process, now or at its highest."""
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: the peak so far is the nearest thing
        return resident_bytes(peak=True)


def peak_memory(before: int = 0) -> int:
    """Peak bytes of this process: allocated on its GPU, or resident beyond `before`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return max(0, resident_bytes(peak=True) - before)


def run(main, interrupted: str, out_of_memory: str) -> None:
    """`main(sys.argv[1:])`, the whole of a script: what ends it early becomes one line and an exit code on every rank.

    `interrupted` is what Ctrl-C prints, `out_of_memory` the remedy for that.
    """
    try:
        main(sys.argv[1:])
    except UserError as error:
        leave(f"error: {error}", 2)
    except Failure as error:
        leave(f"error: {error}", 1)
    except KeyboardInterrupt:
        leave(interrupted, 130)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError on GPUs; others have only their text
        texts = ("can't allocate memory", "ALLOC_FAILED", "out of memory")
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
            raise
        leave(f"error: out of memory at a peak of {peak_memory() / 2**30:.2f} GiB: {out_of_memory}", 2)


def leave(message: str, code: int) -> None:
    """End this process with `code`; rank 0 prints `message`, the others wait until it has.

    torchrun kills what is left once one worker has gone, so ranks meet in its key-value store first, for 10 s at most:
    a rank that fails alone prints for itself and the others are torchrun's. Works with and without a process group.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = int(os.environ.get("RANK", 0))
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    try:
        if world_size() > 1:
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                                  timeout=timedelta(seconds=10))
            key = f"nanotp/leave/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            if rank == 0:
                store.set(f"{key}/said", "1")
            store.wait([f"{key}/said"])
            if store.add(f"{key}/gone", 1) == world_size():
                store.set(f"{key}/all", "1")
            store.wait([f"{key}/all"])
    except (dist.DistError, KeyError, ValueError):  # no store, or no answer
        if rank:
            print(f"[rank {rank}] {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # a peer may sit in a collective that this process would wait for on an ordinary exit
