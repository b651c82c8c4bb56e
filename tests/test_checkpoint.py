"""Checkpoints: every mesh to every other against the unbroken run, and whatever can go wrong on a disk."""

import contextlib
import io
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import run_ranks
from small import CPU, batch, difference, small_config
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
from checkpoint import SaveFailed, Saver
from config import UserError
from mesh import Mesh, mesh_over_world
from model import real_shapes
from parallel import build_model, check_weights, local, make_optimizer
from train_gpt2_tp import train_step

DATA = {"shards": 1, "tokens": 1000}
LEG = 2  # steps between one save and the next


def train(config, mesh, model, optimizer, steps):
    """Losses and norms of the trainer's own steps, `steps` a range."""
    losses, norms = [], []
    for step in steps:
        inputs, targets = (rows.chunk(mesh.dp)[mesh.dp_rank] for rows in batch(step, config))
        loss, norm = train_step(model, optimizer, inputs, targets, step, config, mesh)
        losses.append(mesh.all_mean(loss).item())
        norms.append(norm.item())
    check_weights(model, config, mesh)
    return losses, norms


def start(config, mesh):
    """Model and optimizer, from the checkpoint that the config asks for, and the step to go on from."""
    model = build_model(config, mesh)
    optimizer = make_optimizer(model, config)
    found = checkpoint.choose(config, mesh, DATA)
    if found:
        checkpoint.load(found[0], config, mesh, model, optimizer)
    return model, optimizer, found[1]["step"] if found else 0


