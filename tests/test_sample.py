"""Generation beside transformers' own, beside the whole prefix computed anew, and as a user runs it, mistakes too."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import run_ranks
from small import CPU, small_config
from test_model import hugging_face, perturbed
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import sample
from checkpoint import Saver
from config import UserError
from engine import Engine
from mesh import Mesh, mesh_over_world
from model import real_shapes
from parallel import make_optimizer
from quantize import quantize
from sample import Generation, draw
from tokenizer import decode

# 3 heads: 2 and 4 ranks pad them; the rows end at different steps, the third where the context does
SIZES = {"n_head": 3, "n_embd": 96}
PROMPTS = [[7], list(range(100, 109)), list(range(500, 526)), [3, 1, 4, 1, 5]]
NEW = 12


def whole_weights(model, config):
    """name → the parameter without padding, as a checkpoint holds it."""
    shapes = real_shapes(config)
    return {name: p.detach()[tuple(map(slice, shapes[name]))] for name, p in model.named_parameters()}


def make_engine(mesh, quantized="none", group_size=32, **keys):
    config = small_config(**(SIZES | keys))
    return Engine(config, whole_weights(perturbed(config), config).__getitem__, mesh, quantized, group_size)


def collect(generation):
    rows = [[] for _ in generation.prompts]
    for new in generation:
        for row, id in new:
            rows[row].append(id)
    return rows


def forced(engine):
    """Logits after each prompt and after each of 5 forced tokens, (6, R, vocab_size): prefill, then decode."""
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    idx = torch.zeros(len(PROMPTS), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        idx[row, : len(prompt)] = torch.tensor(prompt)
    engine.new_cache(len(PROMPTS), int(max(lengths)) + 5)
    logits = [engine.prefill(idx, lengths - 1)]
    logits += [engine.decode(forced_ids(i), lengths + i) for i in range(5)]
    return torch.stack(logits)


def forced_ids(i):
    return torch.arange(len(PROMPTS)) * 31 + 7 * i + 400


def forced_reference(logits_of):
    """The same from whole sequences, one row at a time, without a cache or padding."""
    found = torch.stack([
        logits_of(torch.tensor([prompt + [int(forced_ids(i)[row]) for i in range(5)]]))[0, len(prompt) - 1 :]
        for row, prompt in enumerate(PROMPTS)])
    return found.transpose(0, 1)


def error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def on_one_rank(mesh):
    """What every mesh must agree on, and what is counted."""
    engine = make_engine(mesh)
    weight_bytes = engine.weight_bytes
    found = {"greedy": collect(Generation(engine, PROMPTS, NEW, temperature=0)),
             "drawn": collect(Generation(engine, PROMPTS, NEW, temperature=0.9, top_k=20, top_p=0.9, seed=5)),
             "none": forced(engine)}
    with CommDebugMode() as mode:
        engine.decode(torch.tensor(PROMPTS[3][:4]), torch.arange(4))
    found["collectives"] = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items() if n}
    for quantized in ("int8", "int4"):
        found[quantized] = forced(make_engine(mesh, quantized))
        found[f"{quantized} bfloat16"] = forced(make_engine(mesh, quantized, dtype="bfloat16"))
    if mesh.tp <= 2:
        # what torch.compile captures, without the minute that inductor takes to make code of it
        torch.compile, inductor = functools.partial(torch.compile, backend="aot_eager", fullgraph=True), torch.compile
        found["compiled"] = forced(make_engine(mesh, compile=True))
        torch.compile = inductor
    return found, weight_bytes


def on_ranks(rank):
    config = small_config(dist.get_world_size(), tp=dist.get_world_size(), **SIZES)
    return on_one_rank(mesh_over_world(config, CPU))


@pytest.fixture(scope="module")
def model():
    config = small_config(**SIZES)
    model = perturbed(config)
    return model, hugging_face(model, config)


@pytest.fixture(scope="module")
def alone():
    return on_one_rank(Mesh(CPU))


def test_greedy_equals_transformers(model, alone):
    for prompt, ids in zip(PROMPTS, alone[0]["greedy"], strict=True):
        want = model[1].generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                                 max_new_tokens=min(NEW, 32 - len(prompt)), eos_token_id=None, pad_token_id=0)
        assert ids == want[0, len(prompt) :].tolist()
    assert [len(ids) for ids in alone[0]["greedy"]] == [12, 12, 6, 12]


def test_cache_equals_the_prefix_computed_anew(model, alone):
    """At every row of a ragged batch, for the trainer's model and for transformers' in float64."""
    with torch.no_grad():
        assert error(alone[0]["none"], forced_reference(model[0])) < 1e-5
        assert error(alone[0]["none"], forced_reference(lambda idx: model[1](idx).logits)) < 1e-5
    assert error(alone[0]["compiled"], alone[0]["none"]) < 1e-5
    assert alone[0]["collectives"] == {}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_quantised_logits_equal_float64_on_the_dequantised_weights(bits, dtype, limit, model, alone):
    config = small_config(**SIZES)
    copy = perturbed(config)

    def dequantised(weight):
        linear = nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight = nn.Parameter(weight.to(getattr(torch, dtype)))
        return quantize(linear, bits, 32).double().product(torch.eye(weight.shape[1], dtype=torch.float64)).T

    with torch.no_grad():
        head = dequantised(copy.lm_head.weight)[: config.vocab_size]
        for name, p in copy.named_parameters():
            if name.startswith("h.") and p.ndim == 2:
                p.copy_(dequantised(p))
        reference = hugging_face(copy, config)
        reference.lm_head.weight = nn.Parameter(head)  # quantised; the lookup's table is not
        want = forced_reference(lambda idx: reference(idx).logits)
        exact = forced_reference(lambda idx: model[1](idx).logits)
    name = f"int{bits}" + " bfloat16" * (dtype == "bfloat16")
    assert error(alone[0][name], want) < limit
    assert 1e-3 < error(want, exact) < {8: 2e-2, 4: 0.3}[bits]  # it is quantised, and not badly


@pytest.mark.parametrize("tp", [2, 4])
def test_every_mesh_gives_the_same_text(tp, alone):
    results = run_ranks(on_ranks, tp)
    for rank, (found, weight_bytes) in enumerate(results):
        assert found["greedy"] == alone[0]["greedy"], f"rank {rank} of {tp}"
        assert found["drawn"] == results[0][0]["drawn"] == alone[0]["drawn"], f"rank {rank} of {tp}"
        for name in ("none", "int8", "int4", *(["compiled"] if tp == 2 else [])):
            assert error(found[name], alone[0][name]) < 1e-5, f"{name} on rank {rank} of {tp}"
            assert torch.equal(found[name], results[0][0][name]), f"logits of {name} differ on rank {rank} of {tp}"
        for name in ("int8 bfloat16", "int4 bfloat16"):
            assert error(found[name], alone[0][name]) < 3e-2, f"{name} on rank {rank} of {tp}"
        # 2 blocks: one sum after each attention and each MLP; one gather of the last position's logits
        assert found["collectives"] == {"all_reduce": 4, "all_gather_into_tensor": 1}
        padded = 4 / 3  # heads
        assert weight_bytes < alone[1] * padded / tp * 1.05


def test_generation_stops_at_endoftext(alone, monkeypatch):
    greedy = alone[0]["greedy"]
    end = greedy[1][4]  # stands for <|endoftext|>, which 1,000 ids do not reach
    monkeypatch.setattr("sample.EOT", end)
    generation = Generation(make_engine(Mesh(CPU)), PROMPTS, NEW, temperature=0)
    rows = collect(generation)
    for row, ids, full in zip(range(4), rows, greedy, strict=True):
        assert ids == (full[: full.index(end)] if end in full else full)
        assert generation.ends[row] == ("<|endoftext|>" if end in full else "context" if row == 2 else "max_new_tokens")
    assert generation.ends[1] == "<|endoftext|>" and len(generation.step_s) == 11


def test_draw():
    logits = torch.tensor([[2.0, 0.0, 3.0, 1.0, -1.0, 0.5]]).repeat(40_000, 1)
    generator = torch.Generator().manual_seed(0)

    def frequencies(*sampling):
        return torch.bincount(draw(logits, *sampling, generator), minlength=6) / len(logits)

    def softmax(kept, temperature=1.0):
        e = torch.tensor([2.718281828 ** (logits[0, i].item() / temperature) * (i in kept) for i in range(6)])
        return e / e.sum()

    assert frequencies(0, 50, 1.0).tolist() == [0, 0, 1, 0, 0, 0]
    for sampling, kept in (((1.0, 0, 1.0), range(6)), ((0.5, 50, 1.0), range(6)), ((1.0, 3, 1.0), (0, 2, 3)),
                           ((1.0, 0, 0.65), (0, 2)), ((1.0, 0, 0.6), (2,)), ((1.0, 3, 0.7), (0, 2)),
                           ((2.0, 1, 1.0), (2,)), ((1.0, 0, 1e-9), (2,))):
        assert (frequencies(*sampling) - softmax(kept, sampling[0])).abs().max() < 0.01, sampling
    assert torch.equal(*(draw(logits, 1.0, 0, 1.0, torch.Generator().manual_seed(3)) for _ in range(2)))


# the command line, on models with GPT-2's vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder that transformers wrote."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_head=3, n_layer=2, n_positions=64, initializer_range=0.2)).eval()
    path = tmp_path_factory.mktemp("hf")
    model.save_pretrained(path)
    return path, model


def run(*words, ranks=0):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run([sys.executable, *launch, "sample.py", *map(str, words)], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)


def test_as_a_user_runs_it(folder, tmp_path, capsys):
    path, model = folder
    prompts = ["Hello, I'm a language model,", "é", "def main(argv):"]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts))
    greedy = ["--hf", path, "--dtype=float32", "--temperature=0", "--max_new_tokens=20"]
    ids = [sample.encoding().encode(prompt) for prompt in prompts]
    want = [decode(model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), do_sample=False,
                                  max_new_tokens=20, pad_token_id=50256)[0]) for p in ids]

    done = run(*greedy, "--prompt", prompts[0])
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(want[0] + "\n\n1 process on cpu, float32, quantize = none\nended    1 at max_new")
    for text in ("prefill  8 tokens in ", "decode   19 steps of 1 tok, median ", " GB/s\nmemory   "):
        assert text in done.stdout

    done = run(*greedy, "--prompt_file", tmp_path / "prompts.txt", "--stream=false", ranks=2)
    assert done.returncode == 0, done.stderr
    text = "".join(f"── prompt {i}, sample 1\n{text}\n\n" for i, text in enumerate(want, start=1))
    assert done.stdout.startswith(text + "\n2 processes on cpu")

    sample.main([*map(str, greedy), "--dtype=bfloat16", "--prompt", prompts[1], "--num_samples=2", "--quantize=int8"])
    out = capsys.readouterr().out
    assert out.count("── prompt 1, sample ") == 2 and out.count("\né") == 2


def test_a_checkpoint_gives_what_its_weights_give(tmp_path, capsys):
    config = small_config(vocab_size=50257, out_dir=str(tmp_path / "run"))
    mesh, model = Mesh(CPU), perturbed(config)
    Saver(config, mesh, model, started(model, config), {}, 0).save(1, last=True)
    weights = whole_weights(model, config)
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/step_000001"):
        found, read = sample.open_model(sample.Options(checkpoint=str(path), dtype="float32"), mesh)
        assert all(torch.equal(read(name), weights[name]) for name in weights)
        assert found.n_head == config.n_head and found.block_size == config.block_size
    sample.main([f"--checkpoint={tmp_path / 'run'}", "--max_new_tokens=40"])  # no prompt: from <|endoftext|>
    assert "ended    1 at the context's end (32 tokens)" in capsys.readouterr().out


def started(model, config):
    """An optimizer with state to save."""
    optimizer = make_optimizer(model, config)
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    return optimizer


def test_the_trainers_samples(alone):
    """`generate` recomputes the prefix with the live model: the same ids as the engine's, greedy and drawn."""
    config = small_config(**SIZES)
    model = perturbed(config)
    for prompt, ids in zip(PROMPTS, alone[0]["greedy"], strict=True):
        assert sample.generate(model, Mesh(CPU), prompt, max_new_tokens=NEW, temperature=0) == [prompt + ids]
    a, b = sample.generate(model, Mesh(CPU), [5], max_new_tokens=8, num_samples=2, seed=1)
    assert a != b and a[0] == b[0] == 5
    assert collect(Generation(make_engine(Mesh(CPU)), [[5], [5]], 8, seed=1)) == [a[1:], b[1:]]


