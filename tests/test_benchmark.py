"""benchmark.py and plan.py: estimates against what is measured, the table's making, and every mistake. No timings."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from simulated import simulate
from torch.profiler import ProfilerActivity, profile

import benchmark
import config as configuration
import measure
import plan
from config import Config, UserError, check
from mesh import Collectives, Mesh, mesh_over_world
from metrics import flops_per_token, parameters
from parallel import build_model, local, make_optimizer
from train_gpt2_tp import train_step

CPU = torch.device("cpu")
SIZES = {  # of activations, and of parameters and gradients; padded heads in one, accumulation in the other
    "deep": {"n_layer": 4, "n_head": 3, "n_embd": 192, "block_size": 128, "vocab_size": 2000, "micro_batch_size": 2,
             "total_batch_size": 8 * 128},
    "wide": {"n_layer": 2, "n_head": 4, "n_embd": 256, "block_size": 64, "vocab_size": 6000, "micro_batch_size": 2,
             "total_batch_size": 8 * 64, "dtype": "float32"},
}
MESHES = {  # by ranks
    1: [{}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "block"}],
    2: [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"dp_replicate": 2}, {"dp_shard": 2},
        {"tp": 2, "activation_checkpointing": "selective"}, {"tp": 2, "activation_checkpointing": "block"},
        {"tp": 2, "sequence_parallel": False, "activation_checkpointing": "selective"},
        {"tp": 2, "sequence_parallel": False, "activation_checkpointing": "block"},
        {"dp_shard": 2, "accumulate_sharded": False}, {"dp_shard": 2, "reshard_after_forward": False}],
    4: [{"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}],
}


def small(world_size: int, size: str, keys: dict) -> Config:
    c = Config(**(SIZES[size] | keys), eval_interval=0)
    check(c, world_size)
    return c


def one_step(c: Config) -> tuple[int, dict, dict]:
    """Peak bytes of a step, by the CPU allocator's own records; counts and bytes of its collectives, by kind."""
    mesh = mesh_over_world(c, CPU) if c.tp * c.dp > 1 else Mesh(CPU)
    model = build_model(c, mesh)
    optimizer = make_optimizer(model, c)
    tokens = torch.randint(c.vocab_size, (c.sequences // mesh.dp, c.block_size + 1))
    with Collectives() as counted:
        train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], 0, c, mesh)
    state = [t for s in optimizer.state.values() for t in s.values()]
    alive = sum(local(t).numel() * t.element_size() for t in [*model.parameters(), *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], 1, c, mesh)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = now = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return alive + peak, dict(counted.counts), dict(counted.bytes)


def all_steps(world_size: int) -> dict:
    return {(size, i): one_step(small(world_size, size, keys)) for size in SIZES
            for i, keys in enumerate(MESHES[world_size]) if size == "deep" or "activation_checkpointing" not in keys}


@pytest.mark.parametrize("world_size", MESHES)
def test_estimates_are_what_a_rank_needs_and_sends(world_size):
    for (size, i), (peak, counts, sizes) in simulate(all_steps, world_size, world_size).items():
        c = small(world_size, size, MESHES[world_size][i])
        assert plan.memory(c, "cpu")["peak"] == pytest.approx(peak, rel=0.1), (size, MESHES[world_size][i])
        found = plan.traffic(c).values()
        sent = sum(counts.values()), sum(sizes.values())
        assert (sum(n for n, _, _ in found), sum(n for _, n, _ in found)) == sent, (size, i)


def test_states_are_sixteen_bytes_a_parameter():
    c = configuration.parse(Config, [str(ROOT / "configs/gpt2_124m.toml")], toml=True)
    check(c, 1)
    found, padding = plan.memory(c), (50304 - 50257) * 768
    assert sum(found[k] for k in ("parameters", "gradients", "optimizer")) == 16 * (parameters(c) + padding)
    sharded = plan.memory(replace(c, dp_shard=8, micro_batch_size=4))
    assert sharded["optimizer"] == parameters(c) + padding