def state(model, optimizer):
    """Copies of this rank's parameters and moments."""
    return [local(t).detach().clone() for p in model.parameters()
            for t in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"], optimizer.state[p]["step"])]


def saver_of(config, mesh, model, optimizer, step=0):
    return Saver(config, mesh, model, optimizer, DATA, step)


# ---------------------------------------------------------------------------------------------------------------------
# meshes


def relay(rank, world_size, legs):
    """For each leg, a dict of config keys: go on from out_dir's newest checkpoint for LEG steps, and save."""
    results = []
    for keys in legs:
        config = small_config(world_size, resume=True, grad_clip=0.5, **keys)
        mesh = Mesh(CPU) if world_size == 1 else mesh_over_world(config, CPU)
        model, optimizer, step = start(config, mesh)
        run = train(config, mesh, model, optimizer, range(step, step + LEG))
        if not config.reshard_after_forward:  # a forward pass alone, as validation makes, leaves weights gathered
            with torch.no_grad():
                model(*batch(0, config))
        saver_of(config, mesh, model, optimizer).save(step + LEG, last=True)
        results.append((step, *run))
    return results


HEADS = {12: {"n_head": 12, "n_embd": 48}, 25: {"n_head": 25, "n_embd": 100}}
RELAY = [  # processes and meshes; dp_replicate is what these leave of the processes
    (1, [{}]),
    (4, [{"tp": 2}, {"tp": 4}, {"tp": 2, "dp_shard": 2, "reshard_after_forward": False}, {"tp": 4}]),
    (8, [{"tp": 8}, {"tp": 2, "dp_shard": 2}]),
    (1, [{}]),
]


def test_every_mesh_resumes_every_other(tmp_path):
    """One relay for each head count, from one process up to eight and back: the losses of one unbroken run.

    At tp = 8 a rank holds nothing but padding: 12 heads are 6 × 2 + 2 × 0, and 25 are 6 × 4 + 1 + 0.
    """
    runs = {heads: [] for heads in HEADS}
    for world_size, meshes in RELAY:
        legs = [keys | mesh | {"out_dir": str(tmp_path / str(heads)), "n_layer": 1, "micro_batch_size": 1}
                for heads, keys in HEADS.items() for mesh in meshes]
        results = run_ranks(relay, world_size, world_size, legs) if world_size > 1 else [relay(0, 1, legs)]
        for rank in results:
            assert rank == results[0]
        for leg, run in zip(legs, results[0], strict=True):
            runs[leg["n_head"]].append(run)
    for heads, keys in HEADS.items():
        assert [step for step, *_ in runs[heads]] == list(range(0, LEG * len(runs[heads]), LEG))
        losses, norms = ([x for run in runs[heads] for x in run[i]] for i in (1, 2))
        config = small_config(grad_clip=0.5, n_layer=1, **keys)
        model = build_model(config, Mesh(CPU))
        expected = train(config, Mesh(CPU), model, make_optimizer(model, config), range(len(losses)))
        assert difference((losses, norms), expected) < 1e-5, heads


def two_ranks(rank, folder):
    """What one mesh must keep bit for bit, and the failures of one rank."""
    config = small_config(2, tp=2, n_head=5, n_embd=40, out_dir=f"{folder}/same", keep_checkpoints=9, resume=True,
                          async_save="always")
    mesh = mesh_over_world(config, CPU)
    model, optimizer, _ = start(config, mesh)
    saver = saver_of(config, mesh, model, optimizer)
    losses, states = [], []
    for step in range(6):  # saved while training goes on
        losses.append(train(config, mesh, model, optimizer, range(step, step + 1)))
        states.append(state(model, optimizer))
        saver.save(step + 1)
    saver.wait()
    for step in (4, 2):  # back, and once more back
        config.resume_step = step
        model, optimizer, found = start(config, mesh)
        assert found == step
        for ours, theirs in zip(state(model, optimizer), states[step - 1], strict=True):
            assert torch.equal(ours, theirs)
        assert [train(config, mesh, model, optimizer, range(s, s + 1)) for s in range(step, 6)] == losses[step:]

    # rank 1 finds a folder where its file should go; rank 0 could have written
    blocked = Path(folder) / "same/checkpoints/step_000007.partial/__1_0.distcp"
    blocked.mkdir(parents=True, exist_ok=True)
    mesh.barrier()
    saver.background = False
    saver.save(7)
    assert saver.saved == 6 and "rank 1: [Errno 21]" in saver.outcome[1]
    blocked.mkdir(parents=True, exist_ok=True)
    mesh.barrier()
    with pytest.raises(SaveFailed, match=r"step 7 not saved: rank 1: \[Errno 21\] .*; the newest is of step 6"):
        saver.save(7, last=True)
    saver.save(7)
    assert saver.saved == 7

    # a damaged file of the other rank is found by both, and both go back by one
    if rank == 0:
        flip(Path(folder) / "same/checkpoints/step_000007/__1_0.distcp")
    mesh.barrier()
    config.resume_step = -1
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert checkpoint.choose(config, mesh, DATA)[1]["step"] == 6
    said = "step_000007: __1_0.distcp is damaged (its sha256 differs); trying the one before" in out.getvalue()
    assert said == (rank == 0)

    # what ranks hold in common is stored once
    config = small_config(2, dp_replicate=2, out_dir=f"{folder}/copies")
    mesh = mesh_over_world(config, CPU)
    model, optimizer, _ = start(config, mesh)
    train(config, mesh, model, optimizer, range(1))
    saver_of(config, mesh, model, optimizer).save(1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_same_mesh_and_one_bad_rank(tmp_path):
    run_ranks(two_ranks, 2, str(tmp_path))
    stored = [path.stat().st_size for path in tmp_path.glob("copies/checkpoints/step_000001/*.distcp")]
    numbers = sum(shape.numel() for shape in real_shapes(small_config()).values())
    assert 3 * 4 * numbers < sum(stored) < 3 * 4 * numbers * 1.25 and min(stored) > 0.3 * max(stored)


def test_pytorch_opens_it(tmp_path):
    """Its own converter finds the parameters, real rows only, under their names."""
    config = small_config(out_dir=str(tmp_path / "run"))
    model, optimizer, _ = start(config, Mesh(CPU))
    train(config, Mesh(CPU), model, optimizer, range(1))
    saver_of(config, Mesh(CPU), model, optimizer).save(1)
    dcp_to_torch_save(checkpoint.find(tmp_path / "run"), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    shapes = real_shapes(config)
    assert whole.keys() == {f"model.{n}" for n in shapes} | {
        f"optimizer.{n}.{key}" for n in shapes for key in ("exp_avg", "exp_avg_sq")}
    names = [name for name, _ in build_model(small_config(compile=True), Mesh(CPU)).named_parameters()]
    assert names == list(shapes)  # compiled and eager exchange checkpoints: everything goes by these names
    for name, p in model.named_parameters():
        assert torch.equal(whole[f"model.{name}"], p[tuple(map(slice, shapes[name]))])
        assert whole[f"optimizer.{name}.exp_avg"].shape == shapes[name]


# ---------------------------------------------------------------------------------------------------------------------
# folders


@pytest.fixture
def run(tmp_path):
    """A run of one process that saved steps 1, 2, 3: its folder, its saver, and `again(**keys)`: where it goes on."""
    keys = {"out_dir": str(tmp_path / "run"), "resume": True, "n_layer": 1, "keep_checkpoints": 3}
    config = small_config(**keys)
    model, optimizer, _ = start(config, Mesh(CPU))
    saver = saver_of(config, Mesh(CPU), model, optimizer)
    for step in range(3):
        train(config, Mesh(CPU), model, optimizer, range(step, step + 1))
        saver.save(step + 1, val_loss=[3.0, 2.0, 2.5][step])

    def again(data=DATA, **other):
        found = checkpoint.choose(small_config(**(keys | other)), Mesh(CPU), data)
        return found and found[1]["step"]
    return SimpleNamespace(folder=tmp_path / "run/checkpoints", saver=saver, again=again)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


DAMAGE = {
    "bit": (lambda folder: flip(folder / "__0_0.distcp"), r"__0_0\.distcp is damaged"),
    "cut": (lambda folder: os.truncate(folder / "__0_0.distcp", 1000), r"__0_0\.distcp has 1000 bytes of"),
    "missing": (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0\.distcp: No such file"),
    "index": (lambda folder: flip(folder / ".metadata"), r"\.metadata is damaged"),
    "json": (lambda folder: (folder / "run.json").write_text("{"), r"run\.json is missing, damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_taken(run, damage, capsys):
    harm, message = DAMAGE[damage]
    harm(run.folder / "step_000003")
    assert run.again() == 2
    out = capsys.readouterr().out
    assert re.search(message, out) and "trying the one before" in out
    assert (run.folder / "latest").read_text() == "step_000002\n"
    with pytest.raises(UserError, match=r"no checkpoint .* is whole at step 3"):
        run.again(resume_step=3)
    for step in (1, 2):
        harm(run.folder / f"step_{step:06d}")
    with pytest.raises(UserError, match=r"no checkpoint .* is whole: restore one"):
        run.again()


def test_another_run_is_refused(run):
    assert run.again() == 3 and run.again(tp=1, micro_batch_size=8, log_interval=5) == 3
    for keys, text in (({"learning_rate": 0.1}, "learning_rate = 0.002; this run has learning_rate = 0.1"),
                       ({"total_batch_size": 512}, "total_batch_size = 256"), ({"seed": 1}, "seed = 1337"),
                       ({"max_steps": 20}, "decay_steps = 10; this run has decay_steps = 20"),
                       ({"data": {"shards": 1, "tokens": 1001}}, "data_dir's tokens = 1000")):
        with pytest.raises(UserError, match=r"resume: .*step_000003 was made with .*" + text + ".*resume_override"):
            run.again(**keys)
        assert run.again(**keys, resume_override=True) == 3
    for keys in ({"n_layer": 2}, {"n_embd": 96}, {"block_size": 64}, {"vocab_size": 900}):
        with pytest.raises(UserError, match="choose another out_dir"):
            run.again(**keys, resume_override=True)
    with pytest.raises(UserError, match=r"resume_step = 7: .* has no such checkpoint, but 1, 2, 3"):
        run.again(resume_step=7)


def test_a_checkpoint_of_another_model_does_not_load(run):
    config = small_config(n_layer=2)
    with pytest.raises(UserError, match=r"model\.h\.1\.\S+ is missing there"):
        checkpoint.load(run.folder / "step_000003", config, Mesh(CPU), build_model(config, Mesh(CPU)))


def test_going_back_and_cleaning_up(run):
    assert run.again(resume_step=1) == 1
    assert run.again() == 1  # latest has moved back: the steps beyond belong to the time before
    for name in ("step_000009.partial", "step_000001.deleted"):  # left by a killed run
        (run.folder / name).mkdir()
        (run.folder / name / "__0_0.distcp").write_bytes(b"half")
    (run.folder / "step_000003/run.json").unlink()  # not a state that this project leaves; not a trap either
    assert run.again() == 1
    assert names(run.folder) == ["best", "latest", "step_000001", "step_000002", "step_000003"]
    run.saver.save(2, val_loss=9.0)  # the run comes by again: what `best` pointed to is replaced
    assert run.again() == 2 and (run.folder / "best").read_text() == "step_000001\n"


def test_pruning_keeps_newest_best_and_milestones(run):
    run.saver.config = small_config(**(vars(run.saver.config) | {"keep_checkpoints": 2, "milestone_interval": 5}))
    assert (run.folder / "best").read_text() == "step_000002\n"
    for step in range(4, 9):
        run.saver.save(step)
        assert (run.folder / "latest").read_text() == f"step_{step:06d}\n"
    assert names(run.folder) == ["best", "latest", *(f"step_{s:06d}" for s in (2, 5, 7, 8))]
    assert checkpoint.find(run.folder / "best") == run.folder / "step_000002"
    assert checkpoint.find(run.folder.parent) == checkpoint.find(run.folder / "latest") == run.folder / "step_000008"
    with pytest.raises(UserError, match="is no checkpoint"):
        checkpoint.find(run.folder.parent.parent)


@pytest.mark.parametrize("on_save_error", ["continue", "stop"])
def test_a_full_disk_fails_the_save_only(run, on_save_error, capsys):
    """A limit on the size of files, so that a write ends in the middle of one."""
    run.saver.config.on_save_error = on_save_error
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        if on_save_error == "stop":
            with pytest.raises(SaveFailed, match=r"checkpoint of step 4 not saved: .*newest is of step 3"):
                run.saver.save(4)
        else:
            run.saver.save(4)
            assert "checkpoint of step 4 not saved: [Errno 27] File too large" in capsys.readouterr().out
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(run.folder) == ["best", "latest", *(f"step_{s:06d}" for s in (1, 2, 3))]
    assert run.again() == 3
    run.saver.save(4)
    assert run.again() == 4


def test_a_file_in_place_of_the_folder(tmp_path, capsys):
    config = small_config(n_layer=1, out_dir=str(tmp_path))
    model, optimizer, _ = start(config, Mesh(CPU))
    train(config, Mesh(CPU), model, optimizer, range(1))
    (tmp_path / "checkpoints").write_text("")
    saver_of(config, Mesh(CPU), model, optimizer).save(1)
    assert "checkpoint of step 1 not saved: [Errno 20] Not a directory" in capsys.readouterr().out


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("call", [(os.mkdir, ("owned",)), (eval, ("open('owned', 'w')",)),
                                  (torch.load, ("owned",)), (getattr, ("owned", "upper"))])
def test_a_strangers_checkpoint_runs_no_code(run, call, tmp_path, monkeypatch):
    """A `.metadata` that calls, in a checkpoint whose checksums are all right."""
    monkeypatch.chdir(tmp_path)
    folder = run.folder / "step_000003"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(*call)))
    meta = json.loads((folder / "run.json").read_text())
    meta["files"][".metadata"] = [(folder / ".metadata").stat().st_size, checkpoint._sha256(folder / ".metadata")]
    (folder / "run.json").write_text(json.dumps(meta))
    config = small_config(n_layer=1)
    model = build_model(config, Mesh(CPU))
    checkpoint.verify(folder, Mesh(CPU))
    with pytest.raises(UserError, match=r"step_000003: \.metadata asks for [\w.]+, which no checkpoint needs"):
        checkpoint.load(folder, config, Mesh(CPU), model)
    assert not (tmp_path / "owned").exists()


def test_training_goes_on_with_a_full_disk(tmp_path):
    """Not one file may grow beyond 6,000 bytes: no checkpoint, no plot, not all rows. The end must not pass for one."""
    np.save(tmp_path / "train_000000.npy", (np.arange(5000) * 7 % 997).astype(np.uint16))
    words = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--vocab_size=1000", "--eval_interval=0",
             "--total_batch_size=64", "--micro_batch_size=4", "--max_steps=30", "--sample_interval=0",
             "--checkpoint_interval=10", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, ROOT / "train_gpt2_tp.py", *words], capture_output=True, text=True,
                          timeout=120, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: checkpoint of step 30 not saved: [Errno 27] File too large\n")
    assert "checkpoint of step 20 not saved" in done.stdout and "step 30/30 | loss" in done.stdout
    assert "metrics.jsonl: File too large; rows wait for room" in done.stdout
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_torchrun_restarts_a_lost_rank(tmp_path):
    """`--max-restarts` and `resume = true`: one worker is killed, the run goes on from its checkpoint to the end."""
    np.save(tmp_path / "train_000000.npy", (np.arange(5000) * 7 % 997).astype(np.uint16))
    words = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--vocab_size=1000", "--eval_interval=0",
             "--total_batch_size=64", "--micro_batch_size=4", "--max_steps=60", "--sample_interval=0", "--tp=2",
             "--checkpoint_interval=10", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}", "--resume=true"]
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                                "--max-restarts=1", ROOT / "train_gpt2_tp.py", *words],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not (tmp_path / "run/checkpoints/latest").exists():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, out
    steps = [json.loads(line).get("step") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step] == list(range(1, 61))
    assert re.search(r"run     \S+, steps [1-5]0 to 60", out)


def test_killed_at_random_and_resumed():
    """The short form of `make soak`: two ranks, killed three times."""
    done = subprocess.run([sys.executable, ROOT / "tests/soak.py", "--kills=3"], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
