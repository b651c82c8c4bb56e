"""Batches against the plainest reference (one list of all tokens, slices), and every shard that must be refused."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from config import UserError

ROOT = Path(data.__file__).parent
B, T = 12, 5  # sequences of the global batch (divisible by dp 1, 2, 3, 4), tokens a sequence


def write(folder, lengths, split="train", dtype=np.uint16):
    """Shards of these lengths holding 0, 1, 2, …; returns all tokens as a list."""
    folder.mkdir(exist_ok=True)
    tokens = list(range(sum(lengths)))
    done = 0
    for i, length in enumerate(lengths):
        np.save(folder / f"{split}_{i:06d}.npy", np.array(tokens[done:done + length], dtype))
        done += length
    return tokens


def reference(tokens, step):
    """Inputs and targets of a step in file order, as plainly as can be said."""
    steps = (len(tokens) - 1) // T // B
    start = step % steps * B * T
    inputs = [tokens[start + i * T: start + i * T + T] for i in range(B)]
    targets = [tokens[start + i * T + 1: start + i * T + T + 1] for i in range(B)]
    return inputs, targets


def batches(folder, **more):
    return data.Batches(folder, "train", **{"sequences": B, "block_size": T, "seed": 1} | more)


BORDERS = [[n * B * T + d] for n in (1, 3) for d in (1, 2, B * T)] + [
    [B * T, B * T, B * T], [B * T + 1, B * T - 1, 5], [1] * (B * T + 1), [1, 2 * B * T, 1], [3, 1, 200, 1, 60, 59]]


@pytest.mark.parametrize("lengths", BORDERS, ids=str)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_every_rank_has_its_rows_of_the_reference(tmp_path, lengths, dp):
    tokens = write(tmp_path, lengths)
    ranks = [batches(tmp_path, dp_rank=r, dp_size=dp) for r in range(dp)]
    for step in range(2 * ranks[0].steps_per_epoch + 1):  # into the third epoch
        parts = [rank[step] for rank in ranks]
        for part, expected in zip(zip(*parts, strict=True), reference(tokens, step), strict=True):
            assert all(x.dtype == torch.int64 and x.shape == (B // dp, T) for x in part)
            assert torch.cat(part).tolist() == expected


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_data_order_ignores_micro_batches(tmp_path, dp, accumulation):
    """What a rank trains on in a step, cut into micro-batches, is the same rows in the same order."""
    tokens = write(tmp_path, [500])
    seen = [micro for r in range(dp) for micro in
            batches(tmp_path, dp_rank=r, dp_size=dp)[3][0].split(B // dp // accumulation)]
    assert len(seen) == dp * accumulation
    assert torch.cat(seen).tolist() == reference(tokens, 3)[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_resumed_at_each_step(tmp_path, shuffle):
    write(tmp_path, [301, 1, 107])
    whole = batches(tmp_path, shuffle=shuffle)
    run = [whole[step] for step in range(15)]
    for start in range(15):
        loader = data.Loader(batches(tmp_path, shuffle=shuffle), start, "cpu")
        for step in range(start, min(start + 2, 15)):
            for resumed, unbroken in zip(loader.next(), run[step], strict=True):
                assert torch.equal(resumed, unbroken)
        loader.close()


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), sequences=st.integers(1, 7),
       block_size=st.integers(1, 9), seed=st.integers(0, 3), shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_an_epoch_has_every_target_once(tmp_path_factory, lengths, sequences, block_size, seed, shuffle, epoch):
    folder = tmp_path_factory.mktemp("shards")
    tokens = write(folder, lengths)
    if len(tokens) <= sequences * block_size:
        with pytest.raises(UserError, match="one batch needs"):
            batches(folder, sequences=sequences, block_size=block_size)
        return
    b = batches(folder, sequences=sequences, block_size=block_size, seed=seed, shuffle=shuffle)
    steps = [b[epoch * b.steps_per_epoch + i] for i in range(b.steps_per_epoch)]
    targets = torch.cat([y for _, y in steps]).flatten().tolist()
    assert all(torch.equal(x + 1, y) for x, y in steps)  # the tokens are 0, 1, 2, …
    assert len(set(targets)) == len(targets)
    assert len(tokens) - 1 - len(targets) < sequences * block_size  # never targets: the first, and less than a batch
    assert set(targets) <= set(tokens[1:])
    if not shuffle:
        assert targets == tokens[1:len(targets) + 1]


def test_shuffled_epochs_differ_and_follow_from_the_seed(tmp_path):
    write(tmp_path, [4000])
    def order(seed, epoch):
        b = batches(tmp_path, seed=seed, shuffle=True)
        return [b[epoch * b.steps_per_epoch + i][0].tolist() for i in range(b.steps_per_epoch)]
    in_file_order = [reference(list(range(4000)), step)[0] for step in range(66)]
    assert order(1, 1) == order(1, 1)
    assert len({str(x) for x in (in_file_order, *(order(seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)))}) == 7


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_permute_is_a_permutation(size, key):
    assert sorted(data.permute(i, size, key) for i in range(size)) == list(range(size))


def test_permute_spreads_and_is_fixed():
    places = [data.permute(i, 10_000, "7/1") for i in range(10_000)]
    assert abs(np.corrcoef(places, range(10_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.03
    assert [data.permute(i, 10, "7/1") for i in range(10)] == [2, 0, 4, 8, 3, 5, 6, 9, 1, 7]  # resumed runs rely on it


def test_a_file_over_4_gib(tmp_path):
    """Offsets beyond 32 bits, on a sparse file."""
    n = (1 << 31) + 1000  # uint16 tokens: 4 GiB and a little
    array = np.lib.format.open_memmap(tmp_path / "train_000000.npy", mode="w+", dtype=np.uint16, shape=(n,))
    array[-11:] = range(11)
    del array
    b = batches(tmp_path, sequences=1, block_size=5)
    assert b.steps_per_epoch == (n - 1) // 5
    last = b[b.steps_per_epoch - 1]  # its targets end at token (n - 1) // 5 * 5
    assert last[1].flatten().tolist() == list(range(11 - 1 - (n - 1) % 5 - 4, 11 - (n - 1) % 5))


# ---- formats


def llmc(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


FORMATS = {
    "train_000000.npy": lambda path, tokens: np.save(path, np.array(tokens, np.uint16)),
    "edufineweb_train_000001.npy": lambda path, tokens: np.save(path, np.array(tokens, np.int32)),
    "big_train_000001.npy": lambda path, tokens: np.save(path, np.array(tokens, ">i8")),
    "fineweb_train_000001.bin": llmc,
    "tiny_shakespeare_train.bin": llmc,
    "train.bin": lambda path, tokens: np.array(tokens, np.uint16).tofile(path),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name):
    tokens = [*range(50_000, 50_256), 0, 1]
    FORMATS[name](tmp_path / name, tokens)
    FORMATS[name](tmp_path / name.replace("train", "val"), [1, 2])  # is not taken for train
    assert len(data.check(tmp_path, "train")) == 1
    x, y = batches(tmp_path, sequences=257, block_size=1)[0]
    assert x.flatten().tolist() == tokens[:-1]
    assert y.flatten().tolist() == tokens[1:]


def damaged(path, change):
    raw = bytearray(path.read_bytes())
    path.write_bytes(change(raw))


def manifest(folder, tokens, complete=True):
    (folder / "manifest.json").write_text(json.dumps(
        {"complete": complete, "shards": [{"file": "train_000000.npy", "tokens": tokens, "sha256": "0"}]}))


BAD = {
    "no such folder": lambda d: d.rmdir(),
    "no train shards": lambda d: write(d, [99], "val"),
    "holds no tokens": lambda d: write(d, [99, 0]),
    "shape": lambda d: np.save(d / "train_000000.npy", np.zeros((9, 11), np.uint16)),
    "float64": lambda d: np.save(d / "train_000000.npy", np.zeros(99)),
    "cut short": lambda d: (write(d, [99]), damaged(d / "train_000000.npy", lambda raw: raw[:-2])),
    "no NumPy array": lambda d: (write(d, [99]), damaged(d / "train_000000.npy", lambda raw: raw[:9])),
    "no NumPy array \\(the magic": lambda d: (d / "train_000000.npy").write_bytes(b"x" * 300),
    "says 100 tokens": lambda d: llmc(d / "a_train_1.bin", [1] * 99, count=100),
    "says 98 tokens": lambda d: llmc(d / "a_train_1.bin", [1] * 99, count=98),
    "says -1 tokens": lambda d: llmc(d / "a_train_1.bin", [1] * 99, count=-1),
    "version 7": lambda d: llmc(d / "a_train_1.bin", [1] * 99, version=7),
    "magic number": lambda d: llmc(d / "a_train_1.bin", [1] * 99, magic=20240801),
    "begins with 0": lambda d: (d / "a_train_1.bin").write_bytes(b""),
    "no whole number": lambda d: (d / "train.bin").write_bytes(b"x" * 99),
    "two sets": lambda d: (write(d, [99]), FORMATS["train.bin"](d / "train.bin", [1] * 99)),
    "two sets of train": lambda d: (write(d, [99]), np.save(d / "edu_train_000000.npy", np.zeros(99, np.uint16))),
    "unfinished": lambda d: (write(d, [99]), manifest(d, 99, complete=False)),
    "manifest.json says 98": lambda d: (write(d, [99]), manifest(d, 98)),
    "manifest.json says None": lambda d: (write(d, [99, 5]), manifest(d, 99)),
    "listed in manifest.json but missing": lambda d: (
        write(d, [5, 99]), (d / "train_000000.npy").unlink(), manifest(d, 5)),
    "cannot be read|unreadable": lambda d: (write(d, [99]), (d / "manifest.json").write_text("{")),
    "99 train tokens, but one batch needs 100": lambda d: write(d, [60, 39]),
    "token id 50257 at index 70": lambda d: np.save(
        d / "train_000000.npy", np.array([5] * 70 + [50257] * 50, np.uint16)),
    "token id -1 at index 119": lambda d: np.save(d / "train_000000.npy", np.array([5] * 119 + [-1], np.int16)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_shards(tmp_path, message):
    folder = tmp_path / "shards"
    folder.mkdir()
    BAD[message](folder)
    with pytest.raises(UserError, match=message) as caught:
        data.check(folder, "train", min_tokens=100)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_ids_are_looked_at_once_and_again_when_a_shard_changes(tmp_path, monkeypatch):
    write(tmp_path, [1000, 1000])
    monkeypatch.setattr(data, "SCAN", 64)
    reads = []
    read = data.Shard.read
    monkeypatch.setattr(data.Shard, "read", lambda self, *where: reads.append(self.path.name) or read(self, *where))
    data.check(tmp_path, "train")
    assert len(reads) == 32
    data.check(tmp_path, "train")
    assert len(reads) == 32
    with pytest.raises(UserError, match=r"train_000001.npy: token id 1990 at index 990 .*vocab_size = 1990"):
        data.check(tmp_path, "train", vocab_size=1990)  # answered for another vocabulary too
    np.save(tmp_path / "train_000001.npy", np.full(1000, 50_257, np.uint16))
    with pytest.raises(UserError, match=r"train_000001.npy: token id 50257 at index 0"):
        data.check(tmp_path, "train")
    (tmp_path / data.CHECKED).write_text("{")  # damaged: looked at anew
    with pytest.raises(UserError, match="token id 50257"):
        data.check(tmp_path, "train")


def test_unigram_entropy(tmp_path):
    np.save(tmp_path / "train_000000.npy", np.array([7] * 4 + [8] * 2, np.uint16))
    np.save(tmp_path / "train_000001.npy", np.array([50_256, 0], np.uint16))
    assert data.unigram_entropy(tmp_path, "train") == pytest.approx(1.75 * np.log(2))  # 1/2, 1/4, 1/8, 1/8


# ---- loader


def test_loader_prepares_ahead_and_says_how_long_it_waited(tmp_path):
    write(tmp_path, [500])
    b = batches(tmp_path)
    asked = []

    class Slow:
        def __getitem__(self, step):
            asked.append(step)
            time.sleep(0.1)
            return b[step]

    loader = data.Loader(Slow(), 2, "cpu")
    loader.next()
    assert loader.data_ms > 50  # nothing could be ready yet
    while not loader._ahead.done():  # the step computes
        time.sleep(0.01)
    x, _ = loader.next()
    assert loader.data_ms < 50
    assert torch.equal(x, b[3][0])
    loader.close()
    assert asked in ([2, 3], [2, 3, 4])  # the last was ordered, and taken back if it had not begun
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_a_shard_cut_short_while_training_is_an_error_not_a_hang(tmp_path):
    write(tmp_path, [500])
    loader = data.Loader(batches(tmp_path), 0, "cpu")
    loader.next()
    damaged(tmp_path / "train_000000.npy", lambda raw: raw[:300])
    with pytest.raises(UserError, match=r"train_000000.npy: ends at token \d+"):
        for _ in range(3):
            loader.next()
    with pytest.raises(UserError):  # and stays one
        loader.next()
    loader.close()


def test_memory_stays_bounded(tmp_path):
    """Resident memory does not grow with what has been read (a mapped file's would: 80 MB here)."""
    FORMATS["train.bin"](tmp_path / "train.bin", np.zeros(40_000_000, np.uint16))
    code = ("import data, sys\n"
            "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
            "b = data.Batches(sys.argv[1], 'train', sequences=64, block_size=1024)\n"
            "b[0]; before = rss()\n"
            "for step in range(b.steps_per_epoch): b[step]\n"
            "print(rss() - before)")
    grown = int(subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True))
    assert grown < 30e6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_loader_on_a_gpu(tmp_path):
    write(tmp_path, [500])
    loader = data.Loader(batches(tmp_path), 0, "cuda")
    for step in range(5):
        x, y = loader.next()
        assert x.is_cuda
        assert torch.equal(x.cpu(), batches(tmp_path)[step][0])
        assert torch.equal(y.cpu(), batches(tmp_path)[step][1])
    loader.close()


