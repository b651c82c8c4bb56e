"""Checkpoints: every mesh to every other against the unbroken run, and whatever can go wrong on a disk."""


from ranks import run_ranks
from small import CPU, batch, difference, small_config

import checkpoint
from checkpoint import Saver
from mesh import Mesh, mesh_over_world
from parallel import build_model, check_replicas, make_optimizer
from train_gpt2_tp import learning_rate, train_step

DATA = {"shards": 1, "tokens": 1000}
HALF, WHOLE = 3, 6  # steps: saved after HALF, compared up to WHOLE


def train(config, mesh, model, optimizer, steps):
    """Losses and norms of the trainer's own steps, `steps` a range."""
    losses, norms = [], []
    for step in steps:
        inputs, targets = (rows.chunk(mesh.dp)[mesh.dp_rank] for rows in batch(step, config))
        loss, norm = train_step(model, optimizer, inputs, targets, learning_rate(step, config), config, mesh)
        losses.append(mesh.all_mean(loss).item())
        norms.append(norm.item())
    check_replicas(model, mesh)
    return losses, norms


def start(config, mesh):
    """Model and optimizer, from the checkpoint that the config asks for, and the step to go on from."""
    model = build_model(config, mesh)
    optimizer = make_optimizer(model, config)
    found = checkpoint.choose(config, mesh, DATA)
    if found:
        checkpoint.load(found[0], config, mesh, model, optimizer)
    return model, optimizer, found[1]["step"] if found else 0


def save(config, mesh, model, optimizer, step, **keys):
    saver = Saver(config, mesh, model, optimizer, DATA, step)
    saver.save(step, last=True, **keys)
    return saver


def relay(rank, world_size, legs):
    """For each leg, a dict of config keys: go on from out_dir's newest checkpoint for HALF steps, and save."""
    results = []
    for keys in legs:
        config = small_config(world_size, resume=True, grad_clip=0.5, **keys)
        mesh = Mesh(CPU) if world_size == 1 else mesh_over_world(config, CPU)
        model, optimizer, step = start(config, mesh)
        if keys.get("compile"):
            for block in model.h:
                block.compile()
        run = train(config, mesh, model, optimizer, range(step, step + HALF))
        save(config, mesh, model, optimizer, step + HALF)
        results.append((step, *run))
    return results


HEADS = {3: {"n_head": 3, "n_embd": 48}, 5: {"n_head": 5, "n_embd": 40}, 25: {"n_head": 25, "n_embd": 100}}


def test_every_mesh_resumes_every_other(tmp_path):
    """One chain of runs for each head count through processes and meshes: the losses are those of one unbroken run.

    At tp = 4 with 5 heads a rank holds nothing but padding (8 heads for 5: 2, 2, 1, 0).
    """
    chains = {heads: keys | {"out_dir": str(tmp_path / str(heads))} for heads, keys in HEADS.items()}
    order = [(2, [{"tp": 2}, {"tp": 1}]), (4, [{"tp": 4}, {"tp": 2}]), (1, [{}])]
    runs = {heads: [] for heads in chains}
    for world_size, meshes in order:
        words = [keys | mesh for keys in chains.values() for mesh in meshes]
        results = run_ranks(relay, world_size, world_size, words) if world_size > 1 else [relay(0, 1, words)]
        for rank in results:
            assert rank == results[0]
        for heads, pair in zip(chains, range(0, len(words), len(meshes)), strict=True):
            runs[heads] += results[0][pair : pair + len(meshes)]
    for heads, keys in HEADS.items():
        steps = [step for step, *_ in runs[heads]]
        assert steps == [HALF * i for i in range(len(steps))]
        losses, norms = ([x for run in runs[heads] for x in run[i]] for i in (1, 2))
        config = small_config(grad_clip=0.5, **keys)
        model = build_model(config, Mesh(CPU))
        expected = train(config, Mesh(CPU), model, make_optimizer(model, config), range(len(losses)))
        assert difference((losses, norms), expected) < 1e-5, heads
