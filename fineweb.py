"""Text → shards of GPT-2 tokens that `data.py` reads.

    python fineweb.py --source fineweb-edu                      # FineWeb-Edu's 10B sample, streamed
    python fineweb.py --source 'text/*.parquet' --out data/mine # also .arrow, .jsonl, .txt (.gz, .zst)
    python fineweb.py --source stdlib                           # Python's own library: 4 M tokens, no network

Every document is <|endoftext|> and its tokens; documents follow each other without a gap, cut into shards of
`shard_tokens`, the first `val_tokens` of all into validation shards. One process reads, `workers` encode, in order.
Each finished shard is named in manifest.json with the place in the source where the next begins, so that a start
after any interruption goes on there and gives the same bytes as an unbroken run.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path

import numpy as np

import sources
import tokenizer
from config import UserError, cores, parse, run

HEADER = {".npy": 128, ".bin": 1024}  # bytes before the tokens


@dataclass
class Options:
    """Make token shards."""

    source: str = "fineweb-edu"
    """fineweb-edu, fineweb, stdlib, a glob of .parquet, .arrow, .jsonl or .txt files (.gz, .zst), or a dataset of
    ready-made token shards on the hub: kjj0/finewebedu10B-gpt2, kjj0/fineweb10B-gpt2."""
    out: str = ""
    """Folder of the shards; empty: data/ and the source's name."""
    name: str = "sample-10BT"
    """Which part of fineweb-edu or fineweb: sample-10BT, sample-100BT, CC-MAIN-2024-10, default (all) …"""
    text_column: str = "text"
    """Column, or JSON key, that holds the text."""
    limit_tokens: int = 0
    """Stop after so many tokens, validation included; 0: the whole source."""
    val_tokens: int = -1
    """How many tokens, from the first on, are for validation; -1: one shard (stdlib: a twentieth of the files)."""
    shard_tokens: int = 100_000_000
    """Tokens a shard."""
    shards: int = 0
    """How many ready-made training shards to fetch; 0: all."""
    workers: int = 0
    """Processes that encode; 0: one a CPU."""
    shuffle_seed: int = -1
    """Shuffle documents through a buffer in an order drawn from this seed; -1: in the source's order."""
    overwrite: bool = False
    """Delete the shards that an earlier call with other settings left in `out`."""


# ---- encoding


def start_worker() -> None:
    """Leave Ctrl-C to the parent, and go when it goes, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def encode(texts: list[tuple[bool, str]]) -> tuple[bytes, list[int]]:
    """uint16 tokens of (begins a document, text) pairs, one after the other, and how many each has. Empty: none."""
    tokens = [_tokens(text) for _, text in texts]
    with_eot = [np.concatenate(([tokenizer.EOT], t)) if first and len(t) else t
                for (first, _), t in zip(texts, tokens, strict=True)]
    return np.concatenate(with_eot).astype(np.uint16).tobytes(), [len(t) for t in with_eot]


def _tokens(text: str) -> np.ndarray:
    try:
        return tokenizer.encoding().encode_to_numpy(text, disallowed_special=())
    except ValueError:  # tiktoken's pattern gives up on a million spaces in a row: cut them
        if len(text) < 1 << 18:
            raise
        return np.concatenate([_tokens(text[: len(text) // 2]), _tokens(text[len(text) // 2:])])


def tasks(stream):
    """The stream's pieces in lists of about PIECE characters."""
    batch, size = [], 0
    for piece in stream:
        batch.append(piece)
        size += len(piece.text)
        if size >= sources.PIECE or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(stream, workers: int):
    """(piece, its tokens) in order, encoded by `workers` processes a few tasks ahead of the caller."""
    context = multiprocessing.get_context("spawn")  # fork copies locks that Arrow's threads may hold
    with ProcessPoolExecutor(workers, context, start_worker) as pool:
        # a submit starts a worker where none is idle, which inherits this: Ctrl-C before start_worker is the parent's
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(workers):
            pool.submit(int)
        signal.signal(signal.SIGINT, handler)
        pending = deque()

        def oldest():
            batch, future = pending.popleft()
            data, lengths = future.result()
            yield from zip(batch, np.split(np.frombuffer(data, np.uint16), np.cumsum(lengths)[:-1]), strict=True)

        try:
            for batch in tasks(stream):
                pending.append((batch, pool.submit(encode, [(piece.first, piece.text) for piece in batch])))
                if len(pending) > 4 * workers:  # so memory is bounded
                    yield from oldest()
            while pending:
                yield from oldest()
        except BrokenProcessPool:
            raise UserError(f"a process that encodes was killed, perhaps for memory; lower --workers={workers} and run "
                            "the same command again: it goes on after the last finished shard") from None
        finally:
            pool.shutdown(cancel_futures=True)


