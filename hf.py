"""GPT-2 weights in from, and out to, other programs.

    torchrun … train_gpt2_tp.py … --init_from=gpt2-xl        gpt2, gpt2-medium, gpt2-large: from the Hugging Face Hub
                                  --init_from=PATH           a Hugging Face folder (config.json, *.safetensors),
                                                             a .pt file of nanoGPT or build-nanogpt, a run's folder
    python hf.py export out/run --to DIR                     a folder for transformers' from_pretrained

What differs: OpenAI's `c_attn` is [Q | K | V], each head by head, ours (head, q k v, head_dim); Hugging Face's matrices
are (in, out), ours and nanoGPT's (out, in). Everything else has the same names and shapes.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from config import VOCAB_SIZE, Config, UserError, parse, run
from mesh import Mesh
from model import GPT, Sizes, real_shapes
from parallel import fill
from tokenizer import EOT, MERGES, encoding

HUB = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FILE_BYTES = 5 * 10**9  # of an exported file, at the most; transformers' own limit
PADDED_VOCAB = 50304  # nanoGPT's: rows beyond GPT-2's 50,257 are no tokens

# config.json's keys that change what is computed: the values that this model is. A key left out means GPT-2's own.
FIXED = {"model_type": ("gpt2",), "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "n_inner": (None,),
         "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
         "tie_word_embeddings": (True,), "add_cross_attention": (False,)}


@dataclass
class Source:
    """Weights that a run can start from.

    `sizes` has n_layer, n_head, n_embd, vocab_size and block_size. `tensor(name)` is a parameter in our layout, under
    our name, float32 or whatever it is stored in; None where `folder` is a checkpoint of ours.
    """

    sizes: dict[str, int]
    tensor: Callable[[str], torch.Tensor] | None = None
    folder: Path | None = None


def open_source(init_from: str) -> Source:
    """What `init_from` names: one of HUB, or a path.

    Raises:
        UserError: nothing there, damaged, or a model that is not GPT-2.
    """
    path = Path(init_from)
    if init_from in HUB and not path.exists():
        path = _download(init_from)
    if (path / "config.json").is_file():
        return _hugging_face(path)
    if path.is_file() and path.suffix in (".pt", ".pth", ".bin"):
        return _nanogpt(path)
    if not path.exists():
        raise UserError(f"init_from = {init_from}: no such file or folder, and none of {', '.join(HUB)}")
    folder = checkpoint.find(path)
    config = checkpoint.read(folder)["config"]
    return Source({key: config[key] for key in checkpoint.SIZES}, folder=folder)


def take_sizes(config: Config, source: Source) -> None:
    """Set the model's sizes in `config` to those of the weights; `block_size` may be shorter, `wpe` is then cropped."""
    for key in ("n_layer", "n_head", "n_embd", "vocab_size"):
        setattr(config, key, source.sizes[key])
    if config.block_size > source.sizes["block_size"]:
        raise UserError(f"block_size = {config.block_size}: init_from = {config.init_from} has only "
                        f"{source.sizes['block_size']} positions; lower block_size")


def load(source: Source, config: Config, mesh: Mesh, model: GPT) -> None:
    """Fill this rank's shards, one parameter at a time. All ranks call it."""
    if source.folder:
        checkpoint.verify(source.folder, mesh)
        checkpoint.load(source.folder, config, mesh, model)
        return
    shapes = real_shapes(config)
    for name, p in model.named_parameters():
        value = source.tensor(name)
        if name in ("wte.weight", "wpe.weight"):
            value = value[: shapes[name][0]]
        if value.shape != shapes[name]:
            raise UserError(f"init_from = {config.init_from}: {name} is {tuple(value.shape)}, but its sizes say "
                            f"{tuple(shapes[name])}")
        fill(p, value)


