"""SIGKILL at random moments of a run that saves every 2 steps, resumed each time: `make soak`.

Two ranks on the CPU, forked as torchrun would start them. Sometimes every rank dies, as when a machine goes, and
sometimes one. Whatever the moment, the run must go on, and in the end its losses must be the unbroken run's to the last
bit, each step's once. Then SIGUSR1 to one rank: both must save and leave.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2_tp as trainer
from config import parse
from config import run as run_script

RANKS, STEPS = 2, 40
WORDS = ["--n_layer=1", "--n_head=3", "--n_embd=48", "--block_size=32", "--vocab_size=1000", "--dtype=float32",
         "--total_batch_size=256", "--micro_batch_size=4", f"--max_steps={STEPS}", "--warmup_steps=5", "--tp=2",
         "--checkpoint_interval=2", "--eval_interval=10", "--eval_steps=1", "--sample_interval=0", "--resume=true"]


@dataclass
class Options:
    """Kill a run again and again: python tests/soak.py --kills=20"""

    kills: int = 20
    """How often."""
    seed: int = 0
    """Of the moments."""


def start(words: list[str], log: Path) -> list[multiprocessing.Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(rank, port, words, log)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    return ranks


def work(rank: int, port: int, words: list[str], log: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        trainer.main(words)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def join(ranks: list[multiprocessing.Process], seconds: float) -> bool:
    """Whether all ranks ended in time, and well."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode == 0 for process in ranks)


def losses(out: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows if row["kind"] in ("train", "val")]


def soak(kills: int, seed: int, folder: Path) -> str:
    """Raise AssertionError where a run cannot go on or differs; the figures otherwise."""
    draw = random.Random(seed)
    tokens = (np.arange(20_000) * 7 % 997).astype(np.uint16)
    (folder / "data").mkdir()
    for split in ("train", "val"):
        np.save(folder / f"data/{split}_000000.npy", tokens)
    log = folder / "log"

    def words(out):
        return [*WORDS, f"--data_dir={folder / 'data'}", f"--out_dir={out}",
                f"--async_save={draw.choice(['always', 'never'])}"]
    begin = time.monotonic()
    assert join(start(words(folder / "unbroken"), log), 300), log.read_text()[-5000:]
    duration = time.monotonic() - begin
    expected = losses(folder / "unbroken")
    assert len([row for row in expected if row[0] == "train"]) == STEPS

    killed, alone, saving, restarted, runs, out = 0, 0, 0, 0, 0, folder / "run0"
    while killed < kills or out.exists():
        ranks = start(words(out), log)
        if killed < kills and not join(ranks, draw.uniform(0, duration)) and any(p.exitcode is None for p in ranks):
            victims = draw.choice([ranks, ranks[:1], ranks[1:]])
            for process in victims:
                process.kill()
            join(ranks, 2)  # time for the other to notice, then torchrun's part
            for process in ranks:
                process.kill()
                process.join()
            killed += 1
            alone += len(victims) == 1
            saving += any(out.glob("checkpoints/*.partial"))
            restarted += any(out.glob("checkpoints/latest"))
            continue
        assert join(ranks, 300), log.read_text()[-5000:]
        assert losses(out) == expected, f"{out} differs"
        assert not list(out.glob("checkpoints/*.*")), "half-written folders are left"
        runs += 1
        out = folder / f"run{runs}"

    ranks = start(words(out), log)
    while not (out / "checkpoints/latest").exists():
        time.sleep(0.01)
    os.kill(ranks[1].pid, signal.SIGUSR1)
    begin = time.monotonic()
    assert join(ranks, 30), log.read_text()[-5000:]
    stopped, seconds = losses(out)[-1][1], time.monotonic() - begin
    assert stopped < STEPS and "stopped by a signal to another rank" in log.read_text()
    assert join(start(words(out), log), 300) and losses(out) == expected
    return (f"{killed} kills in {runs} runs of {STEPS} steps on {RANKS} ranks: {alone} of one rank alone, {saving} "
            f"while a checkpoint was being written, {restarted} with one to go on from. Every run ended with the "
            f"unbroken run's losses. SIGUSR1 to rank 1 stopped both in {seconds:.1f} s.")


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with tempfile.TemporaryDirectory() as folder:
        print(soak(options.kills, options.seed, Path(folder)), flush=True)


if __name__ == "__main__":
    run_script(main)
