"""fineweb.py's shards against the plainest reference, whatever the files, the cuts, and where it was killed."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import fineweb
import sources
import tokenizer
from config import UserError

ROOT = Path(fineweb.__file__).parent


@pytest.fixture(autouse=True)
def _in_process(monkeypatch, request):
    """Encode in this process, but where the test is about processes: each start of them takes a second."""
    class Now:
        def __init__(self, *_): pass
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def shutdown(self, **_): pass

        def submit(self, function, *args):
            result = function(*args)
            return type("Done", (), {"result": lambda self: result})()
    monkeypatch.setattr(fineweb, "ProcessPoolExecutor", Now)


def reference(texts):
    """All tokens, as build-nanogpt makes them: <|endoftext|> and encode_ordinary, with tiktoken's own pattern."""
    gpt2 = tiktoken.Encoding("gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str,
                             mergeable_ranks=tokenizer.encoding()._mergeable_ranks, special_tokens={})
    return [t for text in texts if text for t in [50256, *gpt2.encode_ordinary(text)]]


def shards(folder, split="*"):
    return {path.name: np.load(path).tolist() for path in sorted(folder.glob(f"{split}_*.npy"))}


def tokens_in(folder, splits=("val", "train")):
    """What the shards hold, one after the other."""
    return [t for split in splits for shard in shards(folder, split).values() for t in shard]


def make(source, out, *words):
    fineweb.main(["--source", str(source), "--out", str(out), *words])
    return json.loads((out / "manifest.json").read_text())


def documents(n, seed=0):
    """Texts of all lengths, with what trips tokenizers."""
    draw = random.Random(seed)
    words = ["the", " ", "  ", "\n", "\n\n ", "don't", "I'LL", "naïve", "東京", "😀", "1984", "<|endoftext|>", "."]
    return [" ".join(draw.choices(words, k=draw.choice([0, 1, 5, 40, 300]))) for _ in range(n)]


def parquet(path, texts, rows=7):
    """A file with FineWeb-Edu's columns."""
    n = len(texts)
    pq.write_table(pa.table({
        "text": texts, "id": [f"<urn:uuid:{i}>" for i in range(n)], "dump": ["CC-MAIN-2013-20"] * n,
        "url": ["http://a.example"] * n, "file_path": ["s3://x"] * n, "language": ["en"] * n,
        "language_score": [0.9] * n, "token_count": list(range(n)), "score": [3.1] * n, "int_score": [3] * n,
    }), path, row_group_size=rows)
    return path


SMALL = ["--shard_tokens=1000", "--val_tokens=700"]


def test_shards_are_the_reference_cut(tmp_path):
    texts = [*documents(60), "word " * 5000]  # the last alone fills several shards
    manifest = make(parquet(tmp_path / "a.parquet", texts), tmp_path / "out", *SMALL)
    expected = reference(texts)
    got = shards(tmp_path / "out")
    assert got.pop("val_000000.npy") == expected[:700]
    assert list(got) == [f"train_{i:06d}.npy" for i in range(len(got))]
    assert [len(shard) for shard in got.values()][:-1] == [1000] * (len(got) - 1)
    assert tokens_in(tmp_path / "out") == expected
    assert manifest["documents"] == sum(bool(text) for text in texts)
    assert manifest["empty"] == sum(not text for text in texts) > 0
    for shard in manifest["shards"]:
        array = np.load(tmp_path / "out" / shard["file"])
        assert array.dtype == np.uint16
        assert (shard["tokens"], shard["sha256"]) == (len(array), hashlib.sha256(array.tobytes()).hexdigest())
    data.check(tmp_path / "out", "train")
    data.check(tmp_path / "out", "val")


def write_jsonl(path, texts):
    lines = "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts))
    path.write_bytes(lines.encode())


def write_gz(path, texts):
    write_jsonl(path, texts[:5])
    first = gzip.compress(path.read_bytes())
    write_jsonl(path, texts[5:])
    path.write_bytes(first + gzip.compress(path.read_bytes()))  # members one after the other are one file


def write_zst(path, texts):
    write_jsonl(path, texts)
    raw = path.read_bytes()
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(raw)


def write_arrow(path, texts, kind=pa.ipc.new_stream):
    table = pa.table({"text": texts, "n": list(range(len(texts)))})
    with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


