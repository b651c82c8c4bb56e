"""Text → shards of GPT-2 tokens that `data.py` reads.

    python fineweb.py --source fineweb-edu                      # FineWeb-Edu's 10B sample, streamed
    python fineweb.py --source 'text/*.parquet' --out data/mine # also .arrow, .jsonl, .txt (.gz, .zst)
    python fineweb.py --source stdlib                           # Python's own library: 4 M tokens, no network

Every document is <|endoftext|> and its tokens; documents follow each other without a gap, cut into shards of
`shard_tokens`, the first `val_tokens` of all into validation shards. One process reads, `workers` encode, in order.
Each finished shard is named in manifest.json with the place in the source where the next begins, so that a start
after any interruption goes on there and gives the same bytes as an unbroken run.
"""

import codecs
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from glob import glob
from itertools import islice
from pathlib import Path

import numpy as np

import tokenizer
from config import UserError, parse, run

HUB = {"fineweb-edu": "HuggingFaceFW/fineweb-edu", "fineweb": "HuggingFaceFW/fineweb"}
OFFLINE = "without a network use --source 'files/*.parquet' (or .jsonl, .txt, .arrow), or --source stdlib"
PIECE = 1 << 18  # characters a task, about: 10 ms of encoding, so that passing it on costs little beside it
BUFFER = 1 << 26  # characters of documents that are shuffled among themselves


@dataclass
class Options:
    """Make token shards."""

    source: str = "fineweb-edu"
    """fineweb-edu, fineweb, stdlib, or a glob of .parquet, .arrow, .jsonl or .txt files (.gz and .zst too)."""
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
    workers: int = 0
    """Processes that encode; 0: one a CPU."""
    shuffle_seed: int = -1
    """Shuffle documents through a buffer in an order drawn from this seed; -1: in the source's order."""
    overwrite: bool = False
    """Delete the shards that an earlier call with other settings left in `out`."""


# ---- reading: every source is an iterator of documents, each its bytes, or the path of a file that is one document


def local_documents(files: list[Path], column: str, start: int, report):
    """Documents of `files` from number `start` on; `report(share)` is told how much of the input has been read."""
    done, total = 0, sum(path.stat().st_size for path in files) or 1
    for path in files:
        size = path.stat().st_size
        try:
            for rows, share, load in _chunks(path, column):
                if start >= rows:
                    start -= rows
                    continue
                yield from islice(load(), start, None)
                start = 0
                report((done + share * size) / total)
        except (OSError, EOFError, ValueError) as error:  # Arrow's errors are among these
            raise UserError(f"{path}: {str(error).splitlines()[0]}; damaged? Replace it or leave it out") from None
        done += size


