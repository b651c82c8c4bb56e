"""Weights in from other programs and out to them, against transformers itself."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from small import CPU, batch, small_config

import checkpoint
import hf
import train_gpt2_tp as trainer
from checkpoint import Saver
from config import VOCAB_SIZE, UserError
from mesh import Mesh, mesh_over_world
from model import real_shapes
from parallel import build_model, make_optimizer
from tokenizer import encoding
from train_gpt2_tp import train_step

SIZES = {12: {"n_head": 12, "n_embd": 48}, 25: {"n_head": 25, "n_embd": 100}}


@pytest.fixture(scope="module", autouse=True)
def offline():
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield
    patch.undo()


def hugging_face(folder: Path | None = None, vocab_size=1000, n_positions=32, **sizes):
    """transformers' own GPT-2 with every parameter random, saved to `folder` in several files with an index."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=n_positions, n_layer=2, **sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape)
    if folder:
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def from_folder(folder):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder).eval()


@torch.no_grad()
def logits_of(model, tokens):
    return getattr(out := model(tokens), "logits", out)


def imported(source, mesh=None, **keys):
    """Our model from hf.Source or a path, on one process unless a mesh is given."""
    source = hf.open_source(str(source)) if isinstance(source, str | Path) else source
    config = small_config(1 if mesh is None else 2, n_head=1, n_embd=1, init_from="x", **keys)
    hf.take_sizes(config, source)
    mesh = mesh(config) if mesh else Mesh(CPU)
    model = build_model(config, mesh)
    hf.load(source, config, mesh, model)
    return config, mesh, model


def there_and_back(rank, folder, ranks):
    """Import, note the logits, take a training step, note them again, save."""
    result = []
    for heads in SIZES:
        keys = {"tp": ranks, "out_dir": f"{folder}/run{heads}"}
        config, mesh, model = imported(f"{folder}/hf{heads}", ranks > 1 and (lambda c: mesh_over_world(c, CPU)), **keys)
        optimizer = make_optimizer(model, config)
        inputs, targets = batch(0, config)
        logits = [logits_of(model, inputs)]
        train_step(model, optimizer, inputs, targets, 0, config, mesh)
        logits.append(logits_of(model, inputs))
        Saver(config, mesh, model, optimizer, {}, 0).save(1, last=True)
        result.append(logits)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_round_trip_through_transformers(tmp_path, ranks):
    theirs = [hugging_face(tmp_path / f"hf{heads}", **sizes) for heads, sizes in SIZES.items()]
    results = run_ranks(there_and_back, 2, str(tmp_path), 2) if ranks == 2 else [there_and_back(0, str(tmp_path), 1)]
    inputs, _ = batch(0, small_config())
    for heads, model, *by_rank in zip(SIZES, theirs, *results, strict=True):
        out = hf.export(str(tmp_path / f"run{heads}"), str(tmp_path / f"out{heads}"))
        again = from_folder(out)
        for before, after in by_rank:
            assert (before - logits_of(model, inputs)).abs().max() < 1e-4
            assert (after - logits_of(again, inputs)).abs().max() < 1e-4
            assert (after - before).abs().max() > 1e-3


