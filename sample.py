"""Text from a trained GPT-2, under tensor parallelism written out by hand.

    python sample.py --checkpoint out/run --prompt "Hello, I'm a language model,"
    torchrun --standalone --nproc-per-node=2 sample.py --hf FOLDER --prompt_file prompts.txt --quantize int8

tp is the number of processes. A rank keeps its share of every layer's weights and of the KV cache, by heads; a token
costs one all-reduce after each attention, one after each MLP, and an all-gather of its logits. `--help` lists the keys.
`engine.py` is the model, this file draws tokens from it and talks to the user.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import nn

import checkpoint
import config as configuration
import hf
from config import Config, UserError
from engine import Engine
from mesh import Mesh, peak_memory, run, start, world_size
from model import GPT, real_shapes
from tokenizer import EOT, decode, encoding


@dataclass
class Options:
    """Generate text with a GPT-2: a checkpoint of this project's, or a Hugging Face folder."""

    checkpoint: str = ""
    """A run's folder (its latest checkpoint) or one of its checkpoints/step_*."""
    hf: str = ""
    """A folder in the Hugging Face layout (config.json, model.safetensors), or gpt2 … gpt2-xl from its Hub."""
    prompt: str = ""
    """What to continue; empty: from <|endoftext|>, which starts a document."""
    prompt_file: str = ""
    """A file of prompts, one a line (empty lines are skipped), generated as one batch."""
    num_samples: int = 1
    """Continuations of each prompt."""
    max_new_tokens: int = 64
    """Longest continuation; <|endoftext|> or the end of the context may come before."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 50
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that make up this probability together, after top_k."""
    seed: int = 1337
    """Seed of the draws."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Weights of the linear layers, lm_head too: in dtype, 8 bits an output channel, or 4 bits a group of inputs."""
    group_size: int = 64
    """Inputs that share a scale with int4: 32, 64 or 128."""
    stream: bool = True
    """Print a single sample token by token, several each when it ends; false: all at the end, in order."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype, and that of the weights that are not quantised."""
    compile: bool = False
    """torch.compile prefill and decode, before the clock starts."""


def check(o: Options) -> None:
    """Raise UserError for options that are wrong by themselves."""
    if bool(o.checkpoint) == bool(o.hf):
        raise UserError(f"checkpoint = {o.checkpoint!r}, hf = {o.hf!r}: give one of them, --checkpoint=out/RUN or "
                        "--hf=FOLDER")
    if o.prompt and o.prompt_file:
        raise UserError(f"prompt_file = {o.prompt_file!r} beside a prompt: give one of them")
    for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if not least <= getattr(o, name) < float("inf"):
            raise UserError(f"{name} = {getattr(o, name)}: it must be at least {least}")
    if not 0 < o.top_p <= 1:
        raise UserError(f"top_p = {o.top_p}: it must be above 0 and at most 1, which turns it off")
    if o.group_size not in (32, 64, 128):
        raise UserError(f"group_size = {o.group_size}: it must be 32, 64 or 128")


# ---------------------------------------------------------------------------------------------------------------------
# generation


def draw(logits, temperature: float, top_k: int, top_p: float, generator: torch.Generator):
    """One id a row of `logits`, (R, vocab_size) float32 → (R,); equal on ranks with equal logits and generators."""
    if temperature == 0:
        return logits.argmax(1)
    ids = None
    if top_k or top_p < 1:
        logits, ids = logits.topk(min(top_k or logits.shape[1], logits.shape[1]))  # sorted, likeliest first
    p = torch.softmax(logits / temperature, 1)
    if top_p < 1:
        p[p.cumsum(1) - p >= top_p] = 0  # what is reached without it
    drawn = torch.multinomial(p, 1, generator=generator)
    return (drawn if ids is None else ids.gather(1, drawn))[:, 0]


