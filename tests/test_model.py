"""The model against Hugging Face's GPT-2 and float64, its weights and its loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from small import CPU, small_config

from mesh import Mesh
from model import GPT, Sizes, initial_value, linear_cross_entropy, real_shapes
from parallel import build_model


def hugging_face(model: GPT, config):
    """transformers' GPT-2 in float64 with the weights of `model`, mapped by hand: [Q|K|V] and transposed matrices."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
        n_head=config.n_head, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager")).double()
    state = {}
    for name, p in model.state_dict().items():
        p = p.double()
        if "c_attn" in name:  # rows (head, qkv, head_dim) → (qkv, head, head_dim)
            p = p.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        if name.startswith("h.") and name.endswith("weight") and p.ndim == 2:
            p = p.t()
        if name in ("wte.weight", "lm_head.weight"):
            p = p[: config.vocab_size]
        state[name if name.startswith("lm_head") else f"transformer.{name}"] = p
    theirs.load_state_dict(state)
    return theirs.eval()


def perturbed(config) -> GPT:
    """The initial model with every parameter moved, so that biases and gains matter too (padding left zero)."""
    model, shapes = build_model(config, Mesh(CPU)), real_shapes(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p[tuple(map(slice, shapes[name]))] += 0.05 * torch.randn(shapes[name], generator=generator)
    return model


@pytest.mark.parametrize("n_head", [3, 4])
def test_logits_and_gradients_equal_hugging_face_in_float64(n_head):
    config = small_config(n_head=n_head)
    model = perturbed(config)
    theirs = hugging_face(model, config)
    tokens = torch.randint(0, config.vocab_size, (2, config.block_size), generator=torch.Generator().manual_seed(0))
    logits, expected = model(tokens), theirs(tokens).logits
    assert logits.shape == expected.shape == (2, config.block_size, config.vocab_size)
    assert (logits.double() - expected).abs().max() < 1e-4
    assert (model(tokens, position=7)[:, 0] - logits[:, 7]).abs().max() < 1e-5

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = model(inputs, targets)
    loss.backward()
    reference = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    reference.backward()
    assert abs(loss.item() - reference.item()) < 1e-6 * reference.item()
    for ours, other in ((model.wte.weight.grad[: config.vocab_size], theirs.transformer.wte.weight.grad),
                        (model.h[0].mlp.c_fc.weight.grad, theirs.transformer.h[0].mlp.c_fc.weight.grad.t()),
                        (model.wpe.weight.grad, theirs.transformer.wpe.weight.grad)):
        assert (ours.double() - other).abs().max() < 1e-5 * other.abs().max()
    assert not model.wte.weight.grad[config.vocab_size :].any()  # padding learns nothing


def test_initial_weights():
    config = small_config(n_layer=8, n_embd=96)
    shapes = real_shapes(config)
    assert "lm_head.weight" not in shapes  # tied, counted once
    value = {name: initial_value(name, shape, config) for name, shape in shapes.items()}
    assert math.isclose(value["wte.weight"].std(), 0.02, rel_tol=0.02)
    assert math.isclose(value["h.3.attn.c_attn.weight"].std(), 0.02, rel_tol=0.02)
    assert math.isclose(value["h.3.mlp.c_proj.weight"].std(), 0.02 / math.sqrt(2 * 8), rel_tol=0.02)
    assert value["h.3.ln_1.weight"].eq(1).all() and value["ln_f.weight"].eq(1).all()
    assert not value["h.3.ln_1.bias"].any() and not value["h.3.attn.c_attn.bias"].any()
    assert not torch.equal(value["h.0.mlp.c_fc.weight"], value["h.1.mlp.c_fc.weight"])
    config.seed += 1
    assert not torch.equal(initial_value("wte.weight", shapes["wte.weight"], config), value["wte.weight"])


def test_padded_sizes():
    config = small_config(n_head=25, n_embd=100, vocab_size=50257)
    assert Sizes.padded(config) == Sizes(25, 400, 50304)
    assert [Sizes.padded(config, tp).heads for tp in (2, 4, 8)] == [26, 28, 32]
    assert Sizes.padded(config, 3) == Sizes(27, 402, 50304)
    assert Sizes.padded(config, 5).vocab % 640 == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_loss_equals_float64_cross_entropy(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("model._LinearCrossEntropy.CHUNK", {"cpu": 1000})  # several chunks of rows
    generator = torch.Generator().manual_seed(0)
    N, C, V, real = 50, 32, 256, 201
    x = torch.randn(N, C, generator=generator).to(dtype)
    weight = torch.randn(V, C, generator=generator).to(dtype).float()
    targets = torch.randint(0, real, (N,), generator=generator)
    targets[:2] = torch.tensor([0, real - 1])

    x1, w1 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = 3 * linear_cross_entropy(x1, w1, targets, real)
    loss.backward()
    x2, w2 = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = 3 * F.cross_entropy((x2 @ w2.t())[:, :real], targets)
    expected.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < tolerance * expected.item()
    for ours, theirs in ((x1.grad, x2.grad), (w1.grad, w2.grad)):
        assert (ours.double() - theirs).abs().max() < tolerance * theirs.abs().max()


def test_loss_stands_large_logits():
    x = torch.tensor([[300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([1]), 3)
    loss.backward()
    assert loss.item() == 600.0 and torch.isfinite(x.grad).all() and torch.isfinite(weight.grad).all()
