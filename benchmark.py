"""Does tensor parallelism pay on this box? One command, one table.

    python benchmark.py configs/bench_cpu.toml                                 # the table, a picture, the figures
    python benchmark.py configs/bench_cpu.toml --profile=true --row="TP + SP"  # one step of one row, by operator
    python benchmark.py --plan configs/gpt2_1558m.toml --gpus 8 --gpu h100     # will it fit, will it pay (plan.py)

A config is the trainer's, with a list of `[[rows]]`: a name, and keys in which the row differs. A row's processes are
the product of its degrees. Every row runs in processes of its own (`measure.py`), all of a machine's cores shared among
them; rounds go through the rows forwards and backwards in turn, so that drift of the machine hits all alike.

Exposed communication is 1 − (a step's time with collectives that return at once, each rank computing on its own data)
/ (a step's time): what communication costs after all overlap. Both are medians, measured in the same rounds.
"""

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import typing
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

import config as configuration
from config import Config, UserError, cores

ROOT = Path(__file__).resolve().parent


@dataclass
class Bench(Config):
    """Compare meshes on this box, or plan for another. The keys of the trainer's Config, and these."""

    rounds: int = 3
    """Times that all rows are run."""
    steps: int = 5
    """Timed steps of a row in a round."""
    untimed_steps: int = 2
    """Steps before those that are timed."""
    timeout: int = 1800
    """Seconds after which a row's processes are given up."""
    row: str = ""
    """Run this row only."""
    profile: bool = False
    """Instead of the table: a Chrome trace and a summary by operator of one step of `row` (or the first)."""
    memory: bool = False
    """Instead of the table: a snapshot of the CUDA allocator over one step of `row` (or the first)."""
    plan: str = ""
    """Instead of the table: a trainer's config to estimate memory and speed for, on `gpus` of the kind `gpu`."""
    gpus: int = 8
    """GPUs to plan for."""
    gpu: str = "h100"
    """Their kind: --plan with a wrong one lists those known."""
    rows: list = field(default_factory=list)
    """[[rows]] of a TOML file: `name`, and the trainer's keys in which the row differs."""


