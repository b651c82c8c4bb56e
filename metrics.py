"""Loss, speed, MFU and memory → console, metrics.jsonl, W&B and loss.png.

A step leaves its loss and norm on the device; they are read, and rows written, only at a log line, so that between
lines nothing waits for the device. Every rank calls every method (means are taken over ranks); only rank 0 writes.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from config import Config, Failure
from mesh import Collectives, Mesh, peak_memory
from model import Sizes, real_shapes

# Dense bf16 TFLOP/s with fp32 accumulation, from the makers' data sheets. The first that the device's name contains.
GPU_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362,
              "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71}
WANDB_SECONDS = 12  # W&B may hold up the run this long at its start and its end, no longer


class Diverged(Failure):
    """The loss or the gradient norm is no longer finite."""


def parameters(config: Config) -> int:
    """Parameters of the model, tied table once, padding not counted."""
    return sum(shape.numel() for shape in real_shapes(config).values())


def flops_per_token(config: Config) -> int:
    """Forward and backward, nanoGPT's count (PaLM, appendix B): 6 a parameter without `wpe`, 12·L·C·T for attention."""
    weights = parameters(config) - config.block_size * config.n_embd
    return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s that MFU is measured against, and what they are: the card's data sheet, or a GEMM timed here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, tflops in GPU_TFLOPS.items():
            if re.search(rf"\b{key}\b(?!.*Laptop)", name):
                return tflops * 1e12, f"{name}'s dense bf16 peak"
    n = 8192 if device.type == "cuda" else 1024
    a = torch.ones(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(8):
        begin = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best, f"a {str(dtype).removeprefix('torch.')} GEMM timed here"


def stamp(device: torch.device):
    """This moment on the device's clock, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(begin, end) -> float:
    """Seconds between two stamps, which the device must have passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class Metrics:
    def __init__(self, config: Config, mesh: Mesh, start_step: int, memory_before: int, entropy: float | None,
                 wandb_id: str | None):
        """`memory_before`: `resident_bytes()` before the model was built; CPU memory is counted from there.

        `entropy`: unigram entropy of the validation tokens, shown beside the validation loss.
        """
        self.config, self.mesh, self.memory_before, self.entropy = config, mesh, memory_before, entropy
        self.peak_flops, self.peak_name = peak_flops(mesh.device, config.torch_dtype)
        self.begin, self.start_step = time.perf_counter(), start_step
        self.comm_bytes = 0
        self.pending: list[tuple] = []  # steps since the last log line
        self.history: dict[str, list[tuple[int, float]]] = {"train": [], "val": []}
        self.seconds, self.steps, self.last_loss, self.wandb, self.file = 0.0, 0, math.nan, None, None
        self.full = False  # whether the disk was, ever
        if not mesh.is_main:
            return
        out = Path(config.out_dir)
        path = out / "metrics.jsonl"
        kept = []
        if start_step and path.exists():  # what a resumed run did after its checkpoint, it does again
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a row that a kill cut short
                    kept.append(json.loads(line))
            kept = [row for row in kept if row.get("step", 0) <= start_step]
            for row in kept:
                if row["kind"] in self.history:
                    self.history[row["kind"]].append((row["step"], row["loss"]))
        new = path.with_suffix(".partial")  # a kill at this moment must not take the rows with it
        new.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.file = new.open("a")
        new.replace(path)
        if config.wandb:
            self.wandb = start_wandb(config, wandb_id)
        self.write({"kind": "run", "argv": sys.argv, "commit": commit(), "start_step": start_step,
                    "versions": {name: importlib.metadata.version(name) for name in ("torch", "numpy", "tiktoken")},
                    "python": sys.version.split()[0], "devices": mesh.world_size, "device": device_name(mesh.device),
                    "parameters": parameters(config), "peak_flops": self.peak_flops})

    def header(self) -> None:
        """What is about to run, in a few lines."""
        c, mesh = self.config, self.mesh
        sizes, real = Sizes.padded(c, mesh.tp), Sizes.real(c)
        shapes = real_shapes(c).values()
        decay = [shape.numel() for shape in shapes if len(shape) >= 2]
        rest = [shape.numel() for shape in shapes if len(shape) < 2]
        padding = [f"vocabulary {real.vocab:,} padded to {sizes.vocab:,}"]
        if sizes.heads != real.heads:
            padding.append(f"{sizes.heads} heads for {real.heads}: attention {sizes.heads / real.heads - 1:+.0%}")
        if sizes.hidden != real.hidden:
            padding.append(f"{sizes.hidden} hidden units for {real.hidden}")
        micro = c.accumulation
        with_fsdp = f" (dp_replicate {mesh.dp_replicate} × dp_shard {mesh.dp_shard})" if mesh.dp_shard > 1 else ""
        with_sp = ", sequence parallel" if c.sequence_parallel else ""
        with_lp = ", loss parallel" if c.loss_parallel else ""
        recomputed = {"none": "", "block": ", blocks recomputed", "selective":
                      "" if c.compile else ", all but GEMMs and attention recomputed"}[c.activation_checkpointing]
        print(f"model   GPT-2, {parameters(c) / 1e6:.1f}M parameters: {c.n_layer} layers, {c.n_head} heads, "
              f"width {c.n_embd}, context {c.block_size}; {'; '.join(padding)}\n"
              f"mesh    {mesh.world_size} × {device_name(mesh.device)}: dp {mesh.dp}{with_fsdp} × tp {mesh.tp}"
              f"{(with_sp + with_lp) if mesh.tp > 1 else ''}\n"
              f"batch   {c.total_batch_size:,} tokens a step: {micro} micro-batch{'es' * (micro > 1)} of "
              f"{c.micro_batch_size} × {c.block_size} on {mesh.dp} data-parallel rank{'s' * (mesh.dp > 1)}\n"
              f"numbers {c.dtype} compute, float32 weights{', blocks compiled' if c.compile else ''}"
              f"{recomputed}; "
              f"fused AdamW, decay {c.weight_decay} on {len(decay)} tensors ({sum(decay):,} parameters), "
              f"none on {len(rest)} ({sum(rest):,})\n"
              f"mfu     of {self.peak_name}, {self.peak_flops / 1e12:.4g} TFLOP/s a device\n"
              f"run     {c.out_dir}, steps {self.start_step} to {c.max_steps}", flush=True)

    @property
    def wandb_id(self) -> str | None:
        return self.wandb.run.id if self.wandb else None

    def collectives(self, counted: Collectives) -> None:
        """Note what one step sends between ranks; it is the same every step."""
        self.comm_bytes = sum(counted.bytes.values())
        if self.mesh.is_main and self.comm_bytes:
            kinds = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(counted.counts.items()))
            print(f"comm    {self.comm_bytes / 1e6:,.1f} MB a step and rank: {kinds}", flush=True)

    def begin_step(self) -> None:
        self.step_begin = stamp(self.mesh.device)

    def end_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor, lr: float, data_ms: float) -> None:
        """Note a finished step; `loss` is this data-parallel rank's mean, `norm` the global one, both on the device."""
        self.pending.append((step, loss, norm, lr, self.step_begin, stamp(self.mesh.device), data_ms))
        if step % self.config.log_interval == 0 or step == self.config.max_steps:
            self.flush(line=True)

    def flush(self, line: bool = False) -> None:
        """Read the pending steps from the device and write their rows; with `line`, print one for the last.

        Raises:
            Diverged: on every rank, where a loss or norm is not finite.
        """
        if not self.pending:
            return
        losses = self.mesh.all_mean(torch.stack([entry[1] for entry in self.pending])).tolist()
        norms = torch.stack([entry[2] for entry in self.pending]).tolist()
        memory = self.mesh.max(peak_memory(self.memory_before))
        c = self.config
        entries, self.pending = self.pending, []
        for (step, _, _, lr, begin, end, data_ms), loss, norm in zip(entries, losses, norms, strict=True):
            seconds = elapsed(begin, end)
            self.last_loss = loss
            if step > self.start_step + 1:  # the first one warms up, and compiles
                self.seconds, self.steps = self.seconds + seconds, self.steps + 1
            speed = c.total_batch_size / seconds
            mfu = speed * flops_per_token(c) / (self.peak_flops * self.mesh.world_size)
            self.history["train"].append((step, loss))
            self.write({"kind": "train", "step": step, "loss": loss, "lr": lr, "grad_norm": norm,
                        "step_ms": seconds * 1e3, "tokens_per_s": speed, "mfu": mfu, "peak_memory_bytes": memory,
                        "tokens": step * c.total_batch_size, "data_ms": data_ms,
                        "comm_bytes_per_step": self.comm_bytes})
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(f"step {step}: loss is {loss}, gradient norm {norm}: lower learning_rate or raise "
                               "warmup_steps; --resume=true goes back to the last checkpoint")
        if line and self.mesh.is_main:
            eta = (self.seconds / self.steps if self.steps else seconds) * (c.max_steps - step)
            print(f"step {step:>{len(str(c.max_steps))}}/{c.max_steps} | loss {loss:.4f} | lr {lr:.2e} | "
                  f"norm {norm:.3f} | {seconds * 1e3:.0f} ms | {speed:,.0f} tok/s"
                  + (f" ({speed / self.mesh.world_size:,.0f} a device)" if self.mesh.world_size > 1 else "")
                  + f" | mfu {mfu:.1%} | {memory / 2**30:.2f} GiB | eta {duration(eta)}", flush=True)

    def validation(self, step: int, loss: float) -> None:
        self.history["val"].append((step, loss))
        self.write({"kind": "val", "step": step, "loss": loss})
        if self.mesh.is_main:
            print(f"step {step:>{len(str(self.config.max_steps))}}/{self.config.max_steps} | val loss {loss:.4f} "
                  f"(unigram entropy of these tokens {self.entropy:.4f})", flush=True)
            self.plot()

    def sample(self, step: int, texts: list[str]) -> None:
        for text in texts:
            self.write({"kind": "sample", "step": step, "text": text})
            if self.mesh.is_main:
                print(f"sample  {text}", flush=True)

    def write(self, row: dict) -> None:
        """One row to metrics.jsonl and W&B; does nothing but on rank 0. What is not finite becomes null, as in JSON."""
        if not self.mesh.is_main:
            return
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as error:  # a full disk ends no run; the row waits in the buffer for the next one's turn
            if not self.full:
                print(f"{self.config.out_dir}/metrics.jsonl: {error.strerror}; rows wait for room",
                      flush=True)
            self.full = True
        if self.wandb:
            self.wandb.row(row)

    def summary(self, step: int) -> None:
        """The closing lines."""
        if not self.mesh.is_main:
            return
        c = self.config
        print(f"done    {step} of {c.max_steps} steps in {duration(time.perf_counter() - self.begin)}", end="")
        if self.steps:
            speed = c.total_batch_size * self.steps / self.seconds
            print(f", {speed:,.0f} tok/s, mfu {speed * flops_per_token(c) / self.peak_flops / self.mesh.world_size:.1%}"
                  f", train loss {self.last_loss:.4f}", end="")
        if self.history["val"]:
            print(f", val loss {self.history['val'][-1][1]:.4f}"
                  + (f" (unigram entropy {self.entropy:.4f})" if self.entropy else ""), end="")
        print(f"\nrun     {c.out_dir}: metrics.jsonl, loss.png" + ", checkpoints/" * bool(c.checkpoint_interval),
              flush=True)

    def plot(self) -> None:
        """loss.png: train and validation loss against the step."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4.2), dpi=120)
        if self.history["train"]:
            axes.plot(*zip(*self.history["train"], strict=True), lw=0.8, color="tab:blue", label="train")
        if self.history["val"]:
            axes.plot(*zip(*self.history["val"], strict=True), "o-", ms=3.5, color="tab:orange", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats a token)", title=Path(self.config.out_dir).name)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        with contextlib.suppress(OSError):  # a full disk, which `write` has told of
            figure.savefig(Path(self.config.out_dir) / "loss.png")
        plt.close(figure)

    def close(self, exit_code: int = 0) -> None:
        """Close the plot, the file and W&B. Safe to call on any way out."""
        if self.file and not self.file.closed:
            if self.history["train"] or self.history["val"]:
                self.plot()
            with contextlib.suppress(OSError):
                self.file.close()
            if self.wandb:
                self.wandb.finish(Path(self.config.out_dir) / "loss.png", exit_code)


class Wandb:
    """A W&B run that can neither delay nor end the training it watches."""

    def __init__(self, run):
        self.run, self.samples = run, []

    def row(self, row: dict) -> None:
        kind, step = row["kind"], row.get("step", 0)
        try:
            if kind == "run":
                self.run.config.update({"run": row}, allow_val_change=True)
            elif kind == "sample":
                import wandb

                self.samples.append([step, row["text"]])
                self.run.log({"samples": wandb.Table(["step", "text"], self.samples), "step": step})
            else:
                values = {f"{kind}/{k}": v for k, v in row.items() if k not in ("kind", "step")}
                self.run.log(values | {"step": step})
        except Exception as error:
            print(f"W&B: a row was lost ({error})", file=sys.stderr)

    def finish(self, plot: Path, exit_code: int) -> None:
        def work():
            try:
                import wandb

                if plot.exists():
                    self.run.log({"loss": wandb.Image(str(plot))})
                self.run.finish(exit_code=exit_code)
            except Exception as error:
                print(f"W&B: not finished ({error})", file=sys.stderr)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(WANDB_SECONDS)
        if thread.is_alive():
            print(f"W&B: no answer in {WANDB_SECONDS} s; the run lies in {self.run.dir}", file=sys.stderr)


def start_wandb(config: Config, run_id: str | None) -> Wandb | None:
    """Begin the run, offline where there is no key or no answer; None, with a line, where W&B fails altogether."""
    import wandb

    def begin(mode):
        run = wandb.init(project=config.wandb_project, name=config.wandb_run_name or Path(config.out_dir).name,
                         config=vars(config), dir=config.out_dir, mode=mode, id=run_id, resume="allow",
                         settings=wandb.Settings(init_timeout=WANDB_SECONDS, silent=True))
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return Wandb(run)
    mode = os.environ.get("WANDB_MODE", "online")
    later = f"offline; later: wandb sync {config.out_dir}/wandb/offline-run-*"
    try:
        if mode == "online":
            try:
                if wandb.login(prompt=False):
                    return begin("online")
                print(f"W&B: no API key, {later}", flush=True)
            except Exception as error:
                print(f"W&B: no answer ({type(error).__name__}), {later}", flush=True)
            mode = "offline"
        return begin(mode)
    except Exception as error:
        print(f"W&B: off ({error})", flush=True)
        return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def commit() -> str | None:
    """The commit of this checkout, `-dirty` where files differ; None outside git."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], text=True, check=True,
                              capture_output=True, cwd=Path(__file__).parent, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