# ---- writing


class Writer:
    """Cuts the stream of tokens into shards and keeps manifest.json true at every moment."""

    def __init__(self, out: Path, options: Options, manifest: dict):
        self.out, self.options, self.manifest = out, options, manifest
        shards = manifest["shards"]
        self.at = shards[-1]["next"] if shards else dict.fromkeys(
            ("read_from", "row", "documents", "empty", "replaced", "tokens"), 0)
        self.counts = dict(self.at)
        self.tokens = sum(shard["tokens"] for shard in shards)
        self.val_tokens = sum(shard["tokens"] for shard in shards if shard["file"].startswith("val"))
        self.val_target = options.val_tokens
        self.skip = self.tokens - self.at["tokens"]  # tokens of the document at `at` that are in the last shard
        self.buffer, self.count = np.empty(options.shard_tokens, np.uint16), 0

    @property
    def full(self) -> bool:
        return 0 < self.options.limit_tokens <= self.tokens

    def add(self, piece: sources.Piece, tokens: np.ndarray) -> None:
        """Append a piece's tokens; whenever a shard is full, it is written."""
        if piece.first:
            self.at = self.counts | {"read_from": piece.read_from, "row": piece.row, "tokens": self.tokens - self.skip}
            self.counts["documents" if len(tokens) else "empty"] += 1
        self.counts["replaced"] += piece.replaced
        dropped = min(self.skip, len(tokens))
        self.skip -= dropped
        tokens = tokens[dropped:]
        while len(tokens) and not self.full:
            room = self.options.shard_tokens
            if self.val_tokens < self.val_target:
                room = min(room, self.val_target - self.val_tokens)
            room -= self.count
            if self.options.limit_tokens:
                room = min(room, self.options.limit_tokens - self.tokens)
            taken, tokens = tokens[:room], tokens[room:]
            self.buffer[self.count:self.count + len(taken)] = taken
            self.count += len(taken)
            self.tokens += len(taken)
            if len(taken) == room:
                self.close_shard()

    def close_shard(self) -> None:
        """Write what is collected as a shard, if anything is: under a temporary name, renamed once it is on disk."""
        if not self.count:
            return
        split = "val" if self.val_tokens < self.val_target else "train"
        index = sum(shard["file"].startswith(split) for shard in self.manifest["shards"])
        path = self.out / f"{split}_{index:06d}.npy"
        tokens = self.buffer[:self.count]
        with replacing(path) as file:
            np.save(file, tokens)
        self.manifest["shards"].append({"file": path.name, "tokens": self.count,
                                        "sha256": hashlib.sha256(tokens).hexdigest(), "next": self.at})
        save(self.out, self.manifest)
        self.val_tokens += self.count * (split == "val")
        self.count = 0


def save(out: Path, manifest: dict) -> None:
    with replacing(out / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1).encode())