def test_plan_recommends_a_mesh_that_fits_and_its_command_is_valid(capsys):
    path = str(ROOT / "configs/gpt2_1558m.toml")
    benchmark.main(["--plan", path, "--gpus", "8", "--gpu", "rtx4090"])
    shown = capsys.readouterr().out
    words = shown.splitlines()[-1].split()
    assert words[:3] == ["torchrun", "--standalone", "--nproc-per-node=8"]
    c = configuration.parse(Config, words[4:], toml=True)
    check(c, 8)
    assert plan.memory(c)["peak"] <= 0.9 * 24 * 2**30 - 1.5 * 2**30
    assert "1 × 1 × 8" in shown and "no" in next(row for row in shown.splitlines() if "1 × 1 × 8" in row).split()
    with pytest.raises(UserError, match=r"micro_batch_size = 64 fits on no mesh of 2 × rtx4090: lower it"):
        benchmark.main(["--plan", path, "--gpus=2", "--gpu=rtx4090", "--micro_batch_size=64"])


TINY = '''out_dir = "{out}"
n_layer = 1
n_head = 2
n_embd = 16
block_size = 16
vocab_size = 300
total_batch_size = 64
micro_batch_size = 2
rounds = 1
steps = 2
untimed_steps = 1
wandb = true
[[rows]]
name = "single"
[[rows]]
name = "too wide"
n_embd = 2097152
[[rows]]
name = "TP 2"
tp = 2
'''


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(out=tmp_path / "out"))
    return path


def test_a_benchmark_from_end_to_end(tiny, tmp_path, capsys):
    benchmark.main([str(tiny)])
    out = tmp_path / "out"
    text, figures = (out / "benchmark.md").read_text(), json.loads((out / "benchmark.json").read_text())
    single, wide, tp = figures["rows"]
    assert "out of memory at a peak of" in wide["error"] and "| too wide |     1 | failed |" in text
    assert len(tp["seconds"]) == len(tp["seconds_without_communication"]) == 2 and single["exposed"] is None
    # 2 micro-batches of a block with sequence parallelism: 5 + 5 and the embedding's 2, 2 for the loss; 2 for the step
    assert (single["collectives"], tp["collectives"]) == (0, 2 * 14 + 2)
    assert tp["ratio"] == pytest.approx(tp["tokens_per_s"] / single["tokens_per_s"]) and tp["memory"] > 0
    assert (out / "benchmark.png").stat().st_size > 5000
    assert len(list(out.glob("wandb/offline-run-*"))) == 4  # a run a row, and the summary
    shown = capsys.readouterr().out
    assert "[4/4] round 1, TP 2, without communication: " in shown and text.split("\n\n")[1] in shown


def test_the_table_by_hand():
    c = Config(n_layer=1, n_head=2, n_embd=16, block_size=16, total_batch_size=600, vocab_size=300)
    common = {"config": c, "peak_flops": 1e9, "device": "CPU"}
    rows = [benchmark.Row("one", ranks=1, seconds=[2.0, 1.0, 3.0], memory=2**30, **common),
            benchmark.Row("two", ranks=2, seconds=[0.5, 0.5], silent=[0.4, 0.4], memory=2**29,
                          collectives={"all-reduce": [3, 1_000_000], "broadcast": [1, 500_000]}, **common),
            benchmark.Row("three", ranks=2, error="no room", config=c), benchmark.Row("four", ranks=2, config=c)]
    rows[1].peak_flops = 2e9  # the better look at the same box counts for both
    table = benchmark.tabulate(rows)
    assert [line.get("tokens_per_s") for line in table] == [300, 1200, None, None]
    assert table[0]["spread"] == pytest.approx(0.25) and table[1]["tokens_per_s_device"] == 600
    assert table[0]["mfu"] == pytest.approx(300 * flops_per_token(c) / 2e9)
    assert (table[1]["ratio"], table[1]["collectives"], table[1]["bytes"]) == (4, 4, 1_500_000)
    assert table[1]["exposed"] == pytest.approx(0.2)
    lines = benchmark.markdown(table).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]][5:] == [
        f"{1200 * flops_per_token(c) / 2e9:.1%}", "0.50", "4.00", "4", "1.5", "20%"]
    assert len({len(line) for line in lines[:6]}) == 1 and "not run" in lines[5]
    assert lines[-1] == "- three failed: no room"


def test_interruption_keeps_what_is_done(tiny, tmp_path, monkeypatch):
    calls = []

    def launch(row, b, **options):
        calls.append(row.name)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return {"seconds": [1.0], "memory": 1, "collectives": {}, "peak_flops": 1e9, "device": "CPU"}
    monkeypatch.setattr(benchmark, "launch", launch)
    benchmark.main([str(tiny), "--wandb=false"])
    rows = json.loads((tmp_path / "out/benchmark.json").read_text())["rows"]
    assert [row.get("tokens_per_s") for row in rows] == [64, None, None]