def _chunks(path: Path, column: str):
    """(documents in the chunk, share of the file read after it, function that reads them): skipping reads nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = _kind(path)
    if kind == "txt":
        yield 1, 1.0, lambda: [path]
    elif kind == "jsonl":
        size = path.stat().st_size or 1
        with open(path, "rb") as raw, _decompressed(raw, path) as lines:
            for number, line in enumerate(lines, 1):
                yield 1, raw.tell() / size, lambda line=line, number=number: [_json_text(path, number, line, column)]
    elif kind == "parquet":
        with pq.ParquetFile(path) as file:
            _require(path, column, file.schema_arrow.names)
            for i in range(file.num_row_groups):
                def load(i=i):
                    for batch in file.iter_batches(256, row_groups=[i], columns=[column]):
                        yield from _column_bytes(path, column, batch.column(0))
                yield file.metadata.row_group(i).num_rows, (i + 1) / file.num_row_groups, load
    else:
        with pa.memory_map(str(path)) as source:
            try:
                batches = iter(pa.ipc.open_stream(source))
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
            for batch in batches:
                _require(path, column, batch.schema.names)
                yield batch.num_rows, source.tell() / source.size(), lambda batch=batch: _column_bytes(
                    path, column, batch.column(column))


def _kind(path: Path) -> str:
    match = re.fullmatch(r".*\.(parquet|arrow|(jsonl|txt)(\.gz|\.zst)?)", path.name)
    if not match:
        raise UserError(f"{path}: unknown kind of file; it must end in .parquet, .arrow, .jsonl or .txt (.gz, .zst)")
    return match[2] or match[1]


def _decompressed(raw, path: Path):
    """A buffered binary reader of an open file, decompressed by what its name ends in."""
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    return io.BufferedReader(pa.CompressedInputStream(raw, codec)) if codec else raw


def _require(path, column: str, names: list[str]) -> None:
    if column not in names:
        raise UserError(f"{path}: no column {column!r}; choose one with --text_column: {', '.join(map(str, names))}")


def _column_bytes(path, column: str, values):
    """The texts of an Arrow column as bytes, unchecked: invalid UTF-8 would else end the run."""
    import pyarrow as pa

    try:
        values = values.cast(pa.large_binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UserError(f"{path}: column {column!r} is {values.type}, not text; choose another with --text_column"
                        ) from None
    for value in values:
        yield value.as_py() or b""


codecs.register_error("one byte each", lambda error: (b"\xff" * (error.end - error.start), error.end))


def _json_text(path: Path, number: int, line: bytes, column: str) -> bytes:
    if not line.strip():
        return b""
    try:
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise UserError(f"{path}: line {number} is not JSON ({error}); mend it, or leave the file out") from None
    _require(f"{path}: line {number}", column, list(record) if isinstance(record, dict) else [])
    text = record[column]
    if not isinstance(text, str | None):
        raise UserError(f"{path}: line {number}: {column!r} is {text!r:.40}, not text; choose another --text_column")
    return (text or "").encode("utf-8", "one byte each")  # what JSON may hold and UTF-8 may not: half a surrogate pair


def stdlib_documents() -> tuple[list[bytes], int]:
    """Python's own library without its tests: documents, and how many of them, the first, are for validation.

    Four leading spaces become a tab, since single spaces would else be 41% of all tokens. Files stand in an order
    drawn from their names, which spreads packages, and the held-out ones, evenly.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if not re.search(r"(^|/)(site-packages|dist-packages|tests?|idle_test|\w*_?tests?|__pycache__)/", name):
            files[hashlib.sha256(name.encode()).hexdigest()] = path
    order = sorted(files)
    held_out = [key for key in order if int(key[-8:], 16) % 20 == 0]
    order = held_out + [key for key in order if key not in set(held_out)]
    tabs = [re.sub(rb"(?m)^(?: {4})+", lambda spaces: b"\t" * (len(spaces[0]) // 4), files[key].read_bytes())
            for key in order]
    return tabs, len(held_out)


def hub_documents(options: Options, start: int, report):
    """Documents of fineweb-edu or fineweb from number `start` on, streamed: only the text column is transferred."""
    from datasets import load_dataset

    dataset = load_dataset(HUB[options.source], name=options.name, split="train", streaming=True,
                           columns=[options.text_column])
    total = dataset.info.splits["train"].num_examples if dataset.info.splits else None
    row = start
    for table in dataset.with_format("arrow").skip(start).iter(256):
        _require(options.source, options.text_column, table.column_names)
        row += len(table)
        yield from _column_bytes(options.source, options.text_column, table.column(options.text_column))
        if total:
            report(row / total)


# ---- between reading and encoding: order and pieces


@dataclass
class Piece:
    """A document, or a part of a long one, on its way to a worker."""

    row: int  # which document, counted in the order in which they are written
    read_from: int  # where reading must start to come to it again: the first document of its shuffled block
    first: bool  # it begins its document
    text: str
    replaced: int  # characters U+FFFD that stand for invalid UTF-8


def pieces(documents, read_from: int, seed: int, skip: int):
    """Pieces of `documents`, whose first is number `read_from`; the first `skip` in the order of writing are left out.

    With a seed, documents are collected until they hold BUFFER characters and then drawn in an order that follows
    from (seed, number of the block's first document): no state but that number.
    """
    row = read_from
    for block_start, document in _shuffled(documents, read_from, seed) if seed >= 0 else enumerate(documents, row):
        if row >= read_from + skip:
            for index, (text, replaced) in enumerate(_cut(document)):
                yield Piece(row, block_start, index == 0, text, replaced)
        row += 1


def _shuffled(documents, start: int, seed: int):
    documents, block, size = iter(documents), [], 0
    for document in documents:
        block.append(document)
        size += len(document) if isinstance(document, bytes) else 0
        if size >= BUFFER:
            yield from ((start, block[i]) for i in np.random.default_rng([seed, start]).permutation(len(block)))
            start, block, size = start + len(block), [], 0
    yield from ((start, block[i]) for i in np.random.default_rng([seed, start]).permutation(len(block)))


def _cut(document: bytes | Path):
    """(text, characters replaced) of a document in pieces of about PIECE characters.

    Cut before a space or line end that follows a visible character: there the tokenizer never joins, so the pieces'
    tokens are the document's. Text that has no such place in 16 pieces is cut where it stands.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    raw_file = open(document, "rb") if isinstance(document, Path) else None
    stream = _decompressed(raw_file, document) if raw_file else io.BytesIO(document)
    with stream:
        text, replaced, raw = "", 0, stream.read(PIECE)
        while raw:
            more = stream.read(PIECE)
            new = decoder.decode(raw, final=not more)
            if "\ufffd" in new:
                replaced += new.count("\ufffd") - raw.count("\ufffd".encode())
            text, raw = text + new, more
            if more and len(text) >= PIECE:
                places = [match.end() for match in re.finditer(r"\S(?=[ \n])", text[-4096:])]
                cut = len(text) - min(len(text), 4096) + places[-1] if places else len(text) * (len(text) > 16 * PIECE)
                if cut:
                    yield text[:cut], replaced
                    text, replaced = text[cut:], 0
        yield text, replaced


# ---- encoding


def start_worker() -> None:
    """Leave Ctrl-C to the parent, and go when it goes, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def encode(texts: list[tuple[bool, str]]) -> tuple[bytes, list[int]]:
    """uint16 tokens of (begins a document, text) pairs, one after the other, and how many each has. Empty: none."""
    tokens = [tokenizer.encoding().encode_to_numpy(text, disallowed_special=()) for _, text in texts]
    with_eot = [np.concatenate(([tokenizer.EOT], t)) if first and len(t) else t
                for (first, _), t in zip(texts, tokens, strict=True)]
    return np.concatenate(with_eot).astype(np.uint16).tobytes(), [len(t) for t in with_eot]


def encoded(stream, workers: int):
    """(piece, its tokens) in order, encoded by `workers` processes a few tasks ahead of the caller."""
    context = multiprocessing.get_context("spawn")  # fork copies locks that Arrow's threads may hold
    with ProcessPoolExecutor(workers, context, start_worker) as pool:
        pending = deque()

        def oldest():
            batch, future = pending.popleft()
            data, lengths = future.result()
            yield from zip(batch, np.split(np.frombuffer(data, np.uint16), np.cumsum(lengths)[:-1]), strict=True)

        try:
            batch, size = [], 0
            for piece in stream:
                batch.append(piece)
                size += len(piece.text)
                if size >= PIECE or len(batch) >= 4096:
                    pending.append((batch, pool.submit(encode, [(p.first, p.text) for p in batch])))
                    batch, size = [], 0
                    if len(pending) > 4 * workers:
                        yield from oldest()
            if batch:
                pending.append((batch, pool.submit(encode, [(p.first, p.text) for p in batch])))
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

    def add(self, piece: Piece, tokens: np.ndarray) -> None:
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
        self.save_manifest()
        self.val_tokens += self.count * (split == "val")
        self.count = 0

    def save_manifest(self) -> None:
        with replacing(self.out / "manifest.json") as file:
            file.write(json.dumps(self.manifest, indent=1).encode())


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
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); make room and run the same command "
                        "again: it goes on after the last finished shard") from None