@contextlib.contextmanager
def replacing(path: Path):
    """A file opened for writing that takes the name `path` only when it is whole and on disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); make room and run the same command "
                        "again: it goes on after the last finished shard") from None


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    files = resolve(options)
    out = Path(options.out)
    settings = asdict(options)
    for key in ("out", "workers", "overwrite", "shards"):  # these change nothing in a shard
        del settings[key]
    settings["tokenizer_sha256"] = tokenizer.MERGES_SHA256
    if files:  # what they are called from here matters less than what they are
        settings["source"] = [f"{path.name}, {path.stat().st_size} bytes" for path in files]
    with contextlib.suppress(OSError):  # writing the manifest says why
        out.mkdir(parents=True, exist_ok=True)
    manifest = prepare(out, settings, options)
    begun, before = time.perf_counter(), sum(shard["tokens"] for shard in manifest["shards"])
    trains = sum("train" in shard["file"] for shard in manifest["shards"])
    ready_made = "/" in options.source and not files
    if manifest["complete"] and (not ready_made or 0 < options.shards <= trains):
        print(f"{out}: all is there already")
    elif ready_made:
        save(out, manifest)
        manifest |= {"shards": sources.hub_shards(options.source, options.shards, out), "complete": True}
        save(out, manifest)
    else:
        try:
            write_shards(Writer(out, options, manifest), options, files)
        except KeyboardInterrupt:
            print(f"\n{out}: {len(manifest['shards'])} shards are finished; the same command goes on after them")
            raise
        made, seconds = sum(shard["tokens"] for shard in manifest["shards"]) - before, time.perf_counter() - begun
        print(f"{made:,} tokens in {seconds:.1f} s ({made / seconds:,.0f} tokens/s)")
    summary(out, manifest)


def resolve(options: Options) -> list[Path]:
    """Check that the options fit together, fill in defaults, and find the files that `source` names, if it does."""
    o, defaults = options, Options()
    named, ready_made = o.source in sources.HUB, False
    files = sorted(map(Path, glob(o.source, recursive=True))) if not named and o.source != "stdlib" else []
    for path in files:
        sources.file_kind(path)
    if not files and not named and o.source != "stdlib":
        ready_made = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", o.source) and not re.search(
            r"\.(parquet|arrow|jsonl|txt|gz|zst)$", o.source)
        if not ready_made:
            raise UserError(f"source {o.source!r}: no such file, and none of {', '.join(sources.HUB)}, stdlib; give "
                            "a glob of .parquet, .arrow, .jsonl or .txt files (in quotes), or a dataset owner/name")
    text = not ready_made and o.source != "stdlib"
    for key, fits in (("name", named), ("text_column", text), ("val_tokens", text), ("shuffle_seed", text),
                      ("limit_tokens", not ready_made), ("shard_tokens", not ready_made), ("shards", ready_made)):
        if not fits and getattr(o, key) != getattr(defaults, key):
            raise UserError(f"{key} = {getattr(o, key)!r} means nothing with source {o.source!r}: leave it out")
    for key, least in (("shard_tokens", 1), ("workers", 0), ("limit_tokens", 0), ("shards", 0), ("val_tokens", -1),
                       ("shuffle_seed", -1)):
        if getattr(o, key) < least:
            raise UserError(f"{key} = {getattr(o, key)}: it must be at least {least}")
    if o.val_tokens == -1 and text:
        o.val_tokens = o.shard_tokens
    if 0 < o.limit_tokens <= o.val_tokens:
        raise UserError(f"limit_tokens = {o.limit_tokens} with val_tokens = {o.val_tokens} leaves nothing to train on; "
                        f"try --val_tokens={o.limit_tokens // 10}")
    if files and not o.out:
        raise UserError(f"source {o.source!r} needs a folder for its shards: --out=data/mine")
    o.out = o.out or f"data/{o.source.rpartition('/')[2]}"
    o.workers = o.workers or cores()
    return files


def prepare(out: Path, settings: dict, options: Options) -> dict:
    """The manifest to go on from: up to the first shard that is missing or of another size.

    Raises:
        UserError: `out` holds shards of another source or other settings, and `overwrite` is false.
    """
    path, fresh = out / "manifest.json", {"settings": settings, "complete": False, "shards": []}
    for leftover in out.glob("*.tmp"):
        if re.fullmatch(r"(manifest\.json|(train|val)_\d+\.npy)\.\d+\.tmp", leftover.name):
            leftover.unlink()
    shards = sorted(file for file in out.glob("*") if re.fullmatch(r"(.*_)?(train|val)_\d+\.(npy|bin)", file.name))
    if options.overwrite:
        for old in [*shards, path]:
            old.unlink(missing_ok=True)
        return fresh
    if not path.exists():
        if shards:
            raise UserError(f"{out} holds {shards[0].name} but no manifest.json: choose another --out, or delete its "
                            "shards with --overwrite=true")
        return fresh
    try:
        manifest = json.loads(path.read_text())
        before, entries, complete = manifest["settings"], manifest["shards"], manifest["complete"]
        differing = next((key for key in settings if before.get(key) != settings[key]), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error!r:.80}): choose another --out, or begin anew with "
                        "--overwrite=true") from None
    if not entries:
        return fresh
    if differing:
        raise UserError(f"{out} holds shards made with {differing} = {before.get(differing)!r:.80}, now it is "
                        f"{settings[differing]!r:.80}: choose another --out, or begin anew with --overwrite=true")
    sizes = {file.name: file.stat().st_size for file in shards}
    good = 0
    for entry in entries:
        if sizes.get(entry["file"]) != HEADER[Path(entry["file"]).suffix] + 2 * entry["tokens"]:
            break
        good += 1
    if good < len(entries) or not complete:
        # the standard library is read in seconds, and a newer Python's would not fit the shards of the one before
        manifest |= {"complete": False, "shards": entries[:good] if options.source != "stdlib" else []}
    return manifest


def write_shards(writer: Writer, options: Options, files: list[Path]) -> None:
    """The road from the source to the last shard and the finished manifest, with a progress bar."""
    from tqdm import tqdm

    share, at, val_documents = 0.0, writer.at, None

    def report(value):
        nonlocal share
        share = value

    if options.source == "stdlib":
        documents, val_documents = sources.stdlib_documents()
        writer.val_target = float("inf")  # until the last held-out file
    elif files:
        documents = sources.local_documents(files, options.text_column, at["read_from"], report)
    else:
        documents = sources.hub_documents(options.source, options.name, options.text_column, at["read_from"], report)
    if writer.tokens:
        print(f"{writer.out}: going on after {writer.tokens:,} tokens")
    save(writer.out, writer.manifest)
    stream = sources.pieces(documents, at["read_from"], options.shuffle_seed, at["row"] - at["read_from"])
    with tqdm(total=options.limit_tokens or None, initial=writer.tokens, unit=" tokens", unit_scale=True,
              mininterval=0.5 if sys.stderr.isatty() else 30) as bar, contextlib.closing(
                  encoded(stream, options.workers)) as tokens_of:
        for piece, tokens in tokens_of:
            if piece.first and piece.row == val_documents:
                writer.close_shard()
                writer.val_target = 0
            before = writer.tokens
            writer.add(piece, tokens)
            if not options.limit_tokens and share:
                bar.total = int(writer.tokens / share)  # an estimate: what is read is a little ahead
            bar.set_postfix_str(f"{writer.counts['documents']:,} documents", refresh=False)
            bar.update(writer.tokens - before)
            if writer.full:
                break
        writer.close_shard()
    shards = writer.manifest["shards"]
    if all(shard["file"].startswith("val") for shard in shards):
        for file in [*(shard["file"] for shard in shards), "manifest.json"]:
            (writer.out / file).unlink()
        raise UserError(f"{options.source} has {writer.tokens:,} tokens and val_tokens = {options.val_tokens:,} are "
                        f"for validation, which leaves nothing to train on; try --val_tokens={writer.tokens // 10}")
    writer.manifest |= {key: writer.counts[key] for key in ("documents", "empty", "replaced")} | {"complete": True}
    save(writer.out, writer.manifest)


def summary(out: Path, manifest: dict) -> None:
    """What the folder holds."""
    from data import unigram_entropy  # here: it brings torch, which no worker needs

    for split in ("val", "train"):
        tokens = [shard["tokens"] for shard in manifest["shards"] if re.match(rf"(.*_)?{split}_", shard["file"])]
        if tokens:
            print(f"{split:<6}{len(tokens):>4} shard{'s' * (len(tokens) > 1):<2}{sum(tokens):>16,} tokens, "
                  f"unigram entropy {unigram_entropy(out, split):.2f} nats")
    if "documents" in manifest:
        print(f"{manifest['documents']:,} documents; {manifest['empty']:,} empty ones left out, "
              f"{manifest['replaced']:,} invalid characters replaced")


if __name__ == "__main__":
    run(main)