def test_export_is_a_whole_folder(tmp_path, monkeypatch):
    """Several files, generation config, and a tokenizer that makes our ids, through transformers' Auto classes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = small_config(vocab_size=VOCAB_SIZE, n_head=2, n_embd=8, out_dir=str(tmp_path / "run"))
    model = build_model(config, Mesh(CPU))
    optimizer = make_optimizer(model, config)
    inputs, targets = batch(0, config)
    train_step(model, optimizer, inputs, targets, 0, config, Mesh(CPU))
    Saver(config, Mesh(CPU), model, optimizer, {}, 0).save(1, last=True)
    monkeypatch.setattr(hf, "FILE_BYTES", 10_000)
    hf.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")])
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"} <= set(
        files) and "model.safetensors" not in files and len([name for name in files if name.startswith("model-")]) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.dtype == torch.float32 and AutoConfig.from_pretrained(tmp_path / "out").n_positions == 32
    assert (logits_of(theirs, inputs) - logits_of(model, inputs)).abs().max() < 1e-4
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert theirs.generation_config.eos_token_id == 50256

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("Hello, I'm a language model,", "  two  spaces\n\n\ttab \r\n", "naïve café 日本語 🤖 ñ", " ",
                 "it's we'll I'D", "1234 5x6 $%^ ...", "\u00a0\u3000x"):
        assert tokenizer(text)["input_ids"] == encoding().encode_ordinary(text), text
        assert tokenizer.decode(encoding().encode_ordinary(text), clean_up_tokenization_spaces=False) == text
    assert tokenizer.eos_token_id == tokenizer("<|endoftext|>")["input_ids"][0] == 50256
    assert tokenizer.model_max_length == 32 and len(tokenizer) == VOCAB_SIZE

    with pytest.raises(UserError, match="exists already"):
        hf.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")])
    for words in (["export"], ["import", "x", "--to", "y"], ["export", "--to", "y"], ["export", str(tmp_path / "run")]):
        with pytest.raises(UserError, match=r"python hf\.py export RUN --to DIR"):
            hf.main(words)
    with pytest.raises(UserError, match="is no checkpoint"):
        hf.main(["export", str(tmp_path), "--to", str(tmp_path / "other")])


class GPTConfig:
    """What build-nanogpt pickles beside its weights."""

    def __init__(self, **keys):
        vars(self).update(keys)


def nanogpt_state(theirs, prefix, rows):
    """transformers' weights as nanoGPT holds them: (out, in) matrices, a padded table twice, a mask."""
    state = {}
    for name, p in theirs.state_dict().items():
        if name.startswith("transformer.h.") and p.ndim == 2:
            p = p.t().contiguous()
        if name in ("transformer.wte.weight", "lm_head.weight"):
            p = torch.cat([p, torch.zeros(rows - len(p), p.shape[1])])
        state[prefix + name] = p
    state[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    return state


@pytest.mark.parametrize("kind, prefix", [("nanogpt", "_orig_mod."), ("nanogpt", ""), ("build-nanogpt", "")])
def test_nanogpt_files(tmp_path, monkeypatch, kind, prefix, capsys):
    theirs = hugging_face(vocab_size=VOCAB_SIZE, n_head=3, n_embd=12)
    state = nanogpt_state(theirs, prefix, 50304)
    args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 32, "vocab_size": 50304}
    if kind == "nanogpt":
        stored = {"model": state, "model_args": args | {"bias": True, "dropout": 0.0}, "iter_num": 5,
                  "best_val_loss": torch.tensor(3.0), "config": {"out_dir": "out", "compile": True}}
    else:
        GPTConfig.__module__ = "__main__"
        monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
        stored = {"model": state, "config": GPTConfig(**args), "step": 5, "val_loss": 3.0}
    torch.save(stored, tmp_path / "ckpt.pt")
    monkeypatch.undo()
    config, _, model = imported(tmp_path / "ckpt.pt")
    assert config.vocab_size == VOCAB_SIZE and config.n_layer == 2
    tokens = torch.arange(64).view(2, 32) * 700
    assert (logits_of(model, tokens) - logits_of(theirs, tokens)).abs().max() < 1e-4
    assert ("GELU is exact" in capsys.readouterr().err) == (kind == "nanogpt")


def test_nanogpt_without_biases(tmp_path):
    theirs = hugging_face(n_head=3, n_embd=12)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    state = {name: p for name, p in nanogpt_state(theirs, "", 1000).items() if not name.endswith("bias")}
    args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 32, "vocab_size": 1000, "bias": False}
    torch.save({"model": state, "model_args": args}, tmp_path / "ckpt.pt")
    tokens = batch(0, small_config())[0]
    model = imported(tmp_path / "ckpt.pt")[2]
    assert (logits_of(model, tokens) - logits_of(theirs, tokens)).abs().max() < 1e-4
    torch.save({"model": state, "model_args": args | {"bias": True}}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt: has no h\.0\.ln_1\.bias"):
        imported(tmp_path / "ckpt.pt")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def change(**keys):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))
    return apply


def remove(pattern):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


