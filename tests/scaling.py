"""Write docs/collectives.md and docs/scaling.png: what a rank of GPT-2 sends and holds at tp = 1 to 8.

    python tests/scaling.py

The table is counted on simulated ranks of GPT-2 124M at its real size, one after the other (2 GB of memory, some
minutes of one core). The curves are plan.py's, which tests hold to what ranks use; the dots are simulated ranks.
"""

from conftest import ROOT
from simulated import simulate
from test_benchmark import one_step

import config as configuration
import plan
from config import Config, check

SIZES = {"124M": "gpt2_124m", "350M": "gpt2_350m", "774M": "gpt2_774m", "1558M": "gpt2_1558m"}
TEXT = """# Collectives of a step

GPT-2 124M, one micro-batch of {batch} sequences of {block} tokens, {dtype}, counted on simulated ranks by
`python tests/scaling.py`. Bytes are payloads on one rank: what an all-gather puts out, a reduce-scatter or all-reduce
takes in. The floor is Megatron's: 4 all-reduces a block, or with sequence parallelism 4 all-gathers and 4
reduce-scatters, of B·T·C each ({unit:.2f} MB in {dtype}): {layers} blocks, {floor:.1f} MB with all-reduces.

| tp | sequence parallel | collectives | of them in blocks | floor | MB | in blocks | floor | ratio in blocks | in all |
| -: | - | -: | -: | -: | -: | -: | -: | -: | -: |
{rows}
Blocks are at the floor exactly: they are counted as the difference that layers make. What comes on top does not depend
on depth but for the sequence-parallel all-reduce of the replicated parameters' gradients (6·C numbers a block, all in
one): the embedding's reduction and its gradient's (float32), the head's all-gather and reduce-scatter, the loss's two
(4 and 8 bytes a token), and one number for the gradient norm.

A ring carries an all-gather or reduce-scatter of S bytes in (n − 1)/n · S over each link and an all-reduce in twice
that: with or without sequence parallelism the links carry the same.
"""


def small_batch(size: str, tp: int, **keys) -> Config:
    c = configuration.parse(Config, [str(ROOT / f"configs/{SIZES[size]}.toml")], toml=True)
    values = vars(c) | {"tp": tp, "compile": False, "eval_interval": 0} | keys
    c = Config(**values)
    c.total_batch_size = c.micro_batch_size * c.block_size
    check(c, tp)
    return c


def count(tp: int, sequence_parallel: bool, layers: int) -> tuple[int, dict, dict]:
    c = small_batch("124M", tp, sequence_parallel=sequence_parallel, n_layer=layers, block_size=256, micro_batch_size=4)
    return one_step(c)


def collectives() -> dict:
    """Write the table; returns the peak bytes of a rank by tp, with sequence parallelism."""
    rows, peaks = "", {}
    c = small_batch("124M", 1, block_size=256, micro_batch_size=4)
    unit = c.micro_batch_size * c.block_size * c.n_embd * c.torch_dtype.itemsize
    for tp in (2, 4, 8):
        for parallel in (True, False):
            peak, counts, sizes = simulate(count, tp, tp, parallel, c.n_layer)
            _, fewer, smaller = simulate(count, tp, tp, parallel, 1)
            # gradients of replicated parameters grow with depth but are no block's collective
            kinds = ("all-gather", "reduce-scatter") if parallel else ("all-reduce",)
            times = c.n_layer / (c.n_layer - 1)
            blocks = round(sum(counts[k] - fewer[k] for k in kinds) * times)
            size = sum(sizes[k] - smaller[k] for k in kinds) * times
            n, floor = 4 * c.n_layer * len(kinds), 4 * c.n_layer * len(kinds) * unit
            rows += (f"| {tp} | {'yes' if parallel else 'no'} | {sum(counts.values())} | {blocks} | {n} | "
                     f"{sum(sizes.values()) / 1e6:.1f} | {size / 1e6:.1f} | {floor / 1e6:.1f} | {size / floor:.3f} | "
                     f"{sum(sizes.values()) / floor:.3f} |\n")
            print(rows.splitlines()[-1], flush=True)
            if parallel:
                peaks[tp] = peak
    (ROOT / "docs/collectives.md").write_text(TEXT.format(
        batch=c.micro_batch_size, block=c.block_size, dtype=c.dtype, unit=unit / 1e6, layers=c.n_layer,
        floor=4 * c.n_layer * unit / 1e6, rows=rows))
    return peaks


def scaling(peaks: dict) -> None:
    """The picture: memory of a rank and bytes over a link against tp."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5), dpi=120)
    degrees = (1, 2, 4, 8)
    for i, size in enumerate(SIZES):
        for parallel, style in ((True, "o-"), (False, "o--")):
            found = [small_batch(size, tp, block_size=1024, micro_batch_size=4, sequence_parallel=parallel)
                     for tp in degrees]
            left.plot(degrees, [plan.memory(c)["peak"] / 2**30 for c in found], style, color=f"C{i}", ms=3,
                      label=size if parallel else "… no sequence parallelism")
            right.plot(degrees, [sum(n for _, _, n in plan.traffic(c).values()) / 1e9 for c in found], style,
                       color=f"C{i}", ms=3)
    left.plot(list(peaks), [peak / 2**30 for peak in peaks.values()], "kx", label="124M, 4 × 256, simulated ranks")
    left.plot(list(peaks), [plan.memory(small_batch("124M", tp, block_size=256, micro_batch_size=4), "cpu")["peak"]
                            / 2**30 for tp in peaks], "k:", label="124M, 4 × 256, estimated")
    left.set(ylabel="GiB a rank at the peak of a step", yscale="log")
    right.set(ylabel="GB through each link of a ring, a micro-batch")
    for axes in (left, right):
        axes.set(xlabel="tp", xticks=degrees)
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), fontsize=7, loc="lower center", ncols=5)
    figure.suptitle("GPT-2 under tensor parallelism: one micro-batch of 4 × 1024 tokens, bfloat16", fontsize=10)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(ROOT / "docs/scaling.png")
    for tp, peak in peaks.items():
        estimate = plan.memory(small_batch("124M", tp, block_size=256, micro_batch_size=4), "cpu")["peak"]
        print(f"124M at tp {tp}: {peak / 2**30:.2f} GiB measured, {estimate / peak - 1:+.1%} estimated")


if __name__ == "__main__":
    scaling(collectives())