WRITERS = {"a.parquet": parquet, "a.jsonl": write_jsonl, "a.jsonl.gz": write_gz, "a.jsonl.zst": write_zst,
           "a.arrow": write_arrow, "b.arrow": lambda path, texts: write_arrow(path, texts, pa.ipc.new_file)}


@pytest.mark.parametrize("name", WRITERS)
def test_kinds_of_files(tmp_path, name):
    texts = documents(40)
    WRITERS[name](tmp_path / name, texts[:25])
    WRITERS[name](tmp_path / f"c{name}", texts[25:])
    make(tmp_path / f"*{name[1:]}", tmp_path / "out", *SMALL)
    assert tokens_in(tmp_path / "out") == reference(texts)
    for start in (0, 1, 24, 25, 26, 39, 40):  # as a resumed run reads on
        files = sorted(tmp_path.glob(f"*{name[1:]}"))
        rest = list(sources.local_documents(files, "text", start, lambda share: None))
        assert rest == [text.encode() for text in texts[start:]]


def test_text_files_are_documents(tmp_path):
    texts = ["One two.\n\nThree.\n", "", "naïve 東京\n" * 400]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(b"packed"))
    make(tmp_path / "*.txt*", tmp_path / "out", "--shard_tokens=500", "--val_tokens=3")
    assert tokens_in(tmp_path / "out") == reference([*texts, "packed"])


def test_invalid_utf8_is_replaced_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9 ol\xc3\xa9"}\n\n{"text": "half \\ud83d"}\n{"text": null}\n')
    table = pa.table({"text": pa.array([b"ok \xef\xbf\xbd", b"\xff\xfe!"]).cast(pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "b.parquet")
    manifest = make(tmp_path / "?.*", tmp_path / "out", "--val_tokens=3")
    assert tokens_in(tmp_path / "out") == reference(
        ["caf\ufffd olé", "half \ufffd", "ok \ufffd", "\ufffd\ufffd!"])
    assert (manifest["documents"], manifest["empty"], manifest["replaced"]) == (4, 2, 4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["a", " ", "  ", "\n", "\u3000", "\x1c", "é", "😀", "1", "'s", ".", "\xa0 "]),
                          st.text(max_size=3))), st.integers(1, 9))
def test_cut_documents_keep_their_tokens(parts, size):
    text = "".join(parts)
    encode = tokenizer.encoding().encode_ordinary
    pieces = [piece for piece, _ in sources.cut(text.encode(), size)]
    assert "".join(pieces) == text
    if max(map(len, pieces)) <= 16 * size:  # else cut where it stands, as documented
        assert [t for piece in pieces for t in encode(piece)] == encode(text)


def test_a_long_document_is_cut_and_a_wall_of_spaces_survives(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 64)
    text = "It was the best of times, it was the worst of times,\n" * 50
    (tmp_path / "a.txt").write_text(text)
    make(tmp_path / "a.txt", tmp_path / "out", "--val_tokens=1")
    assert len(list(sources.cut(text.encode(), 64))) > 20
    assert shards(tmp_path / "out")["train_000000.npy"] == reference([text])[1:]
    wall = "x" + " " * 1_200_000 + "y"
    with pytest.raises(ValueError, match="stack size"):
        tokenizer.encoding().encode_to_numpy(wall)
    bytes_, (n,) = fineweb.encode([(True, wall)])
    assert tokenizer.decode(np.frombuffer(bytes_, np.uint16)[1:]) == wall
    assert n > 1


