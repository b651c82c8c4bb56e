"""A run's checkpoints: saved, found, checked, resumed. `storage.py` knows how tensors lie in one.

    <out_dir>/checkpoints/step_000100/   __0_0.distcp …   each rank's parts of the parameters and of AdamW's moments
                                         .metadata        the index of them
                                         run.json         step, config, data, W&B id, versions; each file's sha256
                          latest, best   the name of a folder here

No random state is stored: batches, weights and dropout follow from (seed, step) alone. A folder is written under
another name, synced and renamed, so one called step_N is complete; only then does `latest` move, and only then are
older ones deleted. `latest` says where a run goes on: after `resume_step = N` folders beyond N stay until the run
comes by.
"""

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import storage
from config import Config, Failure, UserError
from mesh import Mesh
from model import GPT
from storage import FAILURES, Part, brief, parts

# A run that resumes with another value of one of these is another run. The first ones cannot be overridden.
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
SAME = (*SIZES, "total_batch_size", "seed", "shuffle", "lr_schedule", "learning_rate", "min_lr", "warmup_steps",
        "decay_steps", "weight_decay", "beta1", "beta2", "grad_clip", "dropout", "dtype")
NAME = re.compile(r"step_(\d+)")


class SaveFailed(Failure):
    """A checkpoint could not be written and the run is not to go on without it."""


def steps(out_dir: str | Path) -> list[int]:
    """The steps of a run's complete checkpoints, oldest first."""
    names = (p.name for p in Path(out_dir, "checkpoints").glob("step_*") if p.is_dir())
    return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)


def find(path: str | Path) -> Path:
    """The checkpoint that `path` means: a checkpoint folder, a run's folder (its latest), or its `latest` or `best`."""
    path = Path(path)
    if path.is_dir() and not (path / "run.json").exists():
        pointer = path / "checkpoints" / "latest"
        path = pointer if pointer.is_file() else (_folder(path, steps(path)[-1]) if steps(path) else path)
    if path.is_file() and path.name in ("latest", "best"):
        path = path.with_name(path.read_text().strip())
    if not (path / "run.json").is_file() and (path / "config.toml").is_file():
        raise UserError(f"{path} is a run that has saved no checkpoint yet: train it further, or name another")
    if not (path / "run.json").is_file():
        raise UserError(f"{path} is no checkpoint: name a run's folder, or one of its checkpoints/step_*")
    return path


