"""Will it fit, will it pay: memory, traffic and time of a step on every mesh of so many GPUs, from formulas.

    python benchmark.py --plan configs/gpt2_1558m.toml --gpus 8 --gpu h100

Bytes are held to what the trainer does by tests: memory to within 10% of the allocator's peak, traffic exactly. What is
assumed beside that:
- Memory is what tensors hold at the worst moment of a step. The CUDA context, NCCL's buffers and fragmentation are not
  in it: a mesh fits if 90% of the card, less 1.5 GiB, is enough. Compiled blocks keep no more than eager ones;
  dropout = 0 and loss_parallel = true.
- Matrix products (the model's FLOPs, padding and recomputation included) run at 70% of the data sheet's dense rate,
  everything else at 80% of the memory's bandwidth: each block reads or writes about 4 times what it keeps, the
  optimizer 28 bytes a parameter.
- A ring of n ranks moves (n − 1)/n of an all-gather's or reduce-scatter's payload over each link, twice that for an
  all-reduce, at 75% of the link's rate in one direction, and takes 20 µs to start. All GPUs hang on one kind of link.
- Tensor parallelism's collectives and the gradient all-reduce of dp_replicate wait for their turn; FSDP's are hidden
  behind the matrix products as far as these last.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

import config as configuration
from config import Config, UserError
from metrics import GPU_TFLOPS, flops_per_token
from model import GPT, Sizes, _LinearCrossEntropy
from parallel import BUCKET

MODES = ("none", "selective", "block")  # activation_checkpointing, from the fastest
# the name in metrics.GPU_TFLOPS, GiB of memory, its GB/s, the link's GB/s in one direction (NVLink, or PCIe)
GPUS = {"b200": ("B200", 180, 8000, 900), "h200": ("H200", 141, 4800, 450), "h100": ("H100", 80, 3350, 450),
        "h100-pcie": ("H100 PCIe", 80, 2000, 64), "a100": ("A100", 80, 2039, 300), "a100-40": ("A100", 40, 1555, 300),
        "l40s": ("L40S", 48, 864, 32), "rtx5090": ("RTX 5090", 32, 1792, 64), "rtx4090": ("RTX 4090", 24, 1008, 32)}


@dataclass(frozen=True)
class Shape:
    """Sizes on one rank: elements of parameters, widths, bytes of the compute dtype."""

    block: int  # parameters of a block that the rank computes with (before FSDP shards them)
    weights: int  # those of them that are matrices
    root: int  # parameters outside the blocks
    replicated: int  # parameters that every tp rank holds whole
    table: int  # V·C of the vocabulary shard
    heads: int
    attention: int  # heads · head_dim
    hidden: int
    vocab: int
    tokens: int  # N, of a micro-batch
    between: int  # ranks over which activations between blocks are sharded
    dtype: int

    @classmethod
    def of(cls, c: Config) -> "Shape":
        sizes = Sizes.padded(c, c.tp)
        with torch.device("meta"):
            model = GPT(replace(c, n_layer=1), sizes)
        block = weights = root = replicated = 0
        for name, p in model.named_parameters():
            split = name == "wte.weight" or "c_attn" in name or "c_fc" in name or name.endswith("c_proj.weight")
            n, inside = p.numel() // c.tp if split else p.numel(), name.startswith("h.")
            block, root = block + n * inside, root + n * (not inside)
            weights += n * (inside and p.ndim == 2)
            replicated += n * (not split) * (c.n_layer if inside else 1)
        head_dim = c.n_embd // c.n_head
        return cls(block, weights, root, replicated, sizes.vocab // c.tp * c.n_embd, sizes.heads // c.tp,
                   sizes.heads // c.tp * head_dim, sizes.hidden // c.tp, sizes.vocab // c.tp,
                   c.micro_batch_size * c.block_size, c.tp if c.sequence_parallel else 1, c.torch_dtype.itemsize)


def mode(c: Config) -> str:
    """What is recomputed: a compiler chooses for itself what `selective` would."""
    return "none" if c.activation_checkpointing == "selective" and c.compile else c.activation_checkpointing


def kept(c: Config, s: Shape, mode: str) -> int:
    """Bytes that a block's forward leaves for its backward.

    The residual stream is float32; layer norms hand on gathered activations; q, k, v and what attention makes of them;
    the hidden units before and after GELU; and, without FSDP, the weights cast to the compute dtype.
    """
    N, C, b = s.tokens, c.n_embd, s.dtype
    residual = 4 * N * C // s.between
    if mode == "block":
        return residual
    attention = 4 * b * N * s.attention + 4 * N * s.heads
    if mode == "selective":  # products, attention and what has crossed ranks
        return residual + attention + b * N * s.hidden + 2 * b * N * C + 2 * b * N * C // s.between * (c.tp > 1)
    casts = b * s.weights if b < 4 and c.dp_shard == 1 else 0
    return 2 * residual + 2 * b * N * C + 16 * N // s.between + attention + 2 * b * N * s.hidden + casts


def memory(c: Config, device: str = "cuda") -> dict[str, int]:
    """Bytes of one rank: its parameters, gradients, optimizer state, activations kept for the backward, logits with
    what the loss needs around them, and `peak`, the most that is alive at any moment of a step."""
    s = Shape.of(c)
    N, C, b, L, d = s.tokens, c.n_embd, s.dtype, c.n_layer, c.dp_shard
    mixed = b < 4
    P = (L * s.block + s.root) // d
    block, whole = kept(c, s, mode(c)), kept(c, s, "none")
    activations = L * block + 4 * N * C // s.between + b * N * C
    chunk = _LinearCrossEntropy.CHUNK[device]
    rows = 4 * min(N * s.vocab, chunk) * (1 + (N * s.vocab > chunk)) * mixed  # float32: the next chunk beside the last
    logits = b * N * s.vocab + b * s.table * (mixed and d == 1) + max(rows, (b * mixed + 4) * s.table)
    # the MLP's backward: gradients of the residual stream, of its gathered output and of hidden units, and of a matrix
    moving = 4 * N * C // s.between + b * N * C + b * N * s.hidden + (b * mixed + 4) * C * s.hidden
    # the block that is being recomputed, less what it has kept
    again = {"none": 0, "block": whole, "selective": whole - 4 * b * N * s.attention - b * N * s.hidden}[mode(c)]
    # from the second micro-batch on gradients are there from the start, FSDP's whole where it reduces them once a step
    earlier = c.accumulation > 1 and 4 * P * (1 if c.accumulate_sharded else d)
    block_grad, grads = (0, 0) if earlier else (4 * s.block // d, 4 * P)
    tables = 2  # gradients of both uses of the tied table
    if d == 1:
        bucket = 4 * min(P, max(BUCKET, s.table)) * (c.dp_replicate > 1)
        end = max(grads + bucket, 4 * s.table * tables + (grads and grads - 4 * s.table))
        gathered, reduction, waiting = 0, 0, 4 * s.table
    else:  # in the compute dtype: the root's and two blocks' gathered weights, and gradients until they are reduced
        moving += b * s.block - (b * mixed + 4) * C * s.hidden
        end = L * block_grad + max(b * s.root + tables * b * s.table, (b + 4) * s.root + 4 * s.root // d)
        gathered = b * s.root + b * s.block * (2 if c.reshard_after_forward else L)
        reduction, waiting = (b + 4) * s.block + 4 * s.block // d, b * s.table
    head = activations + logits + gathered - b * s.block * (d > 1 and c.reshard_after_forward)
    # the first and the last block of the backward; the head's share of the table's gradient waits for the embedding's
    first = activations + waiting + gathered + max(again + moving, reduction - block)
    last = (L - 1) * block_grad + waiting + gathered + max(block + again + moving, reduction)
    peak = 12 * P + earlier + max(head, first, last, end)
    return {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 8 * P, "activations": activations, "logits": logits,
            "peak": peak}


def traffic(c: Config) -> dict[str, tuple[int, int, int]]:
    """Collectives of a step on a rank, as {who: (count, payload bytes, ring bytes over a link)}.

    `tp`: activations, the loss, the replicated gradients and the norm; `replicate`: the gradients' all-reduces over
    dp; `shard`: FSDP's all-gathers and reduce-scatters.
    """
    s = Shape.of(c)
    N, C, b, L, micro = s.tokens, c.n_embd, s.dtype, c.n_layer, c.accumulation
    found = {"tp": Counter(), "replicate": Counter(), "shard": Counter()}

    def add(who: str, n: int, payload: int, ranks: int, factor: int = 1) -> None:
        found[who].update(count=n, payload=n * payload, link=n * factor * payload * (ranks - 1) / ranks)
    if c.tp > 1:
        # a reduce-scatter and an all-gather of one unit of traffic each, or an all-reduce of two
        kinds = (2, 1) if c.sequence_parallel else (1, 2)
        # what a block recomputes: all-gathers into products; or everything but its last collective
        again = {"none": 0, "selective": 2 * (kinds[0] == 2), "block": 2 * kinds[0] - 1}[mode(c)]
        add("tp", micro * ((4 * L + 1) * kinds[0] + L * again), b * N * C, c.tp, kinds[1])  # blocks, and the head
        table = b if c.dp_shard > 1 else 4  # bytes of what FSDP gathers, or of float32 embeddings and their gradient
        add("tp", micro * kinds[0], table * N * C, c.tp, kinds[1])
        if c.sequence_parallel and c.dp_shard > 1:  # FSDP's hooks have gradients made whole one by one
            add("tp", micro * (4 * L + 2), b * C, c.tp, 2)
            add("tp", micro, b * c.block_size * C, c.tp, 2)
        add("tp", micro, 4 * N, c.tp, 2)  # the loss: row maxima, then row sums and target logits
        add("tp", micro, 8 * N, c.tp, 2)
        if c.dp_shard == 1 and (c.sequence_parallel or c.dp > 1):  # replicated parameters' gradients
            whole = 2 * C * L * (c.dp == 1)  # row-parallel biases, whose gradients need no sum over tp
            add("tp", 1, 4 * (s.replicated - whole), c.tp * c.dp, 2)
    if c.tp * c.dp_shard > 1:
        add("tp", 1, 4, c.tp * c.dp, 2)  # the norm
    if c.dp_shard > 1:
        gathers = 2 if c.reshard_after_forward else 1
        add("shard", micro * gathers * L, b * s.block, c.dp_shard)
        add("shard", micro, b * s.root, c.dp_shard)
        reductions = micro if c.accumulate_sharded else 1
        add("shard", reductions * L, 4 * s.block, c.dp_shard)
        add("shard", reductions, 4 * s.root, c.dp_shard)
        if c.dp_replicate > 1:
            add("replicate", L, 4 * s.block // c.dp_shard, c.dp_replicate, 2)
            add("replicate", 1, 4 * s.root // c.dp_shard, c.dp_replicate, 2)
    elif c.dp > 1:
        own = L * s.block + s.root - s.replicated * (c.tp > 1)
        n = math.ceil(own / BUCKET)
        add("replicate", n, 4 * own / n, c.dp, 2)
    return {who: (v["count"], round(v["payload"]), v["link"]) for who, v in found.items()}


def step_seconds(c: Config, gpu: str) -> float:
    """Estimated time of a step, by the assumptions above."""
    s = Shape.of(c)
    name, _, bandwidth, link = GPUS[gpu]
    recomputed = 4 / 3 if c.activation_checkpointing == "block" else 1
    flops = 6 * (c.n_layer * s.weights + s.table) + 12 * c.n_layer * s.attention * c.block_size  # a token, on this rank
    products = recomputed * flops * s.tokens * c.accumulation / (0.7e12 * GPU_TFLOPS[name])  # seconds
    moved = c.accumulation * 4 * c.n_layer * kept(c, s, "none") + 28 * (c.n_layer * s.block + s.root) // c.dp_shard
    waits = {who: n * 20e-6 + size / (0.75e9 * link) for who, (n, _, size) in traffic(c).items()}
    exposed = waits["tp"] + waits["replicate"] + max(0.0, waits["shard"] - products)
    return products + moved / (0.8e9 * bandwidth) + exposed


def table(c: Config, gpus: int, gpu: str) -> tuple[list[dict], list[str]]:
    """A line for every mesh of so many GPUs, and why other meshes are none. In a line: `config`, in the fastest
    checkpointing mode that fits (else the leanest), `modes` (mode → memory), `seconds` a step, `bytes` of collectives,
    `fits`. The fastest come first, those that do not fit last."""
    lines, refused, room = [], [], 0.9 * GPUS[gpu][1] * 2**30 - 1.5 * 2**30
    degrees = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp, shard in ((tp, shard) for tp in degrees for shard in degrees if gpus // tp % shard == 0):
        mesh = replace(c, tp=tp, dp_shard=shard, dp_replicate=gpus // tp // shard, async_tp=c.async_tp and tp > 1)
        try:
            configuration.check(mesh, gpus)
        except UserError as error:
            refused.append(f"tp {tp}, dp_shard {shard}: {error}")
            continue
        by_mode = {mode: replace(mesh, activation_checkpointing=mode) for mode in MODES}
        modes = {mode: memory(config) for mode, config in by_mode.items()}
        fitting = [mode for mode in MODES if modes[mode]["peak"] <= room]
        chosen = by_mode[fitting[0] if fitting else "block"]
        lines.append({"config": chosen, "modes": modes, "fits": bool(fitting), "seconds": step_seconds(chosen, gpu),
                      "bytes": sum(payload for _, payload, _ in traffic(chosen).values())})
    return sorted(lines, key=lambda line: (not line["fits"], line["seconds"])), refused


def main(path: str, c: Config, gpus: int, gpu: str) -> None:
    """Print the table and the line to start the best mesh with.

    Raises:
        UserError: a kind of GPU that is not known; no mesh of so many GPUs, or none with room.
    """
    if gpu not in GPUS:
        raise UserError(f"--gpu = {gpu!r}: it must be one of {', '.join(GPUS)}")
    lines, refused = table(c, gpus, gpu)
    if not lines:
        raise UserError(f"--gpus = {gpus}: no mesh serves; {refused[0]}")
    print(f"{path} on {gpus} × {gpu} ({GPUS[gpu][1]} GiB), micro_batch_size = {c.micro_batch_size}; GiB a rank; "
          "activations and peak for activation_checkpointing = none / selective / block\n")
    rows = [["tp × shard × repl", "parameters", "gradients", "optimizer", "logits", "activations", "peak", "fits",
             "GB sent", "s a step", "tok/s", "MFU"]]
    for line in lines:
        mesh, modes = line["config"], line["modes"].values()
        speed = mesh.total_batch_size / line["seconds"]
        rows.append([f"{mesh.tp} × {mesh.dp_shard} × {mesh.dp_replicate}",
                     *(f"{line['modes']['none'][key] / 2**30:.2f}" for key in rows[0][1:5]),
                     *(" / ".join(f"{one[key] / 2**30:.1f}" for one in modes) for key in rows[0][5:7]),
                     mesh.activation_checkpointing if line["fits"] else "no", f"{line['bytes'] / 1e9:.1f}",
                     f"{line['seconds']:.2f}", f"{speed:,.0f}",
                     f"{speed * flops_per_token(mesh) / gpus / GPU_TFLOPS[GPUS[gpu][0]] / 1e12:.0%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows))
    if refused:
        print(f"\n{len(refused)} other meshes do not serve, e.g. {refused[0]}")
    if not lines[0]["fits"]:
        raise UserError(f"micro_batch_size = {c.micro_batch_size} fits on no mesh of {gpus} × {gpu}: lower it")
    best = lines[0]["config"]
    print("\nestimates, whose assumptions are in plan.py: time the best few with benchmark.py. The fastest that fits:\n"
          f"torchrun --standalone --nproc-per-node={gpus} train_gpt2_tp.py {path} --tp={best.tp} "
          f"--dp_shard={best.dp_shard} --dp_replicate={best.dp_replicate} --micro_batch_size={best.micro_batch_size} "
          f"--activation_checkpointing={best.activation_checkpointing}")
