"""The trainer as a user runs it: end to end through torchrun, resumed, stopped, and fed every mistake."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT

import config as configuration
import train_gpt2_tp as trainer
from config import Config, UserError
from mesh import Mesh
from metrics import Diverged

SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--total_batch_size=64", "--micro_batch_size=2",
         "--max_steps=8", "--warmup_steps=2", "--learning_rate=3e-3", "--dtype=float32", "--eval_interval=4",
         "--eval_steps=2", "--sample_interval=8", "--checkpoint_interval=4"]


def command(*words, ranks: int = 0) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return [sys.executable, *launch, "train_gpt2_tp.py", *map(str, words)]


def run(*words, ranks: int = 0, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command(*words, ranks=ranks), cwd=ROOT, capture_output=True, text=True, timeout=120,
                          **options)


def rows(folder, kind: str) -> list[dict]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


@pytest.fixture
def data_dir(tmp_path):
    """A folder with 2,000 training and 500 validation tokens."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, tokens in (("train", 2000), ("val", 500)):
        np.save(folder / f"{name}_000000.npy", (np.arange(tokens) * 7 % 300).astype(np.uint16))
    return folder


@pytest.fixture(autouse=True)
def signals_restored():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_end_to_end_on_the_standard_library(tmp_path):
    data, out = tmp_path / "stdlib", tmp_path / "run"
    subprocess.run([sys.executable, "fineweb.py", "--source=stdlib", f"--out={data}"], cwd=ROOT, check=True,
                   capture_output=True, timeout=120)
    words = [f"--data_dir={data}", f"--out_dir={out}", "--tp=2", "--wandb=true", *SMALL]
    first = run(*words, ranks=2)
    assert first.returncode == 0, first.stderr
    for text in ("dp 1 × tp 2", "step 8/8 | loss", "val loss", "sample  Hello, I'm a language model,", "done    8 of"):
        assert text in first.stdout
    assert "Traceback" not in first.stderr and "Warning" not in first.stderr, first.stderr
    train, val = rows(out, "train"), rows(out, "val")
    assert [row["step"] for row in train] == list(range(1, 9)) and [row["step"] for row in val] == [0, 4, 8]
    assert train[0]["lr"] == pytest.approx(1.5e-3) and train[-1]["tokens"] == 8 * 64
    assert val[-1]["loss"] < val[0]["loss"] and val[0]["loss"] == pytest.approx(np.log(50257), abs=0.1)
    assert rows(out, "run")[0]["devices"] == 2 and len(rows(out, "sample")) == 2
    assert (out / "loss.png").stat().st_size > 5000
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert sorted(p.name for p in out.glob("checkpoints/step_*")) == ["step_000004", "step_000008"]

    refused = run(*words, ranks=2)
    assert "holds another run" in refused.stderr and refused.stderr.count("exitcode  : 2") == 2, refused.stderr

    # lose the last checkpoint, resume from the one before: the same losses, bit for bit
    (out / "checkpoints/step_000008").rename(tmp_path / "gone")
    again = run(*words, "--resume=true", "--wandb=false", ranks=2)
    assert again.returncode == 0, again.stderr
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in rows(out, "train")] == [
        (row["step"], row["loss"], row["grad_norm"]) for row in train]