MISTAKES = {
    "no model": ([], "checkpoint = '', hf = '': give one of them"),
    "two models": (["--hf=a", "--checkpoint=b"], "checkpoint = 'b', hf = 'a': give one of them"),
    "no folder": (["--hf=/nowhere"], "hf = /nowhere: no such folder"),
    "no checkpoint": (["--checkpoint=/nowhere"], "/nowhere is no checkpoint"),
    "unknown key": (["--hf=MODEL", "--topk=3"], "unknown key --topk: did you mean --top_k?"),
    "two prompts": (["--hf=MODEL", "--prompt=a", "--prompt_file=b"], "prompt_file = 'b' beside a prompt"),
    "no prompt file": (["--hf=MODEL", "--prompt_file=/nowhere.txt"], "prompt_file = /nowhere.txt: No such file"),
    "empty prompt file": (["--hf=MODEL", f"--prompt_file={os.devnull}"], "it has no line that is not empty"),
    "long prompt": (["--hf=MODEL", "--prompt=" + " a b" * 40], "prompt 1 has 80 tokens, the model's context is "
                    "block_size = 64: shorten it to at most 63"),
    "temperature": (["--hf=MODEL", "--temperature=-1"], "temperature = -1.0: it must be at least 0"),
    "NaN": (["--hf=MODEL", "--temperature=nan"], "temperature = nan"),
    "top_k": (["--hf=MODEL", "--top_k=-1"], "top_k = -1: it must be at least 0"),
    "top_p": (["--hf=MODEL", "--top_p=0"], "top_p = 0.0: it must be above 0"),
    "tokens": (["--hf=MODEL", "--max_new_tokens=0"], "max_new_tokens = 0: it must be at least 1"),
    "samples": (["--hf=MODEL", "--num_samples=-2"], "num_samples = -2: it must be at least 1"),
    "seed": (["--hf=MODEL", "--seed=-2"], "seed = -2: it must be at least 0"),
    "quantize": (["--hf=MODEL", "--quantize=int2"], "--quantize = 'int2': it must be one of none, int8, int4"),
    "odd group": (["--hf=MODEL", "--quantize=int4", "--group_size=33"], "group_size = 33: it must be 32, 64 or 128"),
    "group": (["--hf=MODEL", "--quantize=int4", "--group_size=32"], "group_size = 32 does not divide the 48 inputs"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake, folder):
    words, message = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        sample.main([word.replace("MODEL", str(folder[0])) for word in words])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_rank_exits_with_2(folder):
    failed = run("--hf", folder[0], "--prompt=" + " a b" * 40, ranks=2)
    assert failed.stderr.count("error: ") == 1 and "prompt 1 has 80 tokens" in failed.stderr
    assert failed.stderr.count("exitcode  : 2") == 2 and "sample.py\", line" not in failed.stderr
    failed = run("--hf=/nowhere")
    assert failed.returncode == 2 and failed.stderr.startswith("error: hf = /nowhere: no such folder")
    assert failed.stderr.count("\n") == 1
