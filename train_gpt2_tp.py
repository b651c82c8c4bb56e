"""Train GPT-2 under tensor parallelism.

    torchrun --standalone --nproc-per-node=2 train_gpt2_tp.py configs/gpt2_124m.toml --tp=2 --micro_batch_size=4
    python train_gpt2_tp.py configs/gpt2_124m.toml --max_steps=100

Read it top to bottom: config → mesh → model → optimizer → loop. `--help` lists the keys.
"""

import math
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import torch

import checkpoint
import config as configuration
import hf
from checkpoint import Saver
from config import Config, UserError
from data import Batches, Loader, unigram_entropy
from data import check as check_split
from mesh import Collectives, Mesh, resident_bytes, run, start, world_size
from metrics import Diverged, Metrics
from model import GPT
from parallel import (
    build_model,
    check_weights,
    clip_grad_norm,
    make_optimizer,
    reduce_gradients,
    seed_dropout,
    sync_in_backward,
)
from sample import generate
from tokenizer import decode, encoding


def learning_rate(step: int, c: Config) -> float:
    """The rate of update `step`, counted from 0."""
    if step < c.warmup_steps:
        return c.learning_rate * (step + 1) / c.warmup_steps
    if c.lr_schedule == "constant":
        return c.learning_rate
    if c.lr_schedule == "wsd":
        left = min(1.0, (c.max_steps - step) / c.decay_steps)  # of the decay; 1 while the rate is stable
        return c.min_lr + left * (c.learning_rate - c.min_lr)
    done = min(1.0, (step - c.warmup_steps) / max(1, c.decay_steps - c.warmup_steps))
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (c.learning_rate - c.min_lr)


@torch.no_grad()
def validation_loss(model: GPT, batches: Batches, c: Config, mesh: Mesh) -> float:
    """Mean loss over the first `eval_steps` batches of the validation split: the same tokens at every mesh."""
    total = torch.zeros((), device=mesh.device)
    model.eval()
    for step in range(c.eval_steps):
        inputs, targets = batches[step]
        micro = list(zip(inputs.split(c.micro_batch_size), targets.split(c.micro_batch_size), strict=True))
        for x, y in micro:
            total += model(x.to(mesh.device), y.to(mesh.device)) / (len(micro) * c.eval_steps)
    model.train()
    return mesh.all_mean(total).item()


