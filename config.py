"""One typed configuration: defaults ← TOML file ← command line, with one-line errors.

`parse` serves every script: it fills any flat dataclass of bool, int, float, str and Literal fields from
`--key=value` or `--key value`, and answers a wrong key or value with a `UserError` that names the nearest key.
"""

import dataclasses
import difflib
import math
import os
import sys
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VOCAB_SIZE = 50257  # GPT-2's: 50,000 merges, 256 bytes, <|endoftext|>
TORCH = (2, 11), (2, 14)  # the versions of requirements.txt: from, below


class UserError(Exception):
    """A mistake of the user's. Its text is one line: the thing, its value and the remedy. Exit code 2."""


class Failure(Exception):
    """A run that cannot go on, through no mistake in how it was started. Its text is one line. Exit code 1."""


@dataclass
class Config:
    """Train GPT-2 under tensor parallelism. A TOML file comes first, `--key=value` after it."""

    # files
    data_dir: str = "data/fineweb-edu"
    """Folder of token shards (`train_*`, `val_*`), as `fineweb.py` writes them."""
    out_dir: str = "out/gpt2"
    """Folder of this run: config.toml, metrics.jsonl, loss.png, checkpoints/, wandb/."""
    overwrite: bool = False
    """Delete what an earlier run left in out_dir and start anew."""
    resume: bool = False
    """Go on from the newest checkpoint in out_dir; start anew if there is none."""
    resume_step: int = -1
    """Go back to the checkpoint of this step instead (implies resume); -1: the newest."""
    resume_override: bool = False
    """Resume although keys have changed that make it another run (batch, schedule, data)."""
    init_from: str = ""
    """Start from these weights and their sizes: gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder,
    a nanoGPT .pt file, or a run's folder. Empty: random ones."""
    seed: int = 1337
    """Seed of the weights, the data order and the samples."""

    # model
    n_layer: int = 12
    """Transformer blocks."""
    n_head: int = 12
    """Attention heads a block; any number at any tp (padded with zero heads where tp does not divide it)."""
    n_embd: int = 768
    """Width of the residual stream."""
    block_size: int = 1024
    """Context length in tokens."""
    vocab_size: int = VOCAB_SIZE
    """Token ids the model knows; at most 65,536, since shards are uint16."""
    dropout: float = 0.0
    """Dropout of embeddings, attention weights and residual branches; 0 for pretraining."""

    # mesh
    tp: int = 1
    """Tensor-parallel degree: the ranks that share every layer. -1 in one of the three degrees: what is left."""
    dp_shard: int = 1
    """FSDP: ranks that see different data and share the storage of one copy of the model."""
    dp_replicate: int = -1
    """Copies of the model that see different data."""
    sequence_parallel: bool = True
    """Shard activations between blocks over the sequence (reduce-scatter and all-gather for all-reduce)."""
    loss_parallel: bool = True
    """Take the loss on vocabulary shards; false gathers whole logits on every rank (for study)."""
    reshard_after_forward: bool = True
    """FSDP: free a block's gathered weights after its forward and gather them again for its backward."""
    accumulate_sharded: bool = True
    """FSDP: reduce-scatter gradients each micro-batch, so that whole ones are never held; false: once a step."""

    # batch and schedule
    total_batch_size: int = 524288
    """Tokens a step, over all ranks and micro-batches."""
    micro_batch_size: int = 16
    """Sequences a data-parallel rank holds at a time; lower it when memory runs out."""
    shuffle: bool = False
    """Take the windows of each epoch in an order drawn from the seed; false keeps the files' order."""
    max_steps: int = 19073
    """Optimizer steps of the run."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to min_lr, warm-up/stable/decay (linear over the last decay_steps), or flat."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end of the decay."""
    warmup_steps: int = 715
    """Steps of linear warm-up; the first step's rate is above zero."""
    decay_steps: int = -1
    """cosine: the step at which min_lr is reached; wsd: how many last steps decay. -1: max_steps, or a fifth of it."""
    weight_decay: float = 0.1
    """AdamW's decay, on matrices only; biases and LayerNorms have none."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off (the norm is still shown)."""

    # numbers
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype; master weights, gradients, loss and norm are float32 either way."""
    compile: bool = False
    """torch.compile each block."""
    async_tp: bool = False
    """On CUDA with compile: cut all-gathers and reduce-scatters in pieces that overlap with their GEMMs."""
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    """Recompute in the backward: nothing, whole blocks, or all but GEMMs and attention (which compile does anyway)."""
    deterministic: bool = False
    """Bitwise the same losses on two runs of one mesh, at some cost in speed on CUDA."""

    # what is shown and saved
    log_interval: int = 1
    """Steps between console lines."""
    eval_interval: int = 250
    """Steps between validations (also at step 0 and at the end); 0: never."""
    eval_steps: int = 20
    """Batches of total_batch_size validation tokens a validation averages over."""
    sample_interval: int = 250
    """Steps between printed samples (also at the end); 0: never."""
    checkpoint_interval: int = 1000
    """Steps between checkpoints (also at the end); 0: none at all."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, besides the one of the lowest validation loss; older ones are deleted."""
    milestone_interval: int = 0
    """Steps between checkpoints that are never deleted; 0: none."""
    async_save: Literal["auto", "always", "never"] = "auto"
    """Write checkpoints from a copy while training goes on; auto: on GPUs."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint cannot be written; the last one of a run must not fail either way."""
    wandb: bool = False
    """Log to Weights & Biases from rank 0; offline without an API key or network."""
    wandb_project: str = "nanotp"
    """W&B project."""
    wandb_run_name: str = ""
    """W&B run name; empty: the name of out_dir."""

    @property
    def torch_dtype(self):
        import torch  # here, so that --help and errors need not wait for torch

        return getattr(torch, self.dtype)

    @property
    def sequences(self) -> int:
        """Sequences a global batch."""
        return self.total_batch_size // self.block_size

    @property
    def dp(self) -> int:
        """Data-parallel degree, once `check` has resolved the mesh."""
        return self.dp_replicate * self.dp_shard

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return self.sequences // (self.micro_batch_size * self.dp)