def _download(name: str) -> Path:
    """The folder of a model of OpenAI's in the Hub's cache."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=[
            "config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]))
    except Exception as error:  # of many kinds: no network, no such host, time-out, disk
        raise UserError(f"init_from = {name}: not to be had from the Hugging Face Hub ({type(error).__name__}); get "
                        "its config.json and model.safetensors on another machine and give their folder, "
                        "--init_from=PATH") from None


def _hugging_face(folder: Path) -> Source:
    from safetensors import SafetensorError, safe_open

    def text(name):
        try:
            return json.loads((folder / name).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / name}: {error}") from None
    config = text("config.json")
    for key, allowed in FIXED.items():
        given = config.get(key, allowed[0])
        if given not in allowed and not (key == "n_inner" and given == 4 * config.get("n_embd", 0)):
            raise UserError(f"{folder / 'config.json'}: {key} = {given}; GPT-2 has {allowed[0]}")
    names = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "vocab_size": "vocab_size",
             "block_size": "n_positions"}
    if missing := [key for key in names.values() if not isinstance(config.get(key), int)]:
        raise UserError(f"{folder / 'config.json'}: {missing[0]} is missing")
    sizes = {ours: config[theirs] for ours, theirs in names.items()}

    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            where = {name: folder / Path(file).name for name, file in text(index.name)["weight_map"].items()}
        elif (folder / "model.safetensors").exists():
            with safe_open(folder / "model.safetensors", "pt") as file:
                where = dict.fromkeys(file.keys(), folder / "model.safetensors")
        else:
            raise UserError(f"{folder}: no model.safetensors; save the model with transformers' save_pretrained")
    except (SafetensorError, KeyError) as error:
        raise UserError(f"{folder}: {error}") from None

    def read(name):
        try:
            with safe_open(where[name], "pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{where[name]}: {error}") from None
    return _source(folder, sizes, where, read, transposed=True)


class GPTConfig:
    """Stands for build-nanogpt's class of this name, which its checkpoints hold pickled as `__main__.GPTConfig`."""


def _nanogpt(path: Path) -> Source:
    try:
        with torch.serialization.safe_globals([(GPTConfig, "__main__.GPTConfig")]):
            stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        nanogpt = "model_args" in stored
        args = stored["model_args"] if nanogpt else vars(stored["config"])
        state = {name.removeprefix("_orig_mod."): tensor for name, tensor in stored["model"].items()}
        sizes = {key: args[key] for key in checkpoint.SIZES}
    except Exception as error:  # whatever a file that is none of the two may hold
        raise UserError(f"{path}: no checkpoint of nanoGPT or build-nanogpt "
                        f"({str(error).splitlines()[0] if str(error) else type(error).__name__})") from None
    if nanogpt:
        print(f"warning: {path}: nanoGPT's GELU is exact, this one is OpenAI's tanh approximation; the loss starts a "
              "little higher", file=sys.stderr, flush=True)
    if sizes["vocab_size"] == PADDED_VOCAB:
        sizes["vocab_size"] = VOCAB_SIZE
    zeros = () if args.get("bias", True) else real_shapes(Config(**sizes))
    return _source(path, sizes, state, state.__getitem__, transposed=False, zeros=zeros)


def _source(path: Path, sizes: dict[str, int], names, read, *, transposed: bool, zeros=()) -> Source:
    """`names` are the stored ones, with or without `transformer.`; `zeros` the shapes of biases that may be missing."""
    stored = {name.removeprefix("transformer."): name for name in names}

    def tensor(name):
        if name not in stored:
            if name.endswith("bias") and name in zeros:
                return torch.zeros(zeros[name])
            raise UserError(f"{path}: has no {name}")
        value = read(stored[name])
        if transposed and name.startswith("h.") and value.ndim == 2:
            value = value.t()
        if ".c_attn." in name:  # (q k v, head, head_dim) → (head, q k v, head_dim)
            value = value.unflatten(0, (3, sizes["n_head"], -1)).transpose(0, 1).flatten(0, 2)
        if name == "wte.weight" and "lm_head.weight" in stored and not torch.equal(
                value[: sizes["vocab_size"]], read(stored["lm_head.weight"])[: sizes["vocab_size"]]):
            raise UserError(f"{path}: lm_head.weight is not wte.weight; this GPT-2's embeddings are tied")
        return value
    return Source(sizes, tensor)