def prepare(out: Path, options: Options, settings: dict) -> dict:
    """The manifest to go on from: without the shards that are missing or of another size, and all after them.

    Raises:
        UserError: `out` holds something else, or the shards of other settings, and `overwrite` is false.
    """
    path = out / "manifest.json"
    shards = [p for p in out.glob("*") if re.fullmatch(r"(train|val)_\d{6}\.npy", p.name)]
    if options.overwrite:
        for old in [*shards, path]:
            old.unlink(missing_ok=True)
    elif path.exists():
        try:
            manifest = json.loads(path.read_text())
            before = manifest["settings"]
            manifest["shards"], manifest["complete"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path}: not readable; delete what --overwrite=true would, by adding it, or choose "
                            "another --out") from None
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(f"{out} holds shards made with {key} = {before.get(key)!r}, now it is {value!r}: "
                                "choose another --out, or delete them with --overwrite=true")
        good = 0
        for shard in manifest["shards"]:
            file = out / shard["file"]
            if not file.exists() or file.stat().st_size != 128 + 2 * shard["tokens"]:
                break
            good += 1
        if good < len(manifest["shards"]) or not manifest["complete"]:
            manifest["complete"] = False
            # the standard library is read in seconds, and may be another version's by now
            manifest["shards"] = manifest["shards"][:good] if options.source != "stdlib" else []
        return manifest
    elif shards:
        raise UserError(f"{out} holds {shards[0].name} but no manifest.json: choose another --out, or delete its "
                        "shards with --overwrite=true")
    return {"settings": settings, "complete": False, "shards": []}


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    out, files, settings = resolve(options)
    out.mkdir(parents=True, exist_ok=True)
    manifest = prepare(out, options, settings)
    if manifest["complete"]:
        print(f"{out}: all is there already")
        return summary(out, manifest)
    for leftover in out.glob("*.tmp"):
        leftover.unlink()
    writer = Writer(out, options, manifest)
    writer.save_manifest()
    if manifest["shards"]:
        print(f"{out}: going on after {len(manifest['shards'])} shards, {writer.tokens:,} tokens")
    started, begun = writer.tokens, time.perf_counter()
    try:
        write_all(writer, options, files)
    except KeyboardInterrupt:
        print(f"{out}: {len(manifest['shards'])} shards are kept; the same command goes on after them", file=sys.stderr)
        raise
    if not any(shard["file"].startswith("train") for shard in manifest["shards"]):
        for shard in manifest["shards"]:
            (out / shard["file"]).unlink()
        (out / "manifest.json").unlink()
        raise UserError(f"{options.source}: {writer.tokens:,} tokens, and val_tokens = {options.val_tokens:,} of them "
                        f"are for validation: nothing is left to train on; try --val_tokens={writer.tokens // 10}")
    manifest |= {"complete": True, "tokens": writer.tokens} | {k: writer.counts[k] for k in (
        "documents", "empty", "replaced")}
    writer.save_manifest()
    seconds = time.perf_counter() - begun
    made = writer.tokens - started
    print(f"{made:,} tokens in {seconds:.1f} s ({made / seconds:,.0f} tokens/s)")
    summary(out, manifest)