@dataclass
class Row:
    """One line of the table: what is run, and what came of it."""

    name: str
    config: Config
    ranks: int
    seconds: list[float] = field(default_factory=list)  # of each timed step, all rounds
    silent: list[float] = field(default_factory=list)  # the same without communication
    memory: int = 0  # peak bytes of the largest rank
    collectives: dict[str, list[int]] = field(default_factory=dict)  # kind → [count, bytes] of a step
    peak_flops: float = 0.0  # of all its devices
    device: str = ""
    error: str = ""

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "_", self.name.lower()).strip("_")

    @property
    def speed(self) -> float:
        """Tokens a second: the median step's."""
        return self.config.total_batch_size / statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range of the steps' times, as a share of their median."""
        if len(self.seconds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def exposed(self) -> float | None:
        """Share of a step spent waiting for communication; None where there is nothing to compare with."""
        if self.ranks == 1 or not self.silent:
            return None
        return 1 - statistics.median(self.silent) / statistics.median(self.seconds)


def read_rows(b: Bench) -> list[Row]:
    """The rows of a config, each with its mesh resolved.

    Raises:
        UserError: no rows, a name twice or missing, a wrong key or value, values that do not go together.
    """
    if not b.rows:
        raise UserError("no [[rows]] to compare: configs/bench_cpu.toml has examples")
    shared = {f.name: getattr(b, f.name) for f in fields(Config)} | {"dp_replicate": 1}
    types = typing.get_type_hints(Config) | {"name": str}
    rows = []
    for number, table in enumerate(b.rows, 1):
        if not isinstance(table, dict) or not table.get("name"):
            raise UserError(f"row {number} of [[rows]] has no name: write name = \"…\"")
        name, where = str(table["name"]), f"row {table['name']!r}"
        keys = configuration.typed(where, table, types)
        del keys["name"]
        c = Config(**(shared | keys))
        ranks = abs(c.tp * c.dp)
        try:
            configuration.check(c, ranks)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        rows.append(Row(name, c, ranks))
        if rows[-1].slug in [row.slug for row in rows[:-1]]:
            raise UserError(f"{where}: another row is called so (only letters and digits count): choose another name")
    names = [row.name for row in rows]
    if b.row and b.row not in names:
        raise UserError(f"--row = {b.row!r}: the rows are {', '.join(names)}")
    return [row for row in rows if b.row in ("", row.name)]


def launch(row: Row, b: Bench, **options) -> dict | None:
    """Run `measure.py` under the row's mesh and return what it found; None if it failed, the reason in `row.error`."""
    folder = Path(b.out_dir) / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    toml, log, result = (folder / f"{row.slug}.{end}" for end in ("toml", "log", "json"))
    toml.write_text(configuration.dump(row.config))
    result.unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"] * (row.ranks > 1)
    command = [sys.executable, *torchrun, "measure.py", str(toml.resolve()), f"--result={result.resolve()}",
               *(f"--{key}={value}" for key, value in options.items())]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
                                   env=os.environ | {"OMP_NUM_THREADS": str(max(1, cores() // row.ranks))})
        try:
            process.wait(b.timeout)
        except subprocess.TimeoutExpired:
            row.error = f"no end after timeout = {b.timeout} s"
        finally:  # Ctrl-C comes here too
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
    if process.returncode == 0 and result.exists():
        return json.loads(result.read_text())
    row.error = row.error or reason(log.read_text(errors="replace"), process.returncode)
    return None


def reason(log: str, code: int) -> str:
    """Why a process failed, in one line, from what it printed."""
    for pattern in (r"^error: (.*)", r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)"):
        if found := re.findall(pattern, log, re.MULTILINE):
            return found[0 if "error:" in pattern else -1].strip()
    if code == -signal.SIGKILL or "Signal 9" in log:
        return "killed by the system (SIGKILL), which it does when memory runs out"
    return f"exit code {code}"


def run_rounds(rows: list[Row], b: Bench) -> None:
    """Run every row `rounds` times, with and without communication, and note the results in the rows."""
    runs = b.rounds * sum(1 + (row.ranks > 1) for row in rows)
    begin, done = time.monotonic(), 0
    for n in range(b.rounds):
        for row in rows if n % 2 == 0 else reversed(rows):
            for communicate in (True, False) if row.ranks > 1 else (True,):
                done += 1
                if row.error:
                    continue
                what = "" if communicate else ", without communication"
                print(f"[{done}/{runs}] round {n + 1}, {row.name}{what}: ", end="", flush=True)
                found = launch(row, b, steps=b.steps, untimed_steps=b.untimed_steps,
                               communicate=str(communicate).lower())
                left = (time.monotonic() - begin) / done * (runs - done)
                if found is None:
                    print(f"failed: {row.error}", flush=True)
                    continue
                speed = row.config.total_batch_size / statistics.median(found["seconds"])
                print(f"{speed:,.0f} tok/s (about {math.ceil(left / 60)} min left)", flush=True)
                if not communicate:
                    row.silent += found["seconds"]
                    continue
                row.seconds += found["seconds"]
                row.memory, row.collectives = max(row.memory, found["memory"]), found["collectives"]
                row.peak_flops, row.device = max(row.peak_flops, found["peak_flops"]), found["device"]


def tabulate(rows: list[Row]) -> list[dict]:
    """The figures of each row, by column; rows that never came to an end have no figures, those that failed an `error`.

    MFU is of the box's GEMM rate on a CPU (the best that any row saw, all cores together), on GPUs of the data sheet's.
    """
    from metrics import flops_per_token  # after the errors of the command line, for which nobody waits for torch

    on_cpu = any(row.device == "CPU" for row in rows)
    # more ranks than cores time their GEMMs in turns, and would count a core twice
    box = max((row.peak_flops for row in rows if row.ranks <= cores()), default=0.0)
    first = rows[0].speed if rows[0].seconds else None
    table = []
    for row in rows:
        line = {"name": row.name, "ranks": row.ranks, "error": row.error}
        if row.seconds:
            line |= {"tokens_per_s": row.speed, "spread": row.spread, "tokens_per_s_device": row.speed / row.ranks,
                     "mfu": row.speed * flops_per_token(row.config) / (box if on_cpu else row.peak_flops),
                     "memory": row.memory, "ratio": row.speed / first if first else None,
                     "collectives": sum(count for count, _ in row.collectives.values()),
                     "bytes": sum(size for _, size in row.collectives.values()), "exposed": row.exposed,
                     "by_kind": row.collectives, "seconds": row.seconds, "seconds_without_communication": row.silent}
        table.append(line)
    return table


def markdown(table: list[dict]) -> str:
    """The table as people read it, padded for consoles, and why rows failed below it."""
    def optional(value, text: str) -> str:
        return "–" if value is None else text.format(value)
    head = ["row", "ranks", "tok/s", "spread", "tok/s a device", "MFU", "GiB a rank", "× first", "collectives",
            "MB a step", "exposed"]
    lines = [head]
    for line in table:
        if "tokens_per_s" not in line:
            state = "failed" if line["error"] else "not run"
            lines.append([line["name"], str(line["ranks"]), state] + ["–"] * (len(head) - 3))
            continue
        lines.append([
            line["name"], str(line["ranks"]), f"{line['tokens_per_s']:,.0f}", f"± {line['spread']:.1%}",
            f"{line['tokens_per_s_device']:,.0f}", f"{line['mfu']:.1%}", f"{line['memory'] / 2**30:.2f}",
            optional(line["ratio"], "{:.2f}"), str(line["collectives"]), f"{line['bytes'] / 1e6:,.1f}",
            optional(line["exposed"], "{:.0%}")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)])
    text = "".join("| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(
        zip(cells, widths, strict=True))) + " |\n" for cells in lines)
    failed = [f"- {line['name']} failed: {line['error']}\n" for line in table if line["error"]]
    return text + "\n" * bool(failed) + "".join(failed)


def report(rows: list[Row], b: Bench) -> list[dict]:
    """Print the table and write benchmark.md, .json and .png into out_dir; returns the table."""
    import torch

    from metrics import commit, parameters

    table, c = tabulate(rows), rows[0].config
    device = next(row.device for row in rows if row.device)
    about = (f"GPT-2 of {parameters(c) / 1e6:.1f}M parameters, context {c.block_size}, {c.total_batch_size:,} tokens a "
             f"step, {c.dtype}; {device}, {cores()} cores; torch {torch.__version__}, commit {commit()}, "
             f"{datetime.now():%Y-%m-%d}")
    notes = (f"Median and spread (half the interquartile range) of {b.steps} steps in each of {b.rounds} rounds over "
             "all rows. Collectives: number and payload of a step on a rank. Exposed: 1 − step time with collectives "
             "that return at once / step time. MFU: of " + (
                 f"{max(row.peak_flops for row in rows if row.ranks <= cores()) / 1e9:,.0f} GFLOP/s, the "
                 "best GEMM seen on all cores."
                 if device == "CPU" else "the data sheet's dense peak."))
    text = markdown(table)
    print(f"\n{about}\n\n{text}", flush=True)
    out = Path(b.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmark.md").write_text(f"{about}\n\n{text}\n{notes}\n")
    (out / "benchmark.json").write_text(json.dumps({"about": about, "config": vars(c), "rows": table}, indent=1))
    plot([line for line in table if "tokens_per_s" in line], out / "benchmark.png", about)
    print(f"written {out}/benchmark.md, benchmark.json, benchmark.png", flush=True)
    return table


def plot(lines: list[dict], path: Path, title: str) -> None:
    """Bars: tokens a second, with their spread. Dots: memory a rank."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, speeds = [line["name"] for line in lines], [line["tokens_per_s"] for line in lines]
    figure, left = plt.subplots(figsize=(1.5 + 1.1 * max(4, len(lines)), 4.5), dpi=120)
    left.bar(names, speeds, yerr=[line["spread"] * line["tokens_per_s"] for line in lines], color="tab:blue", alpha=0.8)
    left.set_ylabel("tokens a second (bars)")
    right = left.twinx()
    right.plot(names, [line["memory"] / 2**30 for line in lines], "o", color="tab:orange")
    right.set_ylabel("GiB a rank at the peak (dots)")
    right.set_ylim(bottom=0)
    left.tick_params(axis="x", labelrotation=30)
    left.set_title(title.split(";")[0], fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def log_to_wandb(rows: list[Row], table: list[dict], b: Bench) -> None:
    """One run a row, all in one group, and a summary run with the table and the picture."""
    import wandb

    from metrics import start_wandb

    out = Path(b.out_dir)
    os.environ["WANDB_RUN_GROUP"] = f"{out.name} {datetime.now():%Y-%m-%d %H:%M:%S}"
    plain = [{k: v for k, v in line.items() if not isinstance(v, (list, dict))} for line in table]
    for row, line in zip(rows, plain, strict=True):
        row.config.out_dir, row.config.wandb_run_name = b.out_dir, row.name
        if run := start_wandb(row.config, None):
            run.row({"kind": "benchmark"} | line)
            run.finish(out / "none.png", int(bool(row.error)))
    summary = Config(out_dir=b.out_dir, wandb_project=b.wandb_project, wandb_run_name="summary")
    if run := start_wandb(summary, None):
        columns = list(max(plain, key=len))
        run.run.log({"rows": wandb.Table(columns, [[line.get(k) for k in columns] for line in plain]),
                     "benchmark": wandb.Image(str(out / "benchmark.png"))})
        run.finish(out / "none.png", 0)


def one_step(row: Row, b: Bench) -> None:
    """Profile, or snapshot the memory of, one step of a row."""
    out = Path(b.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    options = {key: out.resolve() for key in ("profile", "memory") if getattr(b, key)}
    if launch(row, b, steps=1, untimed_steps=b.untimed_steps, **options) is None:
        raise UserError(f"row {row.name!r}: {row.error} ({out}/rows/{row.slug}.log)")
    if b.profile:
        print((out / "operators.txt").read_text())
        print(f"written {out}/trace.json (ui.perfetto.dev shows it), operators.txt: rank 0 of {row.name}")
    if b.memory:
        print(f"written {out}/memory.pickle (pytorch.org/memory_viz shows it): rank 0 of {row.name}")


def main(argv: list[str]) -> None:
    b = configuration.parse(Bench, argv, toml=True)
    for name in ("rounds", "steps", "untimed_steps", "timeout", "gpus"):
        if getattr(b, name) < 1:
            raise UserError(f"{name} = {getattr(b, name)}: it must be at least 1")
    if b.plan:
        import plan

        return plan.main(b.plan, configuration.parse(Bench, [b.plan, *argv], toml=True), b.gpus, b.gpu)
    rows = read_rows(b)
    if b.profile or b.memory:
        return one_step(rows[0], b)
    try:
        run_rounds(rows, b)
    except KeyboardInterrupt:
        print("interrupted: what is done is kept", flush=True)
    if not any(row.seconds for row in rows):
        raise UserError(f"no row ran to its end; the first: {rows[0].error or 'interrupted'} ({b.out_dir}/rows/*.log)")
    table = report(rows, b)
    if b.wandb:
        log_to_wandb(rows, table, b)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the row's processes too
    configuration.run(main)