# ---------------------------------------------------------------------------------------------------------------------
# out


def export(path: str, to: str) -> Path:
    """Write a checkpoint as a folder that transformers loads offline: weights in float32, configs, tokenizer.

    Holds the parameters once, and the file that is being written. A vocabulary other than GPT-2's gets no tokenizer.

    Raises:
        UserError: no checkpoint at `path`, a damaged one, or a `to` that holds something.
    """
    folder, out = checkpoint.find(path), Path(to)
    stored = checkpoint.read(folder)["config"]
    config = Config(**{key: stored[key] for key in checkpoint.SIZES})
    mesh = Mesh(torch.device("cpu"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--to {out}: exists already; name a new folder")
    checkpoint.verify(folder, mesh)
    with torch.device("meta"):
        model = GPT(config, Sizes.real(config))
    model.to_empty(device="cpu")
    model.tie()
    checkpoint.load(folder, config, mesh, model)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _export_weights(model, config, out)
        special = {"bos_token_id": EOT, "eos_token_id": EOT} if config.vocab_size == VOCAB_SIZE else {}
        _json(out / "config.json", {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32",
            "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
            "n_positions": config.block_size, "vocab_size": config.vocab_size, "initializer_range": 0.02,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), stored["dropout"]), **special,
            **{key: allowed[0] for key, allowed in FIXED.items()}})
        _json(out / "generation_config.json", {"do_sample": True, "top_k": 50, **special})
        if special:
            _export_tokenizer(config, out)
    except OSError as error:
        raise UserError(f"--to {out}: {error.strerror or error}") from None
    return out


def _export_weights(model: GPT, config: Config, out: Path) -> None:
    from safetensors.torch import save_file

    files, room = [[]], FILE_BYTES  # names by file
    for name, p in model.named_parameters():
        if p.nbytes > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= p.nbytes
    parameters, index = dict(model.named_parameters()), {}
    for i, names in enumerate(files):
        file = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        tensors = {}
        for name in names:
            value = parameters[name].detach()
            if ".c_attn." in name:  # (head, q k v, head_dim) → (q k v, head, head_dim)
                value = value.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
            if name.startswith("h.") and value.ndim == 2:
                value = value.t()
            tensors[f"transformer.{name}"] = value.contiguous()
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        _json(out / "model.safetensors.index.json", {
            "metadata": {"total_size": sum(p.nbytes for p in parameters.values())}, "weight_map": index})


def _export_tokenizer(config: Config, out: Path) -> None:
    encoding()  # checks the merge list
    merges = MERGES.read_text(encoding="utf-8")
    printable = [chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    tokens = printable + [chr(256 + i) for i in range(256 - len(printable))]  # a byte as a character: tokenizer.py
    tokens += [line.replace(" ", "") for line in merges.splitlines()[1:]] + ["<|endoftext|>"]
    _json(out / "vocab.json", {token: i for i, token in enumerate(tokens)})
    (out / "merges.txt").write_text(merges, encoding="utf-8")
    _json(out / "tokenizer_config.json", {
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": config.block_size, "add_prefix_space": False,
        "bos_token": tokens[EOT], "eos_token": tokens[EOT], "unk_token": tokens[EOT]})


def _json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass
class Options:
    """Export a checkpoint for transformers: python hf.py export RUN --to DIR"""

    to: str = ""
    """Folder to write, new or empty."""


def main(argv: list[str]) -> None:
    given = argv[:1] == ["export"] and len(argv) > 1 and not argv[1].startswith("-")
    options = parse(Options, argv[2:] if given else [word for word in argv if word in ("-h", "--help")])
    if not given or not options.to:
        raise UserError("python hf.py export RUN --to DIR: RUN is a run's folder or one of its checkpoints")
    print(f"wrote   {export(argv[1], options.to)}", flush=True)


if __name__ == "__main__":
    run(main)