def test_limit_and_empty_source(tmp_path):
    texts = documents(60)
    source = parquet(tmp_path / "a.parquet", texts)
    make(source, tmp_path / "out", "--shard_tokens=300", "--val_tokens=100", "--limit_tokens=850")
    assert [len(x) for x in shards(tmp_path / "out").values()] == [300, 300, 150, 100]
    assert tokens_in(tmp_path / "out") == reference(texts)[:850]
    with pytest.raises(UserError, match=r"leaves nothing to train on; try --val_tokens=\d+"):
        make(source, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []  # the next try meets nothing in its way
    with pytest.raises(UserError, match="has 0 tokens"):
        make(parquet(tmp_path / "empty.parquet", ["", ""]), tmp_path / "other")


@pytest.mark.parametrize("shuffle", [[], ["--shuffle_seed=3"]], ids=["in order", "shuffled"])
def test_goes_on_after_any_break_with_equal_bytes(tmp_path, monkeypatch, shuffle):
    texts = [*documents(80), "long word " * 2000, *documents(20, seed=1)]
    source = parquet(tmp_path / "a.parquet", texts)
    monkeypatch.setattr(sources, "BUFFER", 3000)
    monkeypatch.setattr(sources, "PIECE", 500)
    words = [*SMALL, *shuffle]
    unbroken = make(source, tmp_path / "unbroken", *words)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "unbroken").glob("*.npy")}
    add = fineweb.Writer.add
    reads = []
    for seed in range(12):
        out, draw = tmp_path / f"broken{seed}", random.Random(seed)
        while True:
            left = draw.randrange(1, 60)

            def breaks(self, piece, tokens):
                nonlocal left
                reads.append(piece.row)
                left -= 1
                if not left:
                    raise KeyboardInterrupt
                add(self, piece, tokens)
            # as after a kill between a shard's rename and the manifest's, and amid a shard
            monkeypatch.setattr(fineweb.Writer, "add", breaks)
            try:
                manifest = make(source, out, *words)
                break
            except KeyboardInterrupt:
                (out / "train_000099.npy.77.tmp").write_bytes(b"half")
                if draw.random() < 0.3 and (whole := sorted(out.glob("train_*.npy"))):
                    whole[-1].write_bytes(whole[-1].read_bytes()[:200])  # cut short behind our back: made again
        monkeypatch.setattr(fineweb.Writer, "add", add)
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "manifest.json"} == expected
        assert manifest == unbroken


def test_shuffling_moves_documents_not_tokens(tmp_path, monkeypatch):
    texts = [f"Document {i}." for i in range(500)]
    source = parquet(tmp_path / "a.parquet", texts)
    monkeypatch.setattr(sources, "BUFFER", 2000)
    orders = []
    for seed in (-1, 0, 1):
        make(source, tmp_path / f"out{seed}", "--val_tokens=1", f"--shuffle_seed={seed}")
        got = shards(tmp_path / f"out{seed}")
        orders.append(tokenizer.decode(got["train_000000.npy"]).split("<|endoftext|>"))
    assert orders[0] == texts
    assert sorted(orders[1]) == sorted(orders[2]) == sorted(texts)
    assert len({str(order) for order in orders}) == 3


def test_killed_processes_leave_nothing_behind_and_a_second_start_finishes(tmp_path):
    """The real program: SIGKILL at a random moment, again and again; then Ctrl-C; then the end."""
    texts = [text for seed in range(30) for text in documents(60, seed)] * 8
    source = parquet(tmp_path / "a.parquet", texts, rows=100)
    out = tmp_path / "out"
    command = [sys.executable, "fineweb.py", f"--source={source}", f"--out={out}", "--shard_tokens=50000",
               "--val_tokens=50000", "--workers=2"]
    draw = random.Random(7)

    def alive():
        mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in _read(p)]
        return len(mine)

    for stop in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        deadline, had = time.monotonic() + 60, len(list(out.glob("*.npy")))
        while len(list(out.glob("*.npy"))) <= had and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        assert process.poll() is None, "finished before it could be stopped: give it more text"
        children = [int(c) for c in _read(Path(f"/proc/{process.pid}/task/{process.pid}/children")).split()]
        assert len(children) >= 2
        if stop == signal.SIGINT:
            os.killpg(process.pid, stop)  # as a terminal does: to all of them
        else:
            process.send_signal(stop)
        stdout, stderr = process.communicate(timeout=60)
        if stop == signal.SIGINT:
            assert process.returncode in (0, 130)  # 0: it was just done, which the machine's pace decides
            assert process.returncode == 0 or "the same command goes on" in stdout
            assert "Traceback" not in stderr
        for _ in range(100):
            if not any(Path(f"/proc/{child}").exists() for child in children):
                break
            time.sleep(0.1)
        else:
            pytest.fail("a worker outlived its parent")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on after" in done.stdout or "all is there already" in done.stdout
    assert tokens_in(out) == reference(texts)


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_stdlib(tmp_path, capsys):
    out = tmp_path / "out"
    manifest = make("stdlib", out)
    tokens = {split: tokens_in(out, [split]) for split in ("train", "val")}
    assert 3_000_000 < len(tokens["train"]) < 8_000_000
    assert 0.02 < len(tokens["val"]) / len(tokens["train"]) < 0.10
    text = {split: tokenizer.decode(ids) for split, ids in tokens.items()}
    files = {split: t.split("<|endoftext|>")[1:] for split, t in text.items()}
    import argparse
    source = Path(argparse.__file__).read_text()
    lines = []
    for line in source.splitlines(keepends=True):
        indent = (len(line) - len(line.lstrip(" "))) // 4
        lines.append("\t" * indent + line[4 * indent:])
    assert "".join(lines) in files["train"] + files["val"]  # whole, as it is but for tabs
    assert not set(files["train"]) & set(files["val"]) - {""}
    assert "class TestCase" in text["train"] + text["val"]  # unittest itself is library
    assert "test_support" not in "".join(f[:200] for f in files["train"])
    assert manifest["complete"]
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    make("stdlib", out)
    assert "all is there already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def bad_parquet(tmp_path, **columns):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")