def test_one_process_without_torchrun(tmp_path, data_dir):
    done = run(f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", "--compile=False", "--log_interval=3", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert len(rows(tmp_path / "run", "train")) == 8 and done.stdout.count(" tok/s ") == 3  # steps 3, 6 and the last


def test_one_rank_gets_sigterm_and_all_save_and_exit_with_0(tmp_path, data_dir):
    """Two workers as torchrun starts them, but without torchrun, whose report hides their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", "--tp=2", *SMALL, "--max_steps=100000"]
    workers = [subprocess.Popen(command(*words), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
               for rank in range(2)]
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and '"step": 6' in metrics.read_text()):
        time.sleep(0.1)
    workers[1].send_signal(signal.SIGTERM)
    (out, err), (_, err_1) = (worker.communicate(timeout=60) for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0], (out[-500:], err, err_1)
    assert "stopped by a signal to another rank after step" in out
    step = int(out.split("after step ")[1].split(";")[0])
    assert (tmp_path / f"run/checkpoints/step_{step:06d}").is_dir() and (tmp_path / "run/loss.png").exists()
    assert "Traceback" not in err + err_1 and "Warning" not in err + err_1, err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_step_between_log_lines_waits_for_the_gpu(tmp_path, data_dir, monkeypatch):
    """PyTorch raises where the host would wait, from the third step on to the sixth: batch, update, metrics and all."""
    modes = {3: "error", 6: "default"}

    def watched(model, optimizer, inputs, targets, step, *rest):
        if step in modes:
            torch.cuda.set_sync_debug_mode(modes[step])
        return train_step(model, optimizer, inputs, targets, step, *rest)

    train_step = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", watched)
    trainer.main([f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", *SMALL, "--dtype=bfloat16",
                  "--log_interval=100", "--eval_interval=0", "--sample_interval=0", "--checkpoint_interval=0"])
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_signal_that_comes_while_ranks_agree_counts_the_next_time():
    """Or this rank would stop a step before the others, which wait for it for ever."""
    class Late(Mesh):
        def any(self, flag):
            os.kill(os.getpid(), signal.SIGUSR1)
            return super().any(flag)

    stop, mesh = trainer.StopSignal(), Late(torch.device("cpu"))
    assert not stop.agreed(mesh) and stop.signal is None
    assert stop.agreed(mesh) and stop.signal == "SIGUSR1"


def test_a_run_that_diverges_keeps_its_checkpoint(tmp_path, data_dir, capsys):
    words = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", *SMALL, "--decay_steps=8",
             "--checkpoint_interval=1"]
    trainer.main([*words, "--max_steps=2"])
    with pytest.raises(Diverged, match="step 3: its update leaves weights whose loss is nan"):
        trainer.main([*words, "--resume=true", "--resume_override=true",
                      "--learning_rate=1e30", "--lr_schedule=constant", "--warmup_steps=0"])
    assert (tmp_path / "run/checkpoints/step_000002").is_dir()
    assert not (tmp_path / "run/checkpoints/step_000003").exists()
    with pytest.raises(Diverged, match="step 4: loss is nan"):
        trainer.main([*words, "--resume=true", "--resume_override=true", "--learning_rate=1e30", "--max_steps=4",
                      "--lr_schedule=constant", "--warmup_steps=0", "--checkpoint_interval=5"])
    assert rows(tmp_path / "run", "train")[-1]["loss"] is None
    trainer.main([*words, "--resume=true", "--max_steps=3"])  # nothing that diverged was saved
    assert np.isfinite(rows(tmp_path / "run", "train")[-1]["loss"])


# every mistake: words or a change to the data folder → what the line must say
def truncate(folder):
    path = folder / "train_000000.npy"
    path.write_bytes(path.read_bytes()[:-100])


def shard(name, array):
    return lambda folder: np.save(folder / f"{name}_000000.npy", array)


MISTAKES = {
    "unknown key": (["--max_step=5"], "--max_step: did you mean --max_steps"),
    "wrong type": (["--n_layer=two"], "--n_layer = 'two': it must be a whole number"),
    "boolean": (["--compile=yes"], "--compile = 'yes': it must be true or false"),
    "choice": (["--lr_schedule=linear"], "'linear': it must be one of cosine, wsd, constant"),
    "no file": (["nothing.toml"], "config file nothing.toml"),
    "batch": (["--total_batch_size=65"], "total_batch_size = 65 (tokens) is not divisible by block_size = 16"),
    "micro-batch": (["--micro_batch_size=3"], "4 sequences of block_size = 16, not divisible by micro_batch_size = 3"),
    "mesh": (["--tp=3"], "tp = 3, dp_shard = 1, dp_replicate = -1 does not fill 1 process"),
    "two rests": (["--dp_shard=-1"], "dp_shard = -1, dp_replicate = -1: only one can be -1"),
    "async_tp": (["--async_tp=true"], "async_tp = true with compile = false"),
    "heads": (["--n_head=3"], "n_embd = 16 is not divisible by n_head = 3"),
    "vocabulary": (["--vocab_size=70000"], "vocab_size = 70000: token shards are uint16"),
    "negative": (["--learning_rate=-1"], "learning_rate = -1.0"),
    "rising": (["--learning_rate=1e-5"], "min_lr = 6e-05 is above learning_rate = 1e-05"),
    "seed": (["--seed=-1"], "seed = -1"),
    "no folder": (["--data_dir=/nowhere"], "/nowhere: no such folder; python fineweb.py"),
    "no shards": (lambda folder: (folder / "train_000000.npy").unlink(), "no train shards"),
    "truncated": (truncate, "cut short or damaged"),
    "empty": (shard("train", np.zeros(0, np.uint16)), "holds no tokens"),
    "2-D": (shard("train", np.zeros((4, 500), np.uint16)), "shape (4, 500)"),
    "floats": (shard("train", np.zeros(2000, np.float32)), "of float32"),
    "short": (shard("train", np.zeros(50, np.uint16)), "50 train tokens"),
    "token id": (shard("train", np.where(np.arange(2000) == 1234, 50300, 5).astype(np.uint16)),
                 "train_000000.npy: token id 50300 at index 1234"),
    "validation": (["--eval_steps=9"], "eval_steps = 9 batches of total_batch_size = 64 need 577 validation tokens"),
    "out_dir": (["--out_dir=LICENSE"], "out_dir = LICENSE is a file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake, tmp_path, data_dir, monkeypatch):
    monkeypatch.chdir(ROOT)
    change, message = MISTAKES[mistake]
    words = []
    if callable(change):
        change(data_dir)
    else:
        words = change
    with pytest.raises(UserError) as error:
        trainer.main([f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", *SMALL, *words])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_mistakes_of_the_machine(monkeypatch):
    with pytest.raises(UserError, match=r"torch 2\.10\.0\+cu128 is outside .*pip install 'torch>=2\.11,<2\.14'"):
        configuration.check_torch("2.10.0+cu128")
    configuration.check_torch("2.13.0+cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"--nproc-per-node=4 on a box with 2 GPU"):
        trainer.start(Config())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"async_tp = true on a machine without CUDA"):
        trainer.start(Config(async_tp=True))


def test_deterministic_runs_are_equal_to_the_bit(tmp_path, data_dir, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        for name in "ab":
            trainer.main([f"--data_dir={data_dir}", f"--out_dir={tmp_path / name}", *SMALL, "--deterministic=true",
                          "--dropout=0.1", "--dtype=bfloat16", "--checkpoint_interval=0"])
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    a, b = ([(row["loss"], row["grad_norm"]) for row in rows(tmp_path / name, "train")] for name in "ab")
    assert a == b


def test_sequence_must_divide(tmp_path):
    config = Config(tp=3, dp_replicate=1, n_embd=48, n_head=3)
    with pytest.raises(UserError, match=r"block_size = 1024 is not divisible by tp = 3.*try block_size = 1026"):
        configuration.check(config, 3)
    with pytest.raises(UserError, match=r"dropout = 0.1 with compile = true and tp = 2 needs sequence_parallel"):
        configuration.check(Config(tp=2, dropout=0.1, compile=True, sequence_parallel=False), 2)


def test_other_tokens_than_gpt2s(tmp_path, data_dir):
    """A small vocabulary and a context shorter than the sample's prompt: a run all the same."""
    trainer.main([f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", *SMALL, "--vocab_size=300",
                  "--block_size=4", "--total_batch_size=64"])
    assert len(rows(tmp_path / "run", "sample")) == 2
    trainer.main([f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", *SMALL, "--vocab_size=300",
                  "--block_size=4", "--total_batch_size=64", "--resume=true", "--eval_interval=0"])


@pytest.mark.parametrize("mistake", ["mesh", "token id"])  # one found by every rank, one found by rank 0 alone
def test_every_worker_exits_with_2(mistake, tmp_path, data_dir):
    change, message = MISTAKES[mistake]
    words = [] if callable(change) else change
    if callable(change):
        change(data_dir)
    began = time.monotonic()
    failed = run(f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", "--tp=2", *SMALL, *words, ranks=2)
    assert time.monotonic() - began < 40
    assert failed.stderr.count("error: ") == 1 and message.replace("1 process", "2 process") in failed.stderr
    assert failed.stderr.count("exitcode  : 2") == 2, failed.stderr  # torchrun's report of both workers
    assert "train_gpt2_tp.py\", line" not in failed.stderr  # no traceback of ours


def test_plain_python_exits_with_2(tmp_path, data_dir):
    failed = run("--tp=3")
    assert failed.returncode == 2 and failed.stderr.startswith("error: tp = 3, ") and failed.stderr.count("\n") == 1

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    np.save(data_dir / "train_000000.npy", np.zeros(300_000, np.uint16))
    big = run(f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'run'}", *SMALL, "--total_batch_size=262144",
              "--micro_batch_size=16384", "--eval_interval=0", preexec_fn=limit)
    assert big.returncode == 2 and "out of memory at a peak of" in big.stderr and "micro_batch_size" in big.stderr
    assert "Traceback" not in big.stderr


def test_learning_rate_schedules():
    c = Config(learning_rate=1.0, min_lr=0.1, warmup_steps=10, max_steps=110, decay_steps=110)
    rate = [trainer.learning_rate(step, c) for step in range(120)]
    assert rate[0] == 0.1 and rate[9] == 1.0 and rate[10] == 1.0  # nanoGPT's (it + 1) / warmup
    assert rate[60] == pytest.approx(0.55) and rate[110] == pytest.approx(0.1) and rate[119] == pytest.approx(0.1)
    c.lr_schedule, c.decay_steps = "wsd", 20
    rate = [trainer.learning_rate(step, c) for step in range(110)]
    assert rate[50] == rate[90] == 1.0 and rate[100] == pytest.approx(0.55) and rate[109] == pytest.approx(0.145)
    c.lr_schedule = "constant"
    assert trainer.learning_rate(109, c) == 1.0


def test_config_file_and_its_dump(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('out_dir = "a \\"b\\""\ncompile = true\nlearning_rate = 1\n')
    c = configuration.parse(Config, [str(path), "--compile=False", "--max_steps", "7"], toml=True)
    assert (c.out_dir, c.compile, c.learning_rate, c.max_steps) == ('a "b"', False, 1.0, 7)
    path.write_text(configuration.dump(c))
    assert configuration.parse(Config, [str(path)], toml=True) == c
    for text, message in (("max_step = 3", "did you mean max_steps"), ("tp = ", "is not TOML"),
                          ("tp = 2.0", "tp = 2.0: it must be a whole number"),
                          ("compile = 1", "compile = 1: it must be true or false")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            configuration.parse(Config, [str(path)], toml=True)


def test_every_config_of_ours_is_valid():
    for path in (ROOT / "configs").glob("[!b]*.toml"):  # those of benchmarks have rows: test_benchmark.py
        c = configuration.parse(Config, [str(path)], toml=True)
        for tp in (1, 2, 4, 8):
            for dp in (1, 2, 8) if c.sequences >= 512 else (1,):
                c.tp, c.dp_replicate = tp, -1
                configuration.check(c, tp * dp)


def test_help_lists_every_key_with_its_docstring():
    shown = run("--help", env=os.environ | {"COLUMNS": "200"})
    assert shown.returncode == 0
    assert "--micro_batch_size INT" in shown.stdout and "lower it when memory runs out" in shown.stdout