def read(folder: Path) -> dict:
    """run.json of a checkpoint.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        meta = json.loads((folder / "run.json").read_text())
        if isinstance(meta["step"], int) and isinstance(meta["config"], dict) and isinstance(meta["files"], dict):
            return meta
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise UserError(f"{folder / 'run.json'} is missing, damaged or of another version")


def verify(folder: Path, mesh: Mesh) -> None:
    """Check every file of a checkpoint against its sha256, each rank a share of them. All ranks call it.

    Raises:
        UserError: on all ranks, naming the first file that is missing, cut short or changed.
    """
    meta = mesh.on_main(lambda: read(folder))
    faults = []
    for name in sorted(meta["files"])[mesh.rank :: mesh.world_size]:
        size, digest = meta["files"][name]
        try:
            found = (folder / name).stat().st_size
            if found != size:
                faults.append(f"{name} has {found} bytes of {size}")
            elif _sha256(folder / name) != digest:
                faults.append(f"{name} is damaged (its sha256 differs)")
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
    for found in _gather(faults, mesh):
        if found:
            raise UserError(f"checkpoint {folder}: {found[0]}")


def choose(config: Config, mesh: Mesh, data: dict) -> tuple[Path, dict] | None:
    """The checkpoint that `resume` and `resume_step` ask for, verified, and its run.json; None: start anew.

    What a killed run left half-written is removed. A damaged checkpoint is named and the one before it taken. `data`
    describes the token shards, as given to `Saver`. All ranks call it.

    Raises:
        UserError: the checkpoint is of another run, `resume_step` has none, or none is whole.
    """
    if not config.resume:
        return None
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0  # then the run has gone beyond resume_step
    back = config.resume_step if config.resume_step >= 0 and not restarted else None
    candidates = mesh.on_main(lambda: _candidates(Path(config.out_dir), back))
    for step in candidates:
        folder = _folder(config.out_dir, step)
        try:
            verify(folder, mesh)
        except UserError as error:
            if mesh.is_main:
                print(f"resume  {error}; trying the one before", flush=True)
            continue
        meta = read(folder)
        mesh.on_main(lambda folder=folder, meta=meta: _check_same(config, folder, meta, data))
        mesh.on_main(lambda folder=folder: _point(folder.parent / "latest", folder.name))
        return folder, meta
    if candidates:
        raise UserError(f"resume: no checkpoint of {config.out_dir} is whole" + f" at step {back}" * (back is not None)
                        + ": restore one, or start anew in another out_dir")
    return None


def _candidates(out: Path, back: int | None) -> list[int]:
    """Steps to try, in order: from the latest down. Half-written and half-deleted folders go."""
    for left in out.glob("checkpoints/step_*.*"):
        shutil.rmtree(left, ignore_errors=True)
    found = steps(out)
    if back is not None:
        if back not in found:
            raise UserError(f"resume_step = {back}: {out} has no such checkpoint, but "
                            + (", ".join(map(str, found)) or "none at all"))
        return [back]
    try:
        latest = int(NAME.fullmatch((out / "checkpoints" / "latest").read_text().strip())[1])
    except (OSError, TypeError):
        latest = max(found, default=0)
    return [step for step in reversed(found) if step <= latest]


def _check_same(config: Config, folder: Path, meta: dict, data: dict) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    keys = (*SAME, "max_steps") if config.lr_schedule == "wsd" else SAME  # there it says when the decay begins
    pairs = [(key, meta["config"].get(key, defaults[key]), getattr(config, key)) for key in keys]
    pairs += [(f"data_dir's {key}", meta.get("data", {}).get(key), value) for key, value in data.items()]
    changed = [(key, old, new) for key, old, new in pairs if old != new]
    fixed = [key for key, _, _ in changed if key in SIZES]
    if changed and (fixed or not config.resume_override):
        raise UserError(f"resume: {folder} was made with " + ", ".join(f"{key} = {old}" for key, old, _ in changed)
                        + "; this run has " + ", ".join(f"{key} = {new}" for key, _, new in changed) + ": set it back, "
                        + ("or choose another out_dir" if fixed else "or go on as another run, --resume_override=true")
                        + " (decay_steps = -1 follows max_steps)" * any(key == "decay_steps" for key, *_ in changed))


def _folder(out_dir: str | Path, step: int) -> Path:
    return Path(out_dir) / "checkpoints" / f"step_{step:06d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gather(value, mesh: Mesh, group=None) -> list:
    """`value` of every rank, by rank."""
    values = [value]
    if mesh.world_size > 1:
        values *= mesh.world_size
        dist.all_gather_object(values, value, group=group)
    return values


def _point(pointer: Path, name: str) -> None:
    """Make `latest` or `best` name a folder, in one move."""
    new = pointer.with_name(pointer.name + ".partial")
    _write(new, name + "\n")
    os.replace(new, pointer)
    _sync(pointer.parent)


def _delete(folder: Path) -> None:
    """Delete under another name: what is half-deleted must not pass for a checkpoint."""
    doomed = folder.with_name(folder.name + ".deleted")
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# saving and loading


def load(folder: Path, config: Config, mesh: Mesh, model: GPT, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill the model, and the optimizer if given, in place from a checkpoint of any mesh. All ranks call it.

    Raises:
        UserError: on all ranks, where the checkpoint is damaged or another model's.
    """
    meta = mesh.on_main(lambda: read(folder))
    if optimizer is not None:
        _start_state(optimizer, meta["step"])
    try:
        storage.read(folder, meta["files"], parts(config, model, optimizer), mesh.world_size == 1)
    except FAILURES as error:
        raise UserError(f"checkpoint {folder}: {brief(error)}") from None


