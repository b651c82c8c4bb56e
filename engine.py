"""GPT-2 built for generation: linears cut by hand and perhaps quantised, a KV cache by heads, one token at a time.

In shapes, R is the rows of a batch, T the tokens of a prompt, L the cache's length, C the width of the residual stream,
and heads are a rank's own.
"""

import torch
import torch.nn.functional as F
from torch import nn

from config import Config, UserError
from mesh import Mesh
from model import LayerNorm, Sizes
from quantize import FloatLinear, quantize
from tensor_parallel import gather_features, shard_linear


class Block(nn.Module):
    """A GPT-2 block whose linears may be cut and quantised; `attend` is what prefill and decode do differently."""

    def __init__(self, linears: dict[str, nn.Module], norms: dict[str, nn.Module]):
        super().__init__()
        self.ln_1, self.ln_2 = norms["ln_1"], norms["ln_2"]
        self.c_attn, self.attn_proj = linears["attn.c_attn"], linears["attn.c_proj"]
        self.c_fc, self.mlp_proj = linears["mlp.c_fc"], linears["mlp.c_proj"]

    def forward(self, x, attend):
        x = x + self.attn_proj(attend(self.c_attn(self.ln_1(x))))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Engine(nn.Module):
    """GPT-2 for generation on one rank: its shares of the linears, its heads' KV cache, and the whole embeddings.

    A lookup reads one row a token, so cutting the table would buy a collective a token for no time; lm_head, which
    reads it all, is cut over the vocabulary. Residual stream and LayerNorms are float32, as in training.
    """

    def __init__(self, config: Config, read, mesh: Mesh, quantized: str = "none", group_size: int = 64):
        """`read(name)` gives a parameter whole, unpadded and in float32; one at a time is held.

        Raises:
            UserError: a group size that does not divide what a rank has of a layer's inputs.
        """
        super().__init__()
        self.config, self.device = config, mesh.device
        self.group = mesh.device_mesh["tp"].get_group() if mesh.tp > 1 else None
        self.head_dim, dtype = config.n_embd // config.n_head, config.torch_dtype
        sizes, C = Sizes.padded(config, mesh.tp), config.n_embd
        self.heads = sizes.heads // mesh.tp
        self.weight_bytes = 0  # that a token reads on this rank
        if quantized == "int4" and (bad := [n for n in (C, sizes.heads * self.head_dim // mesh.tp,
                                                         sizes.hidden // mesh.tp) if n % group_size]):
            raise UserError(f"group_size = {group_size} does not divide the {bad[0]} inputs that a rank has of a layer "
                            f"(n_embd = {C}, tp = {mesh.tp}): try a smaller one, or quantize = int8")

        def load(name, *shape):  # zeros up to `shape`
            whole = read(name)
            if whole.shape != shape:
                padded = whole.new_zeros(shape)
                padded[tuple(map(slice, whole.shape))] = whole
                whole = padded
            return whole.to(mesh.device).contiguous()  # Hugging Face's matrices come transposed

        def linear(style, weight, bias=None):
            with torch.device("meta"):
                module = FloatLinear(*reversed(weight.shape), bias=bias is not None)
            module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            if bias is not None:
                module.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
            if quantized != "none":
                module = quantize(module, {"int8": 8, "int4": 4}[quantized], group_size)
            if self.group:
                shard_linear(module, style, self.group)
            tensors = (*module.parameters(), *module.buffers())
            self.weight_bytes += sum(tensor.nbytes for tensor in tensors)
            return module if config.compile and quantized == "none" else module.pack()

        def norm(name):
            module = LayerNorm(config).to(mesh.device).requires_grad_(False)
            module.weight.copy_(read(f"{name}.weight"))
            module.bias.copy_(read(f"{name}.bias"))
            return module

        width, hidden = sizes.heads * self.head_dim, sizes.hidden
        layout = {"attn.c_attn": ("column", 3 * width, C), "attn.c_proj": ("row", C, width),
                  "mlp.c_fc": ("column", hidden, C), "mlp.c_proj": ("row", C, hidden)}
        self.wte = load("wte.weight", sizes.vocab, C).to(dtype)
        self.wpe = load("wpe.weight", config.block_size, C).to(dtype)
        self.h = nn.ModuleList(Block(
            {name: linear(style, load(f"h.{i}.{name}.weight", n_out, n_in), load(f"h.{i}.{name}.bias", n_out))
             for name, (style, n_out, n_in) in layout.items()},
            {name: norm(f"h.{i}.{name}") for name in ("ln_1", "ln_2")}) for i in range(config.n_layer))
        self.ln_f = norm("ln_f")
        self.lm_head = linear("column", self.wte)
        if config.compile:
            self.prefill, self.decode = torch.compile(self.prefill), torch.compile(self.decode)

    def new_cache(self, rows: int, length: int) -> None:
        """A static cache for `rows` sequences of up to `length` tokens: k and v, (2, R, heads, L, head_dim), a layer.

        It is float32 on a CPU, whose attention takes five times longer over bfloat16 where there is one query.
        """
        length = -(-length // 16) * 16  # GPU kernels want the mask aligned
        dtype = self.config.torch_dtype if self.device.type == "cuda" else torch.float32
        self.cache = [torch.zeros(2, rows, self.heads, length, self.head_dim, device=self.device, dtype=dtype)
                      for _ in self.h]

    @torch.no_grad()
    def prefill(self, idx, last):
        """Prompts (R, T), padded behind, with their last positions (R,) → float32 logits (R, vocab_size) after them.

        Causal attention keeps the padding from what is before it, and decode overwrites its cache entries.
        """
        x = self.hidden(idx)
        return self.logits(x[torch.arange(len(idx), device=idx.device), last])

    def hidden(self, idx):
        """(R, T) → the residual stream after the last block, (R, T, C) float32; fills the cache."""
        T = idx.shape[1]

        def attend(qkv, cache):  # (R, T, heads · 3 · head_dim) → (R, T, heads · head_dim)
            qkv = qkv.unflatten(-1, (self.heads, 3, self.head_dim)).permute(3, 0, 2, 1, 4)  # (3, R, heads, T, head_dim)
            cache[..., :T, :] = qkv[1:]
            return F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)

        x = F.embedding(idx, self.wte).float() + self.wpe[:T]
        for block, cache in zip(self.h, self.cache, strict=True):
            x = block(x, lambda qkv, cache=cache: attend(qkv, cache))
        return x

    @torch.no_grad()
    def decode(self, idx, position):
        """The next token of each row, (R,), at its position, (R,) → float32 logits (R, vocab_size) after it."""
        rows = torch.arange(len(idx), device=idx.device)
        unwritten = torch.arange(self.cache[0].shape[3], device=idx.device) > position[:, None]  # (R, L)
        mask = torch.zeros_like(unwritten, dtype=self.cache[0].dtype).masked_fill(unwritten, float("-inf"))
        mask = mask[:, None, None]  # (R, 1, 1, L), the same for all heads

        def attend(qkv, cache):  # (R, heads · 3 · head_dim) → (R, heads · head_dim)
            qkv = qkv.unflatten(-1, (self.heads, 3, self.head_dim)).to(cache.dtype)
            cache[:, rows, :, position] = qkv[:, :, 1:].transpose(1, 2)
            y = F.scaled_dot_product_attention(qkv[:, :, 0, None], *cache, attn_mask=mask)  # (R, heads, 1, head_dim)
            return y.flatten(1).to(self.config.torch_dtype)

        x = F.embedding(idx, self.wte).float() + self.wpe[position]
        for block, cache in zip(self.h, self.cache, strict=True):
            x = block(x, lambda qkv, cache=cache: attend(qkv, cache))
        return self.logits(x)

    def logits(self, x):
        """(N, C) → (N, vocab_size) float32, whole on every rank: one all-gather where the vocabulary is cut."""
        logits = self.lm_head(self.ln_f(x))
        if self.group:
            logits = gather_features(logits, self.group)
        return logits[:, : self.config.vocab_size].float()