WRONG = {
    "gelu": (change(activation_function="gelu"), r"activation_function = gelu; GPT-2 has gelu_new"),
    "llama": (change(model_type="llama"), "model_type = llama"),
    "wide": (change(n_inner=77), "n_inner = 77"),
    "sizes": (change(n_embd=24), r"wte\.weight is \(1000, 12\), but its sizes say \(1000, 24\)"),
    "deep": (change(n_layer=3), r"has no h\.2\.ln_1\.weight"),
    "no sizes": (change(n_head=None), r"n_head is missing"),
    "no json": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: Expecting property name"),
    "no config": (remove("config.json"), "is no checkpoint"),
    "no weights": (remove("*.safetensors*"), r"no model\.safetensors"),
    "a file less": (remove("model-00001*"), r"model-00001.*No such file"),
    "damaged": (lambda folder: next(folder.glob("model-00001*")).write_bytes(b"x" * 50), "model-00001"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    hugging_face(folder, n_head=3, n_embd=12)
    return folder


@pytest.mark.parametrize("what", WRONG)
def test_bad_sources_are_named(folder, tmp_path, what):
    harm, message = WRONG[what]
    copy = shutil.copytree(folder, tmp_path / "copy")
    harm(copy)
    with pytest.raises(UserError, match=message):
        imported(copy)


def test_other_mistakes(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no such file or folder, and none of gpt2, gpt2-medium"):
        hf.open_source(str(tmp_path / "nothing"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"not to be had from the Hugging Face Hub .* --init_from=PATH"):
        hf.open_source("gpt2-xl")
    with pytest.raises(UserError, match="block_size = 64: init_from = x has only 32 positions"):
        imported(folder, block_size=64)
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, "evil.pt")
    with pytest.raises(UserError, match="no checkpoint of nanoGPT"):
        hf.open_source("evil.pt")
    assert not Path("owned").exists()
    theirs = hugging_face(n_head=3, n_embd=12)
    state = nanogpt_state(theirs, "", 1000)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 32, "vocab_size": 1000}
    torch.save({"model": state, "model_args": args}, "untied.pt")
    with pytest.raises(UserError, match="embeddings are tied"):
        imported("untied.pt")


def test_finetuning_from_a_folder_and_from_a_run(folder, tmp_path, capsys):
    """The trainer, at half the context: validation before the first step is transformers' loss on these windows."""
    tokens = (np.arange(3000) * 7 % 997).astype(np.uint16)
    for split in ("train", "val"):
        np.save(tmp_path / f"{split}_000000.npy", tokens)
    source = shutil.copytree(folder, tmp_path / "source")

    def words(run, init_from):
        return [f"--init_from={init_from}", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / run}", "--block_size=16",
                "--total_batch_size=64", "--micro_batch_size=4", "--max_steps=2", "--eval_steps=1", "--dtype=float32",
                "--sample_interval=0", "--checkpoint_interval=2", "--eval_interval=2", "--warmup_steps=1"]

    def validation(run):
        rows = map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if row["kind"] == "val"}
    trainer.main(words("one", source))
    windows = torch.from_numpy(tokens[:65].astype(np.int64))
    with torch.no_grad():
        logits = from_folder(folder)(windows[:64].view(4, 16)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[1:]).item()
    assert abs(validation("one")[0] - expected) < 1e-4 and validation("one")[2] < expected

    trainer.main(words("two", tmp_path / "one"))  # from a run: its weights, not its step or its optimizer
    assert validation("two")[0] == validation("one")[2]
    shorter = checkpoint.find(tmp_path / "one")
    config, _, model = imported(shorter, block_size=8)
    assert real_shapes(config)["wpe.weight"] == (8, 12) and model.wpe.weight.shape == (8, 12)
    whole = imported(shorter, block_size=16)[2]
    assert torch.equal(model.wpe.weight, whole.wpe.weight[:8]) and torch.equal(model.wte.weight, whole.wte.weight)

    shutil.rmtree(source)  # to go on, a run needs its own checkpoint only
    trainer.main([*words("one", source), "--resume=true"])
    with pytest.raises(UserError, match="lies in out_dir, which overwrite deletes"):
        trainer.main([*words("one", tmp_path / "one/checkpoints/best"), "--overwrite=true"])
