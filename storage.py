"""Tensors of a model on any mesh, on disk: what `torch.distributed.checkpoint` (DCP) stores of them and how it reads.

A tensor is stored as boxes of the whole parameter, without padding (`parallel.real_part`), so that any mesh reads what
any other wrote, and no rank gathers more than its own. Reading runs no code of a checkpoint's: DCP's index,
`.metadata`, goes through an unpickler that knows DCP's own classes only, and DCP reads tensors with `weights_only`.
"""

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.fsdp import FSDPModule

from config import Config, UserError
from model import GPT, real_shapes
from parallel import real_part

FAILURES = (Exception, CheckpointException)  # what `write` and `read` raise: DCP's own is no Exception
METADATA = {  # module → what DCP's .metadata needs of it
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float32"}, "torch.serialization": {"_get_layout"}, "pathlib": {"Path", "PosixPath"}}


@dataclass
class Part:
    """What a rank holds of a tensor: a view without padding, its offsets in the whole, and the whole's shape."""

    tensor: torch.Tensor
    offsets: torch.Size
    shape: torch.Size


@torch.no_grad()
def parts(config: Config, model: GPT, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Part]:
    """This rank's parts of the parameters (the tied table once) and of AdamW's moments, aliasing the live tensors."""
    found = {}
    shapes = real_shapes(config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass alone it may show its gathered copies, in the compute dtype
    for name, p in model.named_parameters():
        tensors = {f"model.{name}": p.detach()}
        if optimizer is not None:
            tensors |= {f"optimizer.{name}.{key}": optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}
        for key, tensor in tensors.items():
            view, offsets = real_part(tensor, shapes[name])
            found[key] = Part(view, torch.Size(offsets), shapes[name])
    return found


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes a dict of `Part`s but empty ones. Of equal parts on several ranks DCP keeps one, spread evenly."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self):
        self.plan = SavePlan([
            WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
                ChunkStorageMetadata(part.offsets, part.tensor.shape),
                TensorProperties.create_from_tensor(part.tensor), part.shape))
            for name, part in self.state_dict.items() if part.tensor.numel()])
        return self.plan

    def lookup_object(self, index):
        return self.state_dict[index.fqn].tensor


class _Writer(dcp.FileSystemWriter):
    """DCP's writer; where a disk is full it says so, and not what PyTorch's zip writer thinks of it."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Fills a dict of `Part`s in place from the stored boxes that overlap them."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self):
        items = []
        for name, part in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            size = getattr(stored, "size", None)
            # a longer context is read in part: `init_from` lets through what `resume` would have refused
            if size != part.shape and not (size and name == "model.wpe.weight" and size[0] > part.shape[0]):
                raise UserError(f"{name} is {tuple(size) if size else 'missing'} there, {tuple(part.shape)} here: it "
                                "is of another model, or damaged")
            box = ChunkStorageMetadata(part.offsets, part.tensor.shape)
            found = create_read_items_for_chunk_list(name, stored, [box]) if part.tensor.numel() else []
            if sum(item.lengths.numel() for item in found) != part.tensor.numel():
                raise UserError(f"{name} is stored only in part")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn].tensor


class _Unpickler(pickle.Unpickler):
    """Knows what `.metadata` is made of and nothing else, so that unpickling calls nothing else."""

    def find_class(self, module, name):
        if name in METADATA.get(module, ()):
            return super().find_class(module, name)
        raise UserError(f".metadata asks for {module}.{name}, which no checkpoint needs")


class _Reader(dcp.FileSystemReader):
    """DCP's reader with the restricted unpickler; files outside the folder, which have no checksum, are refused."""

    def __init__(self, folder: Path, files):
        super().__init__(folder)
        self.files = files

    def read_metadata(self, *args, **kwargs):
        with open(self.path / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise UserError(".metadata is none of DCP's")
        if unknown := {info.relative_path for info in metadata.storage_data.values()} - set(self.files):
            raise UserError(f".metadata points to {min(unknown)}, which run.json does not list")
        return metadata


def write(folder: Path, state: dict[str, Part], group: dist.ProcessGroup | None) -> None:
    """Write each rank's parts, synced, and the index. Raises on every rank of the group where it fails on one.

    `group` is a gloo one of all ranks; None: there is one process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process has no group
        dcp.save(state, storage_writer=_Writer(folder), planner=_SavePlanner(), process_group=group,
                 no_dist=group is None)


def read(folder: Path, files, state: dict[str, Part], alone: bool) -> None:
    """Fill the parts in place from `files`, the checked ones, by name. All ranks call it unless each is `alone`.

    Raises:
        UserError, CheckpointException: on all ranks, where the checkpoint is damaged or another model's.
    """
    reader = _Reader(folder, files)
    reader.read_metadata()  # DCP would hide what this raises
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, planner=_LoadPlanner(), no_dist=alone)


def brief(error: BaseException) -> str:
    """One line for what went wrong; of a failure that DCP gathered from ranks, the lowest one's."""
    where = ""
    if isinstance(error, CheckpointException):
        rank = min(error.failures)
        where, error = f"rank {rank}: " * (len(error.failures) > 1 or rank > 0), error.failures[rank][0]
    text = str(error).strip().splitlines() or [type(error).__name__]
    return where + text[0]