BAD = {
    "no such file": lambda d: ["--source", "nowhere/*.parquet", "--out=x"],
    "dataset owner/name": lambda d: ["--source", "finewebb"],
    "needs a folder": lambda d: (bad_parquet(d, text=["a"]), ["--source", f"{d}/a.parquet"])[1],
    "must end in .parquet": lambda d: ((d / "a.csv").write_text("a"), ["--source", f"{d}/*.csv", "--out=x"])[1],
    "no column 'text'; choose with --text_column: content": lambda d: (
        bad_parquet(d, content=["a"]), ["--source", f"{d}/a.parquet", f"--out={d}/o"])[1],
    "column 'text' is int64": lambda d: (bad_parquet(d, text=[1]), ["--source", f"{d}/a.parquet", f"--out={d}/o"])[1],
    "a.parquet: Parquet magic bytes": lambda d: (
        (d / "a.parquet").write_bytes(b"x" * 99), ["--source", f"{d}/a.parquet", f"--out={d}/o"])[1],
    "line 2 is not JSON": lambda d: (
        (d / "a.jsonl").write_text('{"text": "a"}\n{"tex'), ["--source", f"{d}/a.jsonl", f"--out={d}/o"])[1],
    "line 1: no column 'text'": lambda d: (
        (d / "a.jsonl").write_text('{"body": "a"}\n'), ["--source", f"{d}/a.jsonl", f"--out={d}/o"])[1],
    "'text' is 5, not text": lambda d: (
        (d / "a.jsonl").write_text('{"text": 5}\n'), ["--source", f"{d}/a.jsonl", f"--out={d}/o"])[1],
    "a.jsonl.gz: .*damaged": lambda d: (
        (d / "a.jsonl.gz").write_bytes(gzip.compress(os.urandom(9999).hex().encode())[:5000]),
        ["--source", f"{d}/a.jsonl.gz", f"--out={d}/o"])[1],
    "a.txt.gz: Truncated": lambda d: (
        (d / "a.txt.gz").write_bytes(gzip.compress(os.urandom(9999).hex().encode())[:5000]),
        ["--source", f"{d}/a.txt.gz", f"--out={d}/o"])[1],
    "shard_tokens = 0": lambda d: ["--source=fineweb", "--shard_tokens=0"],
    "limit_tokens = 5 with val_tokens = 9": lambda d: ["--source=fineweb", "--limit_tokens=5", "--val_tokens=9"],
    "val_tokens = 9 means nothing with source 'stdlib'": lambda d: ["--source=stdlib", "--val_tokens=9"],
    "shards = 3 means nothing": lambda d: ["--source=fineweb", "--shards=3"],
    "cannot be written": lambda d: ((d / "o").write_text("a file"), ["--source=stdlib", f"--out={d}/o"])[1],
    "made with shard_tokens = 1000": lambda d: (
        make(parquet(d / "a.parquet", documents(60)), d / "o", *SMALL),
        ["--source", f"{d}/a.parquet", f"--out={d}/o", "--shard_tokens=2000", "--val_tokens=700"])[1],
    "made with source = ": lambda d: (
        make(parquet(d / "a.parquet", documents(60)), d / "o", *SMALL), parquet(d / "a.parquet", documents(61)),
        ["--source", f"{d}/a.parquet", f"--out={d}/o", *SMALL])[2],
    "but no manifest.json": lambda d: (
        np.save(d / "train_000000.npy", np.zeros(9, np.uint16)), ["--source=stdlib", f"--out={d}"])[1],
    "manifest.json cannot be read": lambda d: (
        (d / "manifest.json").write_text('{"settings": []}'), ["--source=stdlib", f"--out={d}"])[1],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(tmp_path, message):
    words = BAD[message](tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.npy")}
    with pytest.raises(UserError, match=message) as caught:
        fineweb.main(words)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.npy")} == before  # nobody's shards are touched


def test_overwrite(tmp_path):
    source = parquet(tmp_path / "a.parquet", documents(60))
    make(source, tmp_path / "o", *SMALL)
    make(source, tmp_path / "o", "--shard_tokens=2000", "--val_tokens=500", "--overwrite=true")
    assert sum(map(len, shards(tmp_path / "o").values())) == len(reference(documents(60)))
    data.check(tmp_path / "o", "train")


# ---- the hub, which no test can reach


@pytest.mark.parametrize("source", ["fineweb-edu", "kjj0/finewebedu10B-gpt2"])
def test_no_network_is_one_line_in_time(tmp_path, source):
    """Run as a user would, against a port that refuses."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "fineweb.py", "--source", source, "--out", str(tmp_path / "o")], cwd=ROOT,
                          env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True, text=True)
    assert time.monotonic() - start < 30
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: source {sources.HUB.get(source, source)}: the hub does not answer")
    assert "--source stdlib" in error
    assert "Traceback" not in done.stderr


def test_a_network_that_swallows_everything(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: time.sleep(20))
    monkeypatch.setattr(sources, "HUB_WAIT", 0.2)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"a/b: .*no answer in 0.2 s.*--source stdlib"):
        sources._reach("a/b")
    assert time.monotonic() - start < 5


def test_streaming_from_a_dataset_of_fineweb_edus_layout(tmp_path, monkeypatch):
    """A local folder in the place of the hub's: its card names the configurations, its parquet has the columns."""
    texts = documents(90)
    for i in range(3):
        (tmp_path / "repo/sample/10BT").mkdir(parents=True, exist_ok=True)
        parquet(tmp_path / f"repo/sample/10BT/00{i}.parquet", texts[i * 30: i * 30 + 30])
    (tmp_path / "repo/README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n")
    monkeypatch.setitem(sources.HUB, "fineweb-edu", str(tmp_path / "repo"))
    monkeypatch.setattr(sources, "_reach", lambda repo: None)
    make("fineweb-edu", tmp_path / "out", *SMALL)
    assert tokens_in(tmp_path / "out") == reference(texts)
    for start in (29, 30, 31, 90):
        rest = list(sources.hub_documents("fineweb-edu", "sample-10BT", "text", start, lambda share: None))
        assert rest == [text.encode() for text in texts[start:]]
    with pytest.raises(UserError, match="fineweb-edu, --name=sample-11BT: "):
        make("fineweb-edu", tmp_path / "other", "--name=sample-11BT")


def test_ready_made_shards(tmp_path, monkeypatch):
    import huggingface_hub

    def download(repo, name, *, repo_type, local_dir):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, 100
        (Path(local_dir) / name).write_bytes(header.tobytes() + np.arange(100, dtype="<u2").tobytes())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    names = ["README.md", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 9)), "fineweb_val_000000.bin"]
    monkeypatch.setattr(sources, "_reach", lambda repo: SimpleNamespace(
        siblings=[SimpleNamespace(rfilename=name) for name in names]))
    manifest = make("kjj0/fineweb10B-gpt2", tmp_path / "out", "--shards=2")
    assert [shard["file"] for shard in manifest["shards"]] == [
        "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert sum(shard.tokens for shard in data.check(tmp_path / "out", "train")) == 200
    make("kjj0/fineweb10B-gpt2", tmp_path / "out", "--shards=3")  # more, later
    assert sum(shard.tokens for shard in data.check(tmp_path / "out", "train")) == 300
