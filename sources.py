"""Where `fineweb.py` gets text: local files, Python's own library, FineWeb on the Hugging Face hub; and ready-made
token shards from there.

Every source of text is an iterator of documents, each its bytes, or the path of a file that is one document. Bytes,
since invalid UTF-8 must not end a run that took hours: it is replaced, and counted, where documents are cut.
"""

import codecs
import hashlib
import io
import json
import re
import sysconfig
import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from config import UserError

HUB = {"fineweb-edu": "HuggingFaceFW/fineweb-edu", "fineweb": "HuggingFaceFW/fineweb"}
OFFLINE = "without a network use --source stdlib, or files: --source 'text/*.parquet' (.arrow, .jsonl, .txt)"
HUB_WAIT = 20  # seconds
PIECE = 1 << 18  # characters a task, about: some 20 ms of encoding, beside which passing it on costs little
BUFFER = 1 << 26  # bytes of documents that are shuffled among themselves


def local_documents(files: list[Path], column: str, start: int, report):
    """Documents of `files` from number `start` on; `report(share)` is told how much of the input has been read."""
    done, total = 0, sum(path.stat().st_size for path in files) or 1
    for path in files:
        size = path.stat().st_size
        try:
            for rows, share, load in _chunks(path, column):
                if start < rows:
                    yield from islice(load(), start, None)
                    report((done + share * size) / total)
                start = max(0, start - rows)
        except (OSError, EOFError, ValueError) as error:  # Arrow's errors are among these
            raise UserError(f"{path}: {str(error).splitlines()[0]}; damaged? Replace it or leave it out") from None
        done += size


def file_kind(path: Path) -> str:
    """parquet, arrow, jsonl or txt, from the name."""
    match = re.fullmatch(r".*\.(parquet|arrow|(jsonl|txt)(\.gz|\.zst)?)", path.name)
    if not match or path.is_dir():
        raise UserError(f"{path}: no file of text; its name must end in .parquet, .arrow, .jsonl or .txt (.gz, .zst)")
    return match[2] or match[1]