def write_all(writer: Writer, options: Options, files: list[Path]) -> None:
    """The whole road from the source to the last shard, with a progress bar."""
    from tqdm import tqdm

    share, at, val_documents = 0.0, writer.at, -1

    def report(value):
        nonlocal share
        share = value

    if options.source == "stdlib":
        documents, val_documents = stdlib_documents()
        writer.val_target = float("inf")  # until the last held-out file
    elif options.source in HUB:
        documents = hub_documents(options, at["read_from"], report)
    else:
        documents = local_documents(files, options.text_column, at["read_from"], report)
    stream = pieces(documents, at["read_from"], options.shuffle_seed, at["row"] - at["read_from"])
    with tqdm(total=options.limit_tokens or None, initial=writer.tokens, unit=" tokens", unit_scale=True, smoothing=0.1,
              mininterval=0.5 if sys.stderr.isatty() else 30, desc=str(writer.out)) as bar:
        for piece, tokens in encoded(stream, options.workers or os.cpu_count()):
            if piece.first and piece.row == val_documents:
                writer.close_shard()
                writer.val_target = 0
            before = writer.tokens
            writer.add(piece, tokens)
            bar.update(writer.tokens - before)
            if not options.limit_tokens and share:
                bar.total = int(writer.tokens / share)
            if writer.full:
                break
    writer.close_shard()