class Generation:
    """Iterating continues a batch of prompts of any lengths: each step gives a list of (row, id) for unfinished rows.

    A row ends with <|endoftext|>, which is not given out, after `max_new_tokens`, or where the context of block_size
    tokens is full; `ends` says which. Times are of the model and the draws, whatever the caller does between steps.
    """

    def __init__(self, engine: Engine, prompts: list[list[int]], max_new_tokens: int, *, temperature: float = 1.0,
                 top_k: int = 50, top_p: float = 1.0, seed: int = 0):
        self.engine, self.prompts, self.max_new_tokens = engine, prompts, max_new_tokens
        self.sampling = temperature, top_k, top_p, torch.Generator(engine.device).manual_seed(seed)
        self.ends: list[str | None] = [None] * len(prompts)
        self.prefill_s, self.step_s = 0.0, []

    def __iter__(self):
        engine, device, rows = self.engine, self.engine.device, len(self.prompts)
        lengths = [len(prompt) for prompt in self.prompts]
        context = engine.config.block_size
        limits = [min(n + self.max_new_tokens, context) for n in lengths]
        idx = torch.zeros(rows, max(lengths), dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            idx[row, : len(prompt)] = torch.tensor(prompt)
        position = torch.tensor(lengths, device=device)  # of the token to come
        idx = idx.to(device)
        engine.new_cache(rows, max(limits))
        if engine.config.compile:  # now, not on the clock; the prefill to come overwrites what this leaves in the cache
            engine.prefill(idx, position - 1)
            engine.decode(torch.zeros_like(position), position - 1)
        began = time.perf_counter()
        logits = engine.prefill(idx, position - 1)
        while True:
            token = draw(logits, *self.sampling)
            ids = token.tolist()  # waits for the device
            took = time.perf_counter() - began
            if self.prefill_s:
                self.step_s.append(took)
            else:
                self.prefill_s = took
            new = []
            for row in [row for row, end in enumerate(self.ends) if end is None]:
                lengths[row] += 1
                if ids[row] == EOT:
                    self.ends[row] = "<|endoftext|>"
                    continue
                new.append((row, ids[row]))
                if lengths[row] == limits[row]:
                    self.ends[row] = "context" if limits[row] == context else "max_new_tokens"
            yield new
            if all(self.ends):
                return
            began = time.perf_counter()
            logits = engine.decode(token, position)
            position = (position + 1).clamp(max=max(limits) - 1)  # ended rows stay inside the cache


@torch.no_grad()
def generate(model: GPT, mesh: Mesh, prompt: list[int], *, max_new_tokens: int, num_samples: int = 1,
             temperature: float = 1.0, top_k: int = 50, seed: int = 0) -> list[list[int]]:
    """Continue `prompt` with the trainer's live model, `num_samples` times; a sample ends before `<|endoftext|>`.

    Every rank must call it and every rank gets the same ids: the logits are whole and equal on all of them, and so is
    the generator's seed. The prefix is computed anew for every token, at one fixed length: causal attention does not
    see what comes after, a compiled model meets one shape, and the length divides by tp as sequence shards need.

    Returns:
        `num_samples` lists of ids, prompt included. Prompt and continuation together are cut at block_size.
    """
    prompt = prompt or [EOT]
    training = model.training
    model.eval()
    end = min(len(prompt) + max_new_tokens, model.block_size)
    length = min(-(-end // mesh.tp) * mesh.tp, model.block_size)
    tokens = torch.zeros(num_samples, length, dtype=torch.long)
    tokens[:, : len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(prompt), end):
        logits = model(tokens.to(mesh.device), position=i - 1)[:, 0].cpu()  # (num_samples, vocab_size)
        tokens[:, i] = draw(logits, temperature, top_k, 1.0, generator)
    model.train(training)
    samples = []
    for row in tokens[:, :end].tolist():
        new = row[len(prompt) :]
        samples.append(prompt + (new[: new.index(EOT)] if EOT in new else new))
    return samples


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def open_model(o: Options, mesh: Mesh):
    """The model's Config and a function from a parameter's name to its whole float32 value. All ranks call it.

    Raises:
        UserError: nothing there, damaged, or no GPT-2.
    """
    options = {"dtype": o.dtype, "compile": o.compile}
    if o.hf:
        if not Path(o.hf).exists() and o.hf not in hf.HUB:
            raise UserError(f"hf = {o.hf}: no such folder, and none of {', '.join(hf.HUB)}")
        mesh.on_main(lambda: hf.open_source(o.hf) and None)  # downloads, if it has to, once
        source = hf.open_source(o.hf)
        if source.tensor:
            return Config(**source.sizes, **options), lambda name: source.tensor(name).float()
    folder = mesh.on_main(lambda: checkpoint.find(o.checkpoint or o.hf))
    stored = mesh.on_main(lambda: checkpoint.read(folder))["config"]
    checkpoint.verify(folder, mesh)
    config = Config(**{key: stored[key] for key in checkpoint.SIZES}, **options)
    shapes, alone = real_shapes(config), Mesh(torch.device("cpu"))

    def read(name):
        model = module = nn.Module()  # that has this one parameter, in its place
        *path, last = name.split(".")
        for part in path:
            module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty(shapes[name])))
        checkpoint.load(folder, config, alone, model)
        return model.get_parameter(name).detach()
    return config, read


def read_prompts(o: Options) -> list[list[int]]:
    """The prompts as ids, on rank 0."""
    texts = [o.prompt]
    if o.prompt_file:
        try:
            texts = [line for line in Path(o.prompt_file).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"prompt_file = {o.prompt_file}: {getattr(error, 'strerror', None) or error}") from None
        if not texts:
            raise UserError(f"prompt_file = {o.prompt_file}: it has no line that is not empty")
    return [encoding().encode_ordinary(text) or [EOT] for text in texts]


def check_prompts(prompts: list[list[int]], config: Config) -> None:
    for i, prompt in enumerate(prompts, start=1):
        if len(prompt) >= config.block_size:
            raise UserError(f"prompt {i} has {len(prompt):,} tokens, the model's context is block_size = "
                            f"{config.block_size:,}: shorten it to at most {config.block_size - 1:,}")
        if max(prompt) >= config.vocab_size:
            raise UserError(f"prompt {i} has token id {max(prompt)}, the model's vocab_size is {config.vocab_size}")


def show(generation: Generation, o: Options) -> None:
    """Generate and print: one sample as its tokens come, several as each ends, or all at the end."""
    prompts = generation.prompts
    ids = [[] if prompt == [EOT] else list(prompt) for prompt in prompts]
    shown, ended = "", set()

    def print_sample(row):
        prompt, sample = divmod(row, o.num_samples)
        print(f"── prompt {prompt + 1}, sample {sample + 1}\n{decode(ids[row])}\n", flush=True)

    if o.stream and len(prompts) == 1:
        shown = decode(ids[0])
        print(shown, end="", flush=True)
    for new in generation:
        for row, id in new:
            ids[row].append(id)
        if o.stream and len(prompts) == 1:
            text = decode(ids[0])
            if not text.endswith("\ufffd") or generation.ends[0]:  # half a character waits for the rest
                print(text[len(shown) :], end="\n" * bool(generation.ends[0]), flush=True)
                shown = text
        elif o.stream:
            for row in range(len(prompts)):
                if generation.ends[row] and row not in ended:
                    print_sample(row)
                    ended.add(row)
    if not o.stream:
        for row in range(len(prompts)):
            print_sample(row)


def statistics(engine: Engine, generation: Generation) -> str:
    """Speed, memory traffic and memory of this rank, as lines."""
    rows, tokens = len(generation.prompts), sum(map(len, generation.prompts))
    cache = sum(layer.nbytes for layer in engine.cache)
    reasons = [f"{generation.ends.count(end)} at {text}" for end, text in (
        ("max_new_tokens", "max_new_tokens"), ("<|endoftext|>", "<|endoftext|>"),
        ("context", f"the context's end ({engine.config.block_size:,} tokens)")) if end in generation.ends]
    lines = [f"ended    {', '.join(reasons)}",
             f"prefill  {tokens:,} tokens in {generation.prefill_s * 1e3:.1f} ms, "
             f"{tokens / generation.prefill_s:,.0f} tok/s"]
    if generation.step_s:
        step = median(generation.step_s)
        lines.append(f"decode   {len(generation.step_s):,} steps of {rows} tok, median {step * 1e3:.2f} ms a token, "
                     f"{rows * len(generation.step_s) / sum(generation.step_s):,.1f} tok/s; reads "
                     f"{(engine.weight_bytes + cache) / step / 1e9:.1f} GB/s")
    lines.append(f"memory   {engine.weight_bytes / 2**20:,.0f} MiB of weights that a token reads, "
                 f"{engine.wte.nbytes / 2**20:,.0f} of embeddings, {cache / 2**20:,.0f} of KV cache; "
                 f"peak {peak_memory() / 2**20:,.0f}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    o = configuration.parse(Options, argv)
    check(o)
    configuration.check_torch(torch.__version__)
    mesh = start(Config(tp=world_size(), dp_replicate=1, compile=o.compile))
    torch.set_float32_matmul_precision("highest" if o.dtype == "float32" else "high")
    prompts = mesh.on_main(lambda: read_prompts(o))
    config, read = open_model(o, mesh)
    check_prompts(prompts, config)
    engine = Engine(config, read, mesh, o.quantize, o.group_size)
    generation = Generation(engine, [prompt for prompt in prompts for _ in range(o.num_samples)], o.max_new_tokens,
                            temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, seed=o.seed)
    if mesh.is_main:
        show(generation, o)
        print(f"\n{mesh.tp} process{'es' * (mesh.tp > 1)} on {mesh.device.type}, {o.dtype}, quantize = {o.quantize}\n"
              + statistics(engine, generation), flush=True)
    else:
        for _ in generation:
            pass
    mesh.close()


if __name__ == "__main__":
    run(main, "interrupted", "give fewer prompts at once, quantize = int8 or int4, or raise tp")