# ---- python data.py DIR


def test_the_table(tmp_path, capsys):
    write(tmp_path, [300, 200])
    write(tmp_path, [100], "val")
    data.main([str(tmp_path), "--block_size=5", "--total_batch_size=60", "--micro_batch_size=1", "--max_steps=16"])
    shown = capsys.readouterr().out
    assert "train_000001.npy" in shown
    assert "train: 500 tokens, 8 steps of 60 an epoch; max_steps = 16 are 2.00 epochs" in shown
    assert "val: 100 tokens" in shown
    assert repr("!\"#$%&'()*+,") in shown  # the first shard's first 12 tokens


def test_the_table_says_when_a_batch_is_too_large(tmp_path, capsys):
    write(tmp_path, [300])
    write(tmp_path, [60], "val")  # one token short of a batch and its last target
    with pytest.raises(UserError, match="1 problem found"):
        data.main([str(tmp_path), "--block_size=5", "--total_batch_size=60", "--micro_batch_size=1"])
    assert "60 val tokens do not fill a batch of 60 and its last target" in capsys.readouterr().out


def test_the_table_shows_every_problem(tmp_path):
    write(tmp_path, [300, 200, 100])
    (tmp_path / "train_000000.npy").write_bytes(b"?")
    np.save(tmp_path / "train_000002.npy", np.full(9, 60_000, np.uint16))
    shown = subprocess.run([sys.executable, "data.py", str(tmp_path)], cwd=ROOT, text=True, capture_output=True)
    assert shown.returncode == 2
    problems = [line for line in shown.stdout.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 3
    for expected in ("train_000000.npy: no NumPy array", "token id 60000 at index 0", "no val shards"):
        assert sum(expected in problem for problem in problems) == 1
    assert shown.stderr.startswith(f"error: {tmp_path}: 3 problems")
    assert shown.stderr.count("\n") == 1
