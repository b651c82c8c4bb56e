"""Dropout masks: independent where activations are sharded, the same where they are replicated, reproducible."""

import pytest
import torch
from ranks import run_ranks
from small import CPU, batch, small_config
from torch import nn

from mesh import Mesh, mesh_over_world
from parallel import build_model, seed_dropout


def masks_and_loss(config, mesh, step: int) -> tuple[dict, float]:
    """What each Dropout of a forward in training kept, by name, and the loss."""
    model = build_model(config, mesh)
    masks = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, out, name=name: masks.update({name: out != 0}))
    seed_dropout(model, config, mesh, step, 0)
    loss = model(*(rows.chunk(mesh.dp)[mesh.dp_rank] for rows in batch(0, config)))
    loss.backward()
    return masks, loss.item()


def on_two_ranks(rank):
    results = {}
    for name, keys in {"sequence": {"tp": 2}, "whole": {"tp": 2, "sequence_parallel": False}, "data": {}}.items():
        config = small_config(2, dropout=0.3, **keys)
        results[name] = (*masks_and_loss(config, mesh_over_world(config, CPU), 0), torch.initial_seed())
    return results


def test_masks_across_ranks():
    first, second = run_ranks(on_two_ranks, 2)
    for case, shared in (("sequence", False), ("whole", True), ("data", False)):
        (masks_a, _, seed_a), (masks_b, _, seed_b) = first[case], second[case]
        assert masks_a.keys() == masks_b.keys() and len(masks_a) == 1 + 2 * 2
        assert seed_a != seed_b  # attention's masks, drawn from the rank's own generator, differ in every case
        for name, mask in masks_a.items():
            assert torch.equal(mask, masks_b[name]) == shared, (case, name)
            assert abs(mask.float().mean() - 0.7) < 0.05
        different = list(masks_a.values())
        assert not any(torch.equal(different[0], other) for other in different[1:])  # layers differ
    assert first["whole"][1] == second["whole"][1]  # one model, one loss


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_masks_follow_from_seed_and_step(recompute):
    config = small_config(dropout=0.3, activation_checkpointing=recompute)
    mesh = Mesh(CPU)
    once, again, other = (masks_and_loss(config, mesh, step) for step in (0, 0, 1))
    assert once[1] == again[1] != other[1]
    assert all(torch.equal(once[0][name], again[0][name]) for name in once[0])
    assert not any(torch.equal(once[0][name], other[0][name]) for name in once[0])


def test_recomputation_meets_the_same_masks():
    grads = []
    for recompute in ("none", "block", "selective"):
        config, mesh = small_config(dropout=0.3, activation_checkpointing=recompute), Mesh(CPU)
        model = build_model(config, mesh)
        seed_dropout(model, config, mesh, 0, 0)
        model(*batch(0, config)).backward()
        grads.append(model.h[0].mlp.c_fc.weight.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_attention_drops_too():
    """With values that are all one, attention puts out sums of its weights: 1 without dropout, others with it."""
    config = small_config(dropout=0.3)
    attention = build_model(config, Mesh(CPU)).h[0].attn
    kept = {}
    attention.c_proj.register_forward_pre_hook(lambda m, args: kept.update(y=args[0]))
    with torch.no_grad():
        attention.c_attn.weight.zero_()
        attention.c_attn.bias.copy_(torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(16).repeat(3))
        attention(torch.zeros(4, 32, 48))
        assert kept["y"].std() > 0.1 and abs(kept["y"].mean() - 1) < 0.1
        attention.eval()(torch.zeros(4, 32, 48))
        assert torch.allclose(kept["y"], torch.ones(()), atol=1e-5)


def test_evaluation_drops_nothing():
    config = small_config(dropout=0.5)
    model = build_model(config, Mesh(CPU)).eval()
    assert model(*batch(0, config)).item() == build_model(small_config(), Mesh(CPU))(*batch(0, config)).item()