@torch.no_grad()
def _start_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The state that AdamW makes at its first step, at step `step`, with moments to load into."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.tensor(float(step), device=p.device),
                                  "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class Saver:
    """Writes a run's checkpoints. All ranks call each method together, at the end of the same step.

    Asynchronous saves copy this rank's parts to the host, into buffers kept for the next time, and write from a thread
    while training goes on; one is under way at a time. The thread has a process group of its own, so its collectives
    cannot meet the training's.
    """

    def __init__(self, config: Config, mesh: Mesh, model: GPT, optimizer: torch.optim.Optimizer, data: dict, step: int):
        self.config, self.mesh, self.model, self.optimizer, self.data = config, mesh, model, optimizer, data
        self.group = dist.new_group(backend="gloo") if mesh.world_size > 1 else None
        self.background = config.async_save == "always" or (config.async_save == "auto" and mesh.device.type == "cuda")
        self.buffers: dict[str, torch.Tensor] = {}
        self.thread: threading.Thread | None = None
        self.saved = step  # the newest step that is on disk
        self.outcome: tuple[int, str | None, float] = step, None, 0.0

    def save(self, step: int, last: bool = False, **extra) -> None:
        """Save the state after `step`; `extra` goes into run.json. The run's `last` save waits, and must not fail.

        Raises:
            SaveFailed: on all ranks, where it failed and `last` or `on_save_error = "stop"`.
        """
        self.wait()
        state = parts(self.config, self.model, self.optimizer)
        meta = {"step": step, "config": vars(self.config) | {}, "data": self.data, "versions": {
            "python": platform.python_version(), "torch": torch.__version__}} | extra
        if last or not self.background:
            self._write(step, state, meta)
            self._report(last)
            return
        for name, part in state.items():
            if name not in self.buffers:
                self.buffers[name] = torch.empty_like(part.tensor, device="cpu", pin_memory=part.tensor.is_cuda)
            self.buffers[name].copy_(part.tensor, non_blocking=True)
            state[name] = dataclasses.replace(part, tensor=self.buffers[name])
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self.thread = threading.Thread(target=self._write, args=(step, state, meta), daemon=True)
        self.thread.start()

    def poll(self) -> None:
        """Report a save that has ended meanwhile; may raise as `save` does. One host collective while one runs."""
        if self.thread and not self.mesh.any(self.thread.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way, if any; may raise as `save` does."""
        if self.thread:
            self.thread.join()
            self.thread = None
            self._report(False)

    def close(self) -> None:
        """On any way out: let a save under way end. It cannot where a rank is lost, so not for ever."""
        if self.thread:
            self.thread.join(timeout=20)

    def _report(self, last: bool) -> None:
        step, error, seconds = self.outcome
        if error is None:
            self.saved = step
            message = f"saved   {_folder(self.config.out_dir, step)} in {seconds:.1f} s"
        else:
            message = f"checkpoint of step {step} not saved: {error}"
            if last or self.config.on_save_error == "stop":
                raise SaveFailed(message + (f"; the newest is of step {self.saved}" if self.saved else ""))
        if self.mesh.is_main:
            print(message, flush=True)

    def _write(self, step: int, state: dict[str, Part], meta: dict) -> None:
        """Write, agree and publish; whatever goes wrong on a rank is every rank's outcome and leaves no folder."""
        begin = time.perf_counter()
        target = _folder(self.config.out_dir, step)
        partial = target.with_name(target.name + ".partial")
        error, files = None, {}
        try:
            storage.write(partial, state, self.group)
            for path in partial.glob(f"__{self.mesh.rank}_*"):
                files[path.name] = path.stat().st_size, _sha256(path)
        except FAILURES as exception:
            error = brief(exception)
        everyone = _gather((error, files), self.mesh, self.group)
        error = next((e for e, _ in everyone if e), None)
        if self.mesh.is_main:
            try:
                if error is None:
                    self._publish(step, partial, target, meta, {k: v for _, f in everyone for k, v in f.items()})
            except OSError as exception:
                error = brief(exception)
            shutil.rmtree(partial, ignore_errors=True)
        self.outcome = step, _gather(error, self.mesh, self.group)[0], time.perf_counter() - begin

    def _publish(self, step: int, partial: Path, target: Path, meta: dict, files: dict) -> None:
        """On rank 0: complete the folder, give it its name, move `latest` and `best`, prune."""
        files[".metadata"] = (partial / ".metadata").stat().st_size, _sha256(partial / ".metadata")
        if lost := [name for name, (size, _) in files.items() if (partial / name).stat().st_size != size]:
            raise OSError(f"{partial / lost[0]} differs between nodes: out_dir must lie on a file system they share")
        _write(partial / "run.json", json.dumps(meta | {"files": files}, indent=1))
        _sync(partial)
        if target.exists():  # of the time before a resume_step; `latest` has moved back since
            _delete(target)
        os.replace(partial, target)
        _sync(target.parent)
        _point(target.parent / "latest", target.name)

        found = steps(self.config.out_dir)
        losses = {}
        for old in found:
            try:
                losses[old] = read(_folder(self.config.out_dir, old)).get("val_loss")
            except UserError:
                continue
        best = min((old for old in losses if losses[old] is not None), key=lambda old: losses[old], default=None)
        if best is not None:
            _point(target.parent / "best", _folder(self.config.out_dir, best).name)
        done = [old for old in found if old <= step]
        every = self.config.milestone_interval
        for old in done[: -self.config.keep_checkpoints]:
            if old != best and not (every and old % every == 0):
                _delete(_folder(self.config.out_dir, old))