def train_step(model: GPT, optimizer: torch.optim.Optimizer, inputs, targets, step: int, c: Config, mesh: Mesh):
    """Update number `step`, from 0, from this data-parallel rank's rows (sequences / dp, block_size) of its batch.

    Returns the mean loss over these rows and the global gradient norm before clipping, both on the device.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]  # FSDP may show others in the model
    micro = list(zip(inputs.split(c.micro_batch_size), targets.split(c.micro_batch_size), strict=True))
    total = torch.zeros((), device=mesh.device)
    for i, (x, y) in enumerate(micro):
        seed_dropout(model, c, mesh, step, i)
        loss = model(x, y) / len(micro)
        sync_in_backward(model, c, last=i == len(micro) - 1)
        loss.backward()
        total += loss.detach()
    reduce_gradients(params, mesh)
    norm = clip_grad_norm(params, c.grad_clip, mesh)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, c)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def check_data(c: Config) -> tuple[dict[str, int], float | None]:
    """Check the shards, on rank 0: what tells the training data from another's, for checkpoints, and the validation
    split's unigram entropy in nats, if there is to be validation."""
    shards = check_split(c.data_dir, "train", c.vocab_size, c.total_batch_size + 1)
    data = {"shards": len(shards), "tokens": sum(shard.tokens for shard in shards)}
    if not c.eval_interval:
        return data, None
    needed = c.eval_steps * c.total_batch_size + 1
    shards = check_split(c.data_dir, "val", c.vocab_size)
    tokens = sum(shard.tokens for shard in shards)
    if tokens < needed:
        raise UserError(f"eval_steps = {c.eval_steps} batches of total_batch_size = {c.total_batch_size} need "
                        f"{needed:,} validation tokens, {c.data_dir} has {tokens:,}: " + (
                            f"lower eval_steps to at most {fit}" if (fit := (tokens - 1) // c.total_batch_size) else
                            "lower total_batch_size") + ", or eval_interval = 0 for no validation")
    return data, unigram_entropy(c.data_dir, "val")


def open_run(c: Config) -> None:
    """Make out_dir ready, on rank 0."""
    out = Path(c.out_dir)
    if out.exists() and not out.is_dir():
        raise UserError(f"out_dir = {out} is a file: choose another")
    held = (out / "config.toml").exists() or (out / "metrics.jsonl").exists()
    if held and not c.resume:
        if not c.overwrite:
            raise UserError(f"out_dir = {out} holds another run: choose another out_dir, go on with --resume=true, "
                            "or delete it with --overwrite=true")
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):  # torchrun --max-restarts, the same command again
            raise UserError(f"out_dir = {out}: overwrite = true would delete the run that is being restarted: start "
                            "with --resume=true in place of it")
    try:
        if not c.resume and c.overwrite:
            for name in ("config.toml", "metrics.jsonl", "loss.png"):
                (out / name).unlink(missing_ok=True)
            for name in ("checkpoints", "wandb"):
                shutil.rmtree(out / name, ignore_errors=True)
            if held:
                print(f"overwrite: the run that {out} held is deleted", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.toml").write_text(configuration.dump(c))
    except OSError as error:
        raise UserError(f"out_dir = {out} cannot be written ({error.strerror}): choose another") from None


def main(argv: list[str]) -> None:
    c = configuration.parse(Config, argv, toml=True)
    source = None
    if c.init_from:  # the sizes are the weights'; where the run goes on, its checkpoint's
        source = hf.open_source(c.out_dir if c.resume and checkpoint.steps(c.out_dir) else c.init_from)
        hf.take_sizes(c, source)
    configuration.check(c, world_size())
    configuration.check_torch(torch.__version__)
    stop = StopSignal()
    mesh = start(c)
    train_data, entropy = mesh.on_main(lambda: check_data(c))
    folder, meta = checkpoint.choose(c, mesh, train_data) or (None, {"step": 0})
    mesh.on_main(lambda: open_run(c))
    start_step = meta["step"]

    torch.set_float32_matmul_precision("highest" if c.dtype == "float32" else "high")
    memory_before = resident_bytes()
    model = build_model(c, mesh, draw=not (folder or source))
    optimizer = make_optimizer(model, c)
    if folder:
        checkpoint.load(folder, c, mesh, model, optimizer)
    elif source:
        hf.load(source, c, mesh, model)
    if folder or source:
        check_weights(model, c, mesh)

    data = {"sequences": c.sequences, "block_size": c.block_size, "seed": c.seed,
            "dp_rank": mesh.dp_rank, "dp_size": mesh.dp}
    loader = Loader(Batches(c.data_dir, "train", shuffle=c.shuffle, **data), start_step, mesh.device)
    val_batches = Batches(c.data_dir, "val", **data) if c.eval_interval else None
    metrics = Metrics(c, mesh, start_step, memory_before, entropy, meta.get("wandb_id"))
    saver = Saver(c, mesh, model, optimizer, train_data, start_step)
    if mesh.is_main:
        metrics.header()
    code = 1
    try:
        if c.eval_interval and start_step == 0:
            metrics.validation(0, validation_loss(model, val_batches, c, mesh))
        step = start_step
        while step < c.max_steps and not stop.agreed(mesh):
            metrics.begin_step()
            inputs, targets = loader.next()
            with Collectives() if step == start_step else nullcontext() as collectives:
                loss, norm = train_step(model, optimizer, inputs, targets, step, c, mesh)
            if collectives:
                metrics.collectives(collectives)
            step += 1
            metrics.end_step(step, loss, norm, optimizer.param_groups[0]["lr"], loader.data_ms)

            last = step == c.max_steps
            saver.poll()
            val_loss = None
            if due(step, c.eval_interval, last):
                metrics.flush()
                val_loss = validation_loss(model, val_batches, c, mesh)
                metrics.validation(step, val_loss)
            if due(step, c.checkpoint_interval, last) or due(step, c.milestone_interval, last):
                metrics.flush()
                check_finite(model, inputs, targets, step, c, mesh)
                if not last:
                    warn_of_drift(model, c, mesh)
                saver.save(step, last, val_loss=val_loss, wandb_id=metrics.wandb_id)
            if due(step, c.sample_interval, last):
                metrics.sample(step, sample(model, c, mesh))
        metrics.flush()
        saver.wait()
        if stop.signal and c.checkpoint_interval and saver.saved < step:
            check_finite(model, inputs, targets, step, c, mesh)
            saver.save(step, last=True, wandb_id=metrics.wandb_id)
        warn_of_drift(model, c, mesh)
        if mesh.is_main and stop.signal:
            print(f"stopped by {stop.signal} after step {step}; " + (
                "the same command with --resume=true goes on from there" if saver.saved == step > 0 else
                "nothing was saved"), flush=True)
        metrics.summary(step)
        code = 0
    finally:
        saver.close()
        loader.close()
        metrics.close(code)
    mesh.close()


@torch.no_grad()
def check_finite(model: GPT, inputs, targets, step: int, c: Config, mesh: Mesh) -> None:
    """Raise Diverged where the updated weights give no finite loss: the step's own loss was that of the weights before
    it, and a state that is lost must not be saved."""
    loss = model(inputs[: c.micro_batch_size], targets[: c.micro_batch_size])
    if mesh.any(not loss.isfinite().item()):
        raise Diverged(f"step {step}: its update leaves weights whose loss is {loss.item()}; they are not saved: "
                       "--resume=true goes back to the last checkpoint; lower learning_rate or raise warmup_steps")


def warn_of_drift(model: GPT, c: Config, mesh: Mesh) -> None:
    """Say where replicas of a weight differ; what was learned is still worth saving."""
    try:
        check_weights(model, c, mesh)
    except AssertionError as error:
        print(f"warning: {error}", flush=True)


def due(step: int, interval: int, last: bool) -> bool:
    return interval > 0 and (last or step % interval == 0)


def sample(model: GPT, c: Config, mesh: Mesh) -> list[str]:
    prompt = encoding().encode_ordinary("Hello, I'm a language model,")[: c.block_size - 1]
    if max(prompt, default=c.vocab_size) >= c.vocab_size:  # other tokens than GPT-2's, or no room for any
        prompt = [0]
    return [decode(ids) for ids in generate(model, mesh, prompt, max_new_tokens=48, num_samples=2, seed=c.seed)]


class StopSignal:
    """SIGINT, SIGTERM or SIGUSR1, noted when it comes and acted on at a step's end by all ranks together."""

    def __init__(self):
        self.noted = None  # this rank's
        self.signal = None  # what all ranks stop for
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.noted = signal.Signals(number).name

    def agreed(self, mesh: Mesh) -> bool:
        """Whether any rank got one. One that comes after this rank was asked counts the next time."""
        agreed = mesh.any(self.noted is not None)
        if agreed:
            self.signal = self.noted or "a signal to another rank"
        return agreed


if __name__ == "__main__":
    run(main, "interrupted before the first step", "lower micro_batch_size or block_size, or raise tp")