def test_rounds_go_forwards_and_backwards(tiny, monkeypatch):
    order = []

    def launch(row, b, communicate, **options):
        order.append((row.name, communicate))
        return {"seconds": [1.0], "memory": 1, "collectives": {}, "peak_flops": 1e9, "device": "CPU"}
    monkeypatch.setattr(benchmark, "launch", launch)
    benchmark.main([str(tiny), "--wandb=false", "--rounds=2"])
    once = [("single", "true"), ("too wide", "true"), ("TP 2", "true"), ("TP 2", "false")]
    assert order == [*once, once[2], once[3], once[1], once[0]]


def test_why_a_row_failed():
    assert benchmark.reason("noise\nerror: out of memory\ntorch…ChildFailedError: x", 1) == "out of memory"
    assert benchmark.reason('  File "a.py"\n[rank0]: ValueError: no\n', 1) == "ValueError: no"
    assert "SIGKILL" in benchmark.reason("traceback : Signal 9 (SIGKILL) received by PID 7", 1)
    assert benchmark.reason("", 3) == "exit code 3"


def test_a_profile_of_one_step(tmp_path):
    words = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--vocab_size=300", "--total_batch_size=64",
             "--micro_batch_size=2", "--steps=1", "--untimed_steps=1", f"--result={tmp_path / 'result.json'}"]
    measure.main([*words, f"--profile={tmp_path}"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"aten::addmm", "aten::_fused_adamw_"} <= {event["name"] for event in events}
    assert "aten::_scaled_dot_product" in (tmp_path / "operators.txt").read_text()
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="memory = true on a machine without CUDA"):
            measure.main([*words, f"--memory={tmp_path}"])
    assert math.isfinite(json.loads((tmp_path / "result.json").read_text())["seconds"][0])


MISTAKES = {
    "no rows": ("rounds = 1\n", [], r"no \[\[rows\]\] to compare"),
    "rows of another type": ("rows = 3\n", [], r"rows = 3: it must be a list of tables"),
    "a row of another type": ("rows = [3]\n", [], r"row 1 of \[\[rows\]\] has no name"),
    "no name": ("[[rows]]\ntp = 2\n", [], r"row 1 of \[\[rows\]\] has no name"),
    "name of another type": ("[[rows]]\nname = 3\n", [], "row 3: name = 3: it must be a string"),
    "same name": ('[[rows]]\nname = "a b"\n[[rows]]\nname = "A + b"\n', [], r"row 'A \+ b': another row is called so"),
    "key of a row": ('[[rows]]\nname = "a"\ntpp = 2\n', [], "row 'a': unknown key tpp: did you mean tp"),
    "value of a row": ('[[rows]]\nname = "a"\ntp = 2.0\n', [], r"row 'a': tp = 2.0: it must be a whole number"),
    "mesh of a row": ('[[rows]]\nname = "a"\ntp = 0\n', [], "row 'a': tp = 0, "),
    "batch of a row": ('[[rows]]\nname = "a"\nmicro_batch_size = 7\n', [], "row 'a': total_batch_size = 524288 is"),
    "row": ('[[rows]]\nname = "a"\n', ["--row=b"], "--row = 'b': the rows are a"),
    "rows on the command line": ('[[rows]]\nname = "a"\n', ["--rows=b"], "--rows: did you mean --row"),
    "rounds": ('[[rows]]\nname = "a"\n', ["--rounds=0"], "rounds = 0: it must be at least 1"),
    "gpu": ("", ["--plan=configs/gpt2_124m.toml", "--gpu=h101"], "--gpu = 'h101': it must be one of b200"),
    "gpus": ("", ["--plan=configs/gpt2_124m.toml", "--gpus=3"], "--gpus = 3: no mesh serves; tp 1"),
    "plan": ("", ["--plan=nothing.toml"], "config file nothing.toml: No such file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text, words, message = MISTAKES[mistake]
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        benchmark.main([*([str(path)] if text else []), *words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("bench_*.toml")), ids=lambda path: path.stem)
def test_every_benchmark_of_ours_is_valid(path):
    rows = benchmark.read_rows(configuration.parse(benchmark.Bench, [str(path)], toml=True))
    assert rows[0].ranks == 1 and {row.config.compile for row in rows} == {True, False}
    assert {row.config.sequence_parallel for row in rows if row.config.tp > 1} == {True, False}