def check(config: Config, world_size: int) -> None:
    """Resolve the -1s of `config` in place and raise UserError for values that do not go together."""
    c = config
    for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "total_batch_size",
                 "micro_batch_size", "log_interval", "eval_steps", "keep_checkpoints"):
        if getattr(c, name) < 1:
            raise UserError(f"{name} = {getattr(c, name)}: it must be at least 1")
    for name in ("max_steps", "warmup_steps", "eval_interval", "sample_interval", "checkpoint_interval",
                 "milestone_interval",
                 "learning_rate", "min_lr", "weight_decay", "grad_clip"):
        value = getattr(c, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} = {value}: it must be a finite number, 0 or more")
    if not 0 <= c.seed < 2**63:
        raise UserError(f"seed = {c.seed}: it must be at least 0 and below 2^63")
    for name in ("data_dir", "out_dir"):
        if not getattr(c, name):
            raise UserError(f"{name} is empty: name a folder")
    if c.lr_schedule != "constant" and c.min_lr > c.learning_rate:
        raise UserError(f"min_lr = {c.min_lr} is above learning_rate = {c.learning_rate}: the rate would rise; "
                        f"set min_lr to {c.learning_rate / 10:.2g}, say")
    for name in ("beta1", "beta2", "dropout"):
        if not 0 <= getattr(c, name) < 1:
            raise UserError(f"{name} = {getattr(c, name)}: it must be in [0, 1)")
    if c.vocab_size > 2**16:
        raise UserError(f"vocab_size = {c.vocab_size}: token shards are uint16, so at most 65536")
    mesh = {name: getattr(c, name) for name in ("tp", "dp_shard", "dp_replicate")}
    shown = ", ".join(f"{name} = {size}" for name, size in mesh.items())
    rest = [name for name, size in mesh.items() if size == -1]
    if len(rest) > 1:
        raise UserError(f"{shown}: only one can be -1, which takes what is left; set {rest[1]} = 1")
    taken = math.prod(size for size in mesh.values() if size != -1)
    if taken > 0 and world_size % taken == 0:
        for name in rest:
            setattr(c, name, world_size // taken)
    if min(c.tp, c.dp_shard, c.dp_replicate) < 1 or c.tp * c.dp != world_size:
        raise UserError(f"{shown} does not fill {world_size} process{'es' * (world_size > 1)}: tp · dp_shard · "
                        "dp_replicate must equal torchrun's --nproc-per-node times its nodes (-1: what is left)")
    if c.async_tp and not (c.compile and c.sequence_parallel and c.tp > 1):
        raise UserError(f"async_tp = true with compile = {str(c.compile).lower()}, sequence_parallel = "
                        f"{str(c.sequence_parallel).lower()}, tp = {c.tp}: it needs compile = true, "
                        "sequence_parallel = true and tp above 1")
    if c.dropout and c.compile and c.tp > 1 and not c.sequence_parallel:
        raise UserError(f"dropout = {c.dropout} with compile = true and tp = {c.tp} needs sequence_parallel = true: "
                        "masks that all ranks share are drawn outside of compiled code; or set compile = false")
    if c.n_embd % c.n_head:
        raise UserError(f"n_embd = {c.n_embd} is not divisible by n_head = {c.n_head}: "
                        f"head_dim must be whole; try n_embd = {math.ceil(c.n_embd / c.n_head) * c.n_head}")
    if c.sequence_parallel and c.block_size % c.tp:
        raise UserError(f"block_size = {c.block_size} is not divisible by tp = {c.tp}, which sequence_parallel needs: "
                        f"try block_size = {math.ceil(c.block_size / c.tp) * c.tp} or sequence_parallel = false")
    if c.total_batch_size % c.block_size:
        raise UserError(f"total_batch_size = {c.total_batch_size} (tokens) is not divisible by "
                        f"block_size = {c.block_size}")
    if c.sequences % (c.micro_batch_size * c.dp):
        raise UserError(f"total_batch_size = {c.total_batch_size} is {c.sequences} sequences of block_size = "
                        f"{c.block_size}, not divisible by micro_batch_size = {c.micro_batch_size} times "
                        f"data-parallel degree {c.dp}")
    if c.decay_steps == -1:
        c.decay_steps = max(1, c.max_steps // 5) if c.lr_schedule == "wsd" else c.max_steps
    if c.lr_schedule != "constant" and c.max_steps and c.decay_steps < 1:
        raise UserError(f"decay_steps = {c.decay_steps}: it must be at least 1, or -1 for the default")
    c.resume = c.resume or c.resume_step >= 0
    if c.init_from and c.overwrite and Path(c.init_from).resolve().is_relative_to(Path(c.out_dir).resolve()):
        raise UserError(f"init_from = {c.init_from} lies in out_dir, which overwrite deletes: choose another out_dir")


def check_torch(version: str) -> None:
    """Raise UserError for a PyTorch that this project was not tried with: DTensor's names and behaviour move."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not TORCH[0] <= (major, minor) < TORCH[1]:
        wanted = ",".join(f"{sign}{a}.{b}" for sign, (a, b) in zip((">=", "<"), TORCH, strict=True))
        raise UserError(f"torch {version} is outside the supported range: pip install 'torch{wanted}'")


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(cls, argv: list[str], *, toml: bool = False):
    """Build the dataclass `cls` from the words of a command line.

    Args:
        cls: a dataclass with a default for every field and a docstring under it (shown by --help).
        argv: `--key=value` or `--key value` words; with `toml`, also at most one path of a TOML file, which
            alone can set a list (of tables).

    Raises:
        UserError: an unknown key, a value of the wrong type, a file that cannot be read or is no TOML.
    """
    if "--help" in argv or "-h" in argv:
        import tyro

        tyro.cli(cls, args=["--help"], prog=Path(sys.argv[0]).name, use_underscores=True,
                 config=(tyro.conf.FlagConversionOff,))
    values, path, words = {}, None, list(argv)
    types = typing.get_type_hints(cls)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not toml or path is not None:
                raise UserError(f"unexpected argument {word!r}: options are --key=value" + " (one TOML file)" * toml)
            path = word
            continue
        key, equals, text = word[2:].partition("=")
        _known(key, {name: kind for name, kind in types.items() if kind is not list}, "--")
        if not equals:
            if not words or (words[0].startswith("--") and words[0][2:].split("=")[0] in types):
                raise UserError(f"--{key} lacks a value: write --{key}=" + ("true" if types[key] is bool else "…"))
            text = words.pop(0)
        values[key] = _from_text(key, text, types[key])
    return cls(**((_from_file(path, types) if path else {}) | values))


def dump(config) -> str:
    """The dataclass as TOML text: `parse(type(config), [path], toml=True)` reads it back."""
    def text(value):
        return str(value).lower() if isinstance(value, bool) else repr(value) if not isinstance(value, str) else (
            '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"')
    return "".join(f"{f.name} = {text(getattr(config, f.name))}\n" for f in dataclasses.fields(config))


def run(main) -> None:
    """Run `main(argv)` of a single-process script: UserError → one line and exit code 2; Ctrl-C → exit code 130."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


def _known(key: str, types: dict, prefix: str = "") -> None:
    if key not in types:
        near = difflib.get_close_matches(key.replace("-", "_"), types, n=1, cutoff=0.5)
        hint = f"did you mean {prefix}{near[0]}?" if near else "--help lists the keys"
        raise UserError(f"unknown key {prefix}{key}: {hint}")


def _from_text(key: str, text: str, kind):
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"--{key} = {text!r}: it must be true or false")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise UserError(f"--{key} = {text!r}: it must be {_name(kind)}") from None
    return _choice(f"--{key}", text, kind)


def _from_file(path: str, types: dict) -> dict:
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config file {path}: {error.strerror or error}; configs/ has examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} is not TOML: {' '.join(str(error).split())}") from None
    return typed(path, data, types)


def typed(where: str, data: dict, types: dict) -> dict:
    """The values of a TOML table, each checked against its key's type.

    Raises:
        UserError: an unknown key or a value of the wrong type; the line begins with `where`.
    """
    values = {}
    for key, value in data.items():
        try:
            _known(key, types)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        kind = types[key]
        if kind is float and type(value) is int:
            value = float(value)
        basic = kind if kind in (bool, int, float, list) else str
        if type(value) is not basic:
            raise UserError(f"{where}: {key} = {value!r}: it must be {_name(basic)}")
        values[key] = _choice(f"{where}: {key}", value, kind)
    return values


def _choice(where: str, value, kind):
    choices = typing.get_args(kind)
    if choices and value not in choices:
        raise UserError(f"{where} = {value!r}: it must be one of {', '.join(choices)}")
    return value


def _name(kind) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string",
            list: "a list of tables, [[…]]"}[kind]
