"""Token shards on disk → the batch of a given step.

A split is all shards of a folder whose name says `train` or `val`, in the order of their names: one long list of N
tokens. Window i has the tokens [i·T, i·T + T) as inputs and [i·T + 1, i·T + T + 1) as targets (T = block_size), so
windows share no target, may cross from one shard into the next, and number (N - 1) // T.

Step s takes windows k·B … k·B + B - 1 (B = sequences of the global batch, k = s modulo the steps of an epoch) and
dp rank r of R the r-th contiguous B/R of them: nothing but (files, seed, B, T, s) decides, so the step is all the state
there is. An epoch is (N - 1) // T // B steps. Each token is a target once an epoch, but for the split's first token,
which nothing precedes, and fewer than B·T at its end. With `shuffle`, each epoch takes the windows in an order of its
own, drawn from (seed, epoch), and which are left out differs; without, each is the files from the beginning.

`python data.py DIR [configs/NAME.toml]` shows a folder's shards, the epochs of a run, and every problem found.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import VOCAB_SIZE, Config, UserError, parse, run
from config import check as check_config

MANIFEST = "manifest.json"  # written by fineweb.py
CHECKED = ".checked.json"  # file → [size, mtime, smallest id, largest id], so that a shard is scanned once
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 1024  # llm.c, modded-nanogpt: 256 int32, then uint16
SCAN = 1 << 24  # tokens looked at a time


@dataclass(frozen=True)
class Shard:
    """A file of tokens: 1-D, `tokens` of them, `dtype` from byte `offset` on."""

    path: Path
    dtype: np.dtype
    offset: int
    tokens: int

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as they are on disk.

        Read and not mapped: a mapped page counts as this process's memory until the shard is closed, and a shard
        that shrinks while it is mapped kills the process without a word.
        """
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                size = self.dtype.itemsize
                raw = os.pread(file, count * size, self.offset + start * size)
            finally:
                os.close(file)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error} at token {start}") from None
        tokens = np.frombuffer(raw[:len(raw) // size * size], self.dtype)
        if len(tokens) != count:
            raise UserError(f"{self.path}: ends at token {start + len(tokens)} of {self.tokens}; it was cut short "
                            "after the start: make or copy it again")
        return tokens


def _advice(folder: Path) -> str:
    source = folder.name if folder.name in ("fineweb", "fineweb-edu") else "stdlib"
    return f"python fineweb.py --source {source} --out {folder} makes shards (--help lists other sources)"


def open_shard(path: Path) -> Shard:
    """The shard's header, checked against the size of its file.

    Reads NumPy's `.npy` (any 1-D integers), llm.c's and modded-nanogpt's `.bin` (magic 20240520, version 1), and
    nanoGPT's headerless `train.bin` and `val.bin`.

    Raises:
        UserError: not one of these, not 1-D integers, empty, cut short, or longer than its header says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            shard = _npy(path, file) if path.suffix == ".npy" else _bin(path, file, size)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    expected = shard.offset + shard.tokens * shard.dtype.itemsize
    if size != expected:
        raise UserError(f"{path}: {size} bytes, but its header says {shard.tokens} tokens, which is {expected}; "
                        "it is cut short or damaged: make or copy it again")
    if not shard.tokens:
        raise UserError(f"{path}: holds no tokens; delete it, or make it again")
    return shard


def _npy(path: Path, file) -> Shard:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (ValueError, UnicodeDecodeError, EOFError) as error:
        raise UserError(f"{path}: no NumPy array ({str(error).splitlines()[0]}); make or copy it again") from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise UserError(f"{path}: shape {shape} of {dtype}; a shard is 1-D and uint16 (numpy.save of a flat array)")
    return Shard(path, dtype, file.tell(), shape[0])


def _bin(path: Path, file, size: int) -> Shard:
    magic, version, tokens = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
    if magic == BIN_MAGIC:
        if version != BIN_VERSION:
            raise UserError(f"{path}: version {version} of the llm.c format; only version {BIN_VERSION} is GPT-2's")
        return Shard(path, np.dtype("<u2"), BIN_HEADER, tokens)
    if path.name in ("train.bin", "val.bin"):  # nanoGPT's: no header (its tokens cannot spell the magic: 55432)
        if size % 2:
            raise UserError(f"{path}: {size} bytes is no whole number of uint16 tokens; cut short, or not nanoGPT's")
        return Shard(path, np.dtype("<u2"), 0, size // 2)
    raise UserError(f"{path}: begins with {magic}, not with llm.c's magic number {BIN_MAGIC}; damaged or of another "
                    "kind (files without a header are read only as train.bin and val.bin)")


def find(data_dir: str | Path, split: str) -> list[Shard]:
    """The shards of `split` ("train" or "val") in `data_dir`, by name.

    Raises:
        UserError: no folder, no shards, an unfinished or contradicted manifest, two sets of shards in one folder,
            or a shard that `open_shard` refuses.
    """
    folder = Path(data_dir)
    if not folder.is_dir():
        raise UserError(f"data_dir {folder}: no such folder; {_advice(folder)}")
    paths = _paths(folder, split)
    listed = _manifest(folder)
    if not paths:
        raise UserError(f"data_dir {folder}: no {split} shards ({split}_000000.npy or the like); "
                        f"{_advice(folder)}")
    kinds = {re.sub(r"\d+", "N", path.name): path.name for path in paths}
    if len(kinds) > 1:
        one, other, *_ = kinds.values()
        raise UserError(f"data_dir {folder}: {one} and {other} are two sets of {split} shards; keep one set a folder")
    shards = [open_shard(path) for path in paths]
    if listed is not None:
        for name in sorted(listed.keys() - {path.name for path in folder.iterdir()}):
            raise UserError(f"{folder / name}: listed in {MANIFEST} but missing; run the same fineweb.py command again")
        for shard in shards:
            noted = listed.get(shard.path.name, {}).get("tokens")
            if noted != shard.tokens:
                raise UserError(f"{shard.path}: {shard.tokens} tokens, but {MANIFEST} says {noted}; run the same "
                                "fineweb.py command again, or delete what does not belong here")
    return shards


def _paths(folder: Path, split: str) -> list[Path]:
    pattern = re.compile(rf"(?:.*_)?{split}(?:_\d+)?\.(?:npy|bin)")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _manifest(folder: Path) -> dict[str, dict] | None:
    """What fineweb.py noted of each file; None where there is no manifest."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        complete, listed = manifest["complete"], {shard["file"]: shard for shard in manifest["shards"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: unreadable ({error!r}); delete it, or run fineweb.py with --overwrite=true") from None
    if not complete:
        raise UserError(f"{path}: the shards are unfinished; run the same fineweb.py command again, it goes on "
                        f"where it stopped (or delete {MANIFEST} to train on what is there)")
    return listed


def check(data_dir: str | Path, split: str, vocab_size: int = VOCAB_SIZE, min_tokens: int = 2) -> list[Shard]:
    """Everything about `split` that training relies on; for one rank, at start-up.

    Looks at every token of every shard once and remembers its range in a sidecar, so the next start is instant.

    Args:
        vocab_size: ids must lie in [0, vocab_size).
        min_tokens: what the run needs, such as one global batch and one token.

    Raises:
        UserError: as `find`; too few tokens; an id outside the vocabulary, with its file, index and value.
    """
    shards = find(data_dir, split)
    tokens = sum(shard.tokens for shard in shards)
    if tokens < min_tokens:
        raise UserError(f"data_dir {data_dir}: {tokens} {split} tokens, but one batch needs {min_tokens}; "
                        "make more shards, or lower total_batch_size")
    check_ids(shards, vocab_size)
    return shards


def check_ids(shards: list[Shard], vocab_size: int) -> None:
    """Look at every token, or at the range that the folder's sidecar remembers of a file not changed since."""
    sidecar = shards[0].path.parent / CHECKED
    try:
        known = dict(json.loads(sidecar.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    before = dict(known)
    for shard in shards:
        name, stat = shard.path.name, shard.path.stat()
        if known.get(name, [])[:2] != [stat.st_size, stat.st_mtime_ns]:
            lows, highs = zip(*((int(chunk.min()), int(chunk.max())) for _, chunk in chunks([shard])), strict=True)
            known[name] = [stat.st_size, stat.st_mtime_ns, min(lows), max(highs)]
    if known != before:
        temporary = sidecar.with_name(f"{CHECKED}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a folder that cannot be written is scanned at every start
            temporary.write_text(json.dumps(known))
            os.replace(temporary, sidecar)
    for shard in shards:
        low, high = known[shard.path.name][2:]
        for start, chunk in chunks([shard]) if low < 0 or high >= vocab_size else ():
            wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab_size))
            if len(wrong):
                raise UserError(f"{shard.path}: token id {chunk[wrong[0]]} at index {start + wrong[0]} is outside "
                                f"[0, vocab_size = {vocab_size}); not GPT-2 tokens, or damaged: make it again")


def chunks(shards: list[Shard]):
    """(index within its shard, tokens) of all shards, SCAN tokens at a time."""
    for shard in shards:
        for start in range(0, shard.tokens, SCAN):
            yield start, shard.read(start, min(SCAN, shard.tokens - start))


def unigram_entropy(data_dir: str | Path, split: str) -> float:
    """Entropy in nats of the token frequencies of a split that `check` accepts: the loss of a model that knows only
    how frequent each token is."""
    counts = np.zeros(1 << 16, dtype=np.int64)
    for _, chunk in chunks(find(data_dir, split)):
        counts += np.bincount(chunk.astype(np.int64), minlength=len(counts))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


class Batches:
    """The batch of each step as a pure function of the step; the module's docstring has the rule.

    Args:
        sequences: sequences of the global batch, over all data-parallel ranks.
        block_size: tokens a sequence.
        seed: of the windows' order, where `shuffle`.
        dp_rank, dp_size: which contiguous part of each global batch this rank gets; TP peers give the same.

    Attributes:
        tokens: tokens of the split. steps_per_epoch: global batches before the split starts over.

    Raises:
        UserError: as `find`; `sequences` not divisible by `dp_size`; fewer tokens than one global batch.
    """

    def __init__(self, data_dir, split: str, *, sequences: int, block_size: int, seed: int = 0, shuffle: bool = False,
                 dp_rank: int = 0, dp_size: int = 1):
        if sequences % dp_size:
            raise UserError(f"a batch of {sequences} sequences is not divisible by {dp_size} data-parallel ranks")
        self.shards = find(data_dir, split)
        self.starts = np.cumsum([0] + [shard.tokens for shard in self.shards])  # int64: any size of file
        self.tokens = int(self.starts[-1])
        self.windows = (self.tokens - 1) // block_size
        self.steps_per_epoch = self.windows // sequences
        if not self.steps_per_epoch:
            raise UserError(f"data_dir {data_dir}: {self.tokens} {split} tokens, but one batch needs "
                            f"{sequences * block_size + 1}; make more shards, or lower total_batch_size")
        self.sequences, self.block_size, self.seed, self.shuffle = sequences, block_size, seed, shuffle
        self.rows = range(sequences // dp_size * dp_rank, sequences // dp_size * (dp_rank + 1))

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank at `step` ≥ 0: int64, both (sequences / dp_size, block_size); they may share
        memory."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        first, rows, T = batch * self.sequences + self.rows.start, len(self.rows), self.block_size
        if not self.shuffle:  # the windows follow each other: one read, and targets are the inputs one token on
            tokens = torch.from_numpy(self._read(first * T, rows * T + 1))
            return tokens[:-1].view(rows, T), tokens[1:].view(rows, T)
        windows = [permute(window, self.windows, f"{self.seed}/{epoch}") for window in range(first, first + rows)]
        tokens = torch.from_numpy(np.stack([self._read(window * T, T + 1) for window in windows]))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the split as int64, across as many shards as it takes."""
        tokens, done = np.empty(count, np.int64), 0
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while done < count:
            at = start + done - int(self.starts[index])
            part = self.shards[index].read(at, min(count - done, self.shards[index].tokens - at))
            tokens[done:done + len(part)] = part
            done, index = done + len(part), index + 1
        return tokens


def permute(index: int, size: int, key: str) -> int:
    """Place of `index` in the order of range(size) that `key` draws; O(1) memory.

    A four-round Feistel network (Luby and Rackoff, 1988) permutes the next power of four; what falls outside `size`
    is sent through again until it is inside, which keeps it a permutation (cycle walking; Black and Rogaway, 2002).
    """
    half = max(1, math.ceil((size - 1).bit_length() / 2))
    while True:
        left, right = divmod(index, 1 << half)
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") % (1 << half))
        index = (left << half) + right
        if index < size:
            return index


class Loader:
    """The batches of consecutive steps, each read by a thread while the step before it computes.

    Attributes:
        data_ms: milliseconds the last `next` waited; near zero unless reading is slower than a step.
    """

    def __init__(self, batches: Batches, step: int, device: torch.device | str):
        self.batches, self.step, self.device = batches, step, torch.device(device)
        self.data_ms = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead = self._thread.submit(self._load, step)

    def _load(self, step: int):
        batch = self.batches[step]
        return [x.pin_memory() for x in batch] if self.device.type == "cuda" else batch

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the next step on the device. What went wrong while reading is raised here."""
        start = time.perf_counter()
        batch = self._ahead.result()
        self.data_ms = (time.perf_counter() - start) * 1000
        self.step += 1
        self._ahead = self._thread.submit(self._load, self.step)
        return tuple(x.to(self.device, non_blocking=True) for x in batch)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def main(argv: list[str]) -> None:
    """Print what a folder holds and what is wrong with it, for the batches of a config."""
    from tokenizer import decode

    if not argv or argv[0].startswith("-") or argv[0].endswith(".toml"):
        raise UserError("name a folder first: python data.py data/stdlib [configs/NAME.toml] [--key=value]")
    folder, config = Path(argv[0]), parse(Config, argv[1:], toml=True)
    check_config(config, config.tp * max(1, config.dp_replicate))
    problems = {}  # texts, in order, each once
    for split in ("train", "val"):
        try:
            shards = find(folder, split)
        except UserError as error:
            problems[str(error)] = shards = None
            if not folder.is_dir():
                break
        for path in _paths(folder, split):
            try:
                shard = open_shard(path)
                print(f"{path.name:<32}{shard.tokens:>16,} {shard.dtype!s:<7} "
                      f"{decode(shard.read(0, min(12, shard.tokens)))!r}")
                check_ids([shard], config.vocab_size)
                noted = (_manifest(folder) or {}).get(path.name, {}).get("sha256")
                digest = hashlib.sha256()
                for _, chunk in chunks([shard]):
                    digest.update(chunk)
                if noted and noted != digest.hexdigest():
                    raise UserError(f"{path}: its tokens do not have the checksum in {MANIFEST}; make it again")
            except UserError as error:
                problems[str(error)] = None
        if shards:
            tokens = sum(shard.tokens for shard in shards)
            epoch = (tokens - 1) // config.block_size // config.sequences
            if not argv[1:]:  # no config to judge by
                print(f"{split}: {tokens:,} tokens")
                continue
            print(f"{split}: {tokens:,} tokens, {epoch:,} steps of {config.total_batch_size:,} an epoch" + (
                f"; max_steps = {config.max_steps:,} are {config.max_steps / epoch:.2f} epochs"
                if split == "train" and epoch else ""))
            if not epoch:
                problems[f"{folder}: {tokens:,} {split} tokens do not fill a batch of {config.total_batch_size:,} "
                         "and its last target; make more shards, or lower total_batch_size"] = None
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        raise UserError(f"{folder}: {len(problems)} problem{'s' * (len(problems) > 1)} found")


if __name__ == "__main__":
    run(main)