def _chunks(path: Path, column: str):
    """(documents in a chunk, share of the file it ends at, function that reads them), so that skipping is quick."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = file_kind(path)
    if kind == "txt":
        yield 1, 1.0, lambda: [path]
    elif kind == "jsonl":
        size = path.stat().st_size or 1
        with open(path, "rb") as raw, _decompressed(raw, path) as lines:
            for number, line in enumerate(lines, 1):
                yield 1, raw.tell() / size, lambda line=line, number=number: [_json_text(path, number, line, column)]
    elif kind == "parquet":
        with pq.ParquetFile(path, buffer_size=1 << 20) as file:  # or a row group would be read whole
            _require(path, column, file.schema_arrow.names)
            for i in range(file.num_row_groups):
                def load(i=i):
                    for batch in file.iter_batches(64, row_groups=[i], columns=[column]):
                        yield from _column_bytes(path, column, batch.column(0))
                yield file.metadata.row_group(i).num_rows, (i + 1) / file.num_row_groups, load
    else:
        with pa.memory_map(str(path)) as source:
            try:
                batches = iter(pa.ipc.open_stream(source))  # what the datasets library caches
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
            for batch in batches:
                _require(path, column, batch.schema.names)
                yield batch.num_rows, source.tell() / source.size(), lambda batch=batch: _column_bytes(
                    path, column, batch.column(column))


def _decompressed(raw, path: Path):
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    return io.BufferedReader(pa.CompressedInputStream(raw, codec)) if codec else raw


def _require(where, column: str, names: list[str]) -> None:
    if column not in names:
        raise UserError(f"{where}: no column {column!r}; choose with --text_column: {', '.join(map(str, names)):.200}")


def _column_bytes(where, column: str, values):
    import pyarrow as pa

    try:
        values = values.cast(pa.large_binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UserError(f"{where}: column {column!r} is {values.type}, not text; try another --text_column") from None
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
    return (text or "").encode("utf-8", "one byte each")  # JSON can spell half a surrogate pair, UTF-8 cannot


def stdlib_documents() -> tuple[list[bytes], int]:
    """Python's own library without its tests: documents, and how many of them, the first, are for validation.

    Four leading spaces become a tab, since single spaces would else be 41% of all tokens. Files stand in an order
    drawn from their names, which spreads each package over the whole; every twentieth or so is held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if not re.search(r"(^|/)(site-packages|dist-packages|(\w+_)?tests?)/", name):
            files[hashlib.sha256(name.encode()).hexdigest()] = path
    held_out = [key for key in sorted(files) if int(key[-8:], 16) % 20 == 0]
    order = held_out + sorted(files.keys() - set(held_out))
    return [re.sub(rb"(?m)^(?: {4})+", lambda spaces: b"\t" * (len(spaces[0]) // 4), files[key].read_bytes())
            for key in order], len(held_out)


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
            for index, (text, replaced) in enumerate(cut(document, PIECE)):
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


def cut(document: bytes | Path, size: int):
    """(text, characters replaced for invalid UTF-8) of a document, in pieces of about `size` characters.

    Cut before a space or line end that follows a visible character: there the tokenizer never joins, so the pieces'
    tokens are the document's. Text that has no such place in 16 pieces is cut where it stands.
    """
    replaced = 0

    def replace(error):
        nonlocal replaced
        replaced += 1
        return "\ufffd", error.end

    codecs.register_error("replace and count", replace)  # this document's count: one document is cut at a time
    decoder = codecs.getincrementaldecoder("utf-8")("replace and count")
    try:
        stream = io.BytesIO(document) if isinstance(document, bytes) else _decompressed(document.open("rb"), document)
        with stream:
            text, raw = "", stream.read(size)
            while raw:
                ahead = stream.read(size)
                text, raw = text + decoder.decode(raw, final=not ahead), ahead
                if ahead and len(text) >= size:
                    tail = text[-4096:]
                    places = [match.end() for match in re.finditer(r"\S(?=[ \n])", tail)]
                    at = len(text) - len(tail) + places[-1] if places else len(text) * (len(text) > 16 * size)
                    if at:
                        yield text[:at], replaced
                        text, replaced = text[at:], 0
            yield text, replaced
    except (OSError, EOFError) as error:
        raise UserError(f"{document}: {error}; replace it or leave it out") from None


def hub_documents(source: str, name: str, column: str, start: int, report):
    """Documents of fineweb-edu or fineweb from number `start` on, streamed: of the text column only, nothing cached."""
    _reach(HUB[source])
    from datasets import load_dataset

    try:
        dataset = load_dataset(HUB[source], name=name, split="train", streaming=True, columns=[column])
        total = dataset.info.splits["train"].num_examples if dataset.info.splits else None
        for table in dataset.with_format("arrow").skip(start).iter(64):
            _require(source, column, table.column_names)
            for chunk in table.column(column).chunks:
                yield from _column_bytes(source, column, chunk)
            start += len(table)
            if total:
                report(start / total)
    except UserError:
        raise
    except Exception as error:  # whatever the layers below raise: a wrong name, a broken connection
        raise UserError(f"{source}, --name={name}: {' '.join(str(error).split()):.300} ({type(error).__name__}); if "
                        "the connection broke, the same command goes on after the last finished shard") from None


def hub_shards(repo: str, trains: int, out: Path) -> list[dict]:
    """Ready-made GPT-2 token shards (`.bin` as llm.c's) of a dataset on the hub: all val ones, the first `trains`
    train ones (0: all). Files that are there already are kept. Returns their manifest entries."""
    from huggingface_hub import hf_hub_download

    from data import open_shard

    files = sorted(file.rfilename for file in _reach(repo).siblings)
    val, train = ([name for name in files if re.fullmatch(rf"(?:.*_)?{split}(?:_\d+)?\.bin", name)]
                  for split in ("val", "train"))
    if not train:
        raise UserError(f"source {repo}: the hub's dataset of this name holds no train shards (…_train_000001.bin)")
    entries = []
    for name in val + train[:trains or len(train)]:
        try:
            hf_hub_download(repo, name, repo_type="dataset", local_dir=out)
        except Exception as error:
            raise UserError(f"source {repo}: {name}: {' '.join(str(error).split()):.200} ({type(error).__name__}); "
                            "the same command goes on with this file") from None
        entries.append({"file": name, "tokens": open_shard(out / name).tokens})
        print(f"{out / name}: {entries[-1]['tokens']:,} tokens", flush=True)
    return entries


def _reach(repo: str):
    """What the hub knows of a dataset, or a UserError within HUB_WAIT seconds, however the network is broken."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    answer = []

    def ask():
        try:
            answer.append((HfApi().dataset_info(repo, timeout=HUB_WAIT), None))
        except Exception as error:  # whatever the HTTP library of the day raises
            answer.append((None, error))

    thread = threading.Thread(target=ask, daemon=True)  # a name server that is silent obeys no timeout of ours
    thread.start()
    thread.join(HUB_WAIT)
    info, error = answer[0] if answer else (None, TimeoutError(f"no answer in {HUB_WAIT} s"))
    if isinstance(error, RepositoryNotFoundError | GatedRepoError | HFValidationError):
        raise UserError(f"source {repo}: the hub has no open dataset of this name; {OFFLINE}")
    if error:
        raise UserError(f"source {repo}: the hub does not answer ({type(error).__name__}: "
                        f"{' '.join(str(error).split()):.100}); {OFFLINE}")
    return info
