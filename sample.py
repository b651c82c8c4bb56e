"""Text generation."""

import torch

from mesh import Mesh
from model import GPT
from tokenizer import EOT


@torch.no_grad()
def generate(model: GPT, mesh: Mesh, prompt: list[int], *, max_new_tokens: int, num_samples: int = 1,
             temperature: float = 1.0, top_k: int = 50, seed: int = 0) -> list[list[int]]:
    """Continue `prompt` by up to `max_new_tokens` ids, `num_samples` times; a sample ends before `<|endoftext|>`.

    Every rank must call it and every rank gets the same ids: the logits are whole and equal on all of them, and so is
    the generator's seed. The prefix is computed anew for every token, at one fixed length: causal attention does not
    see what comes after, a compiled model meets one shape, and the length divides by tp as sequence shards need.

    Returns:
        `num_samples` lists of ids, prompt included. Prompt and continuation together are cut at block_size.
    """
    prompt = prompt or [EOT]
    end = min(len(prompt) + max_new_tokens, model.block_size)
    length = min(-(-end // mesh.tp) * mesh.tp, model.block_size)
    tokens = torch.full((num_samples, length), EOT)
    tokens[:, : len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(prompt), end):
        logits = model(tokens.to(mesh.device), position=i - 1)[:, 0].cpu()  # (num_samples, vocab_size)
        values, ids = logits.topk(min(top_k, logits.shape[1]))
        drawn = torch.multinomial(torch.softmax(values / temperature, 1), 1, generator=generator)
        tokens[:, i] = ids.gather(1, drawn)[:, 0]
    samples = []
    for row in tokens[:, :end].tolist():
        new = row[len(prompt) :]
        samples.append(prompt + (new[: new.index(EOT)] if EOT in new else new))
    return samples