def resolve(options: Options) -> tuple[Path, list[Path], dict]:
    """Folder, local files, and the settings that decide what the shards are; fills in the options' defaults."""
    o, defaults = options, Options()
    if o.shard_tokens < 1 or o.workers < 0 or o.limit_tokens < 0 or o.val_tokens < -1:
        raise UserError(f"shard_tokens = {o.shard_tokens}, workers = {o.workers}, limit_tokens = {o.limit_tokens}, "
                        f"val_tokens = {o.val_tokens}: none may be negative, and shard_tokens must be at least 1")
    files = sorted(Path(name) for name in glob(o.source, recursive=True)) if o.source not in (*HUB, "stdlib") else []
    if o.source not in (*HUB, "stdlib"):
        if not files:
            raise UserError(f"source {o.source!r}: no such file, and none of {', '.join(HUB)}, stdlib; "
                            "a glob of .parquet, .arrow, .jsonl or .txt files is another way")
        if not o.out:
            raise UserError(f"source {o.source!r} needs a folder for its shards: --out=data/mine")
        for path in files:
            _kind(path)
    for key, fits in (("name", o.source in HUB), ("text_column", o.source != "stdlib"),
                      ("val_tokens", o.source != "stdlib"), ("shuffle_seed", o.source != "stdlib")):
        if not fits and getattr(o, key) != getattr(defaults, key):
            raise UserError(f"{key} = {getattr(o, key)!r} has no meaning with source {o.source!r}: leave it out")
    if o.val_tokens == -1:
        o.val_tokens = 0 if o.source == "stdlib" else o.shard_tokens
    if 0 < o.limit_tokens <= o.val_tokens:
        raise UserError(f"limit_tokens = {o.limit_tokens} with val_tokens = {o.val_tokens}: nothing is left to train "
                        f"on; try --val_tokens={o.limit_tokens // 10}")
    settings = {key: value for key, value in asdict(o).items() if key not in ("out", "workers", "overwrite")}
    settings["tokenizer_sha256"] = tokenizer.MERGES_SHA256
    settings["files"] = hashlib.sha256(repr([(str(f), f.stat().st_size) for f in files]).encode()).hexdigest()[:16]
    return Path(o.out or f"data/{o.source}"), files, settings


def summary(out: Path, manifest: dict) -> None:
    """What the folder holds."""
    from data import unigram_entropy  # here: it brings torch, which no worker needs

    for split in ("val", "train"):
        tokens = [shard["tokens"] for shard in manifest["shards"] if shard["file"].startswith(split)]
        if tokens:
            entropy = f"unigram entropy {unigram_entropy(out, split):.2f} nats"
            print(f"{split:<6}{len(tokens):>4} shard{'s' * (len(tokens) > 1):<2}{sum(tokens):>16,} tokens   {entropy}")
    print(f"{manifest['documents']:,} documents; {manifest['empty']:,} empty ones left out, "
          f"{manifest['replaced']:,} invalid characters replaced")


if __name__ == "__main__":
    run(main)
