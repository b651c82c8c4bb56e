"""Linear layers for generation: weights as they are, in int8 or in int4, and in the order that a CPU's kernels read.

One token is one row through every weight, so its time is the time to read them: fewer bytes, or bytes in a better
order, are a faster token. `quantize`, then `tensor_parallel.shard_linear`, then `pack()`. Nothing here has gradients.
"""

import torch
import torch.nn.functional as F
from torch import nn

from config import UserError


class FloatLinear(nn.Linear):
    """An nn.Linear that can be packed for oneDNN; in eager mode only, as torch.compile does not take packed weights."""

    packed = False

    def forward(self, x):
        return self._linear(x, self.bias)

    def product(self, x):
        """x Wᵀ without the bias, which a row-parallel linear adds after the sum over ranks."""
        return self._linear(x, None)

    def _linear(self, x, bias):
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.order, bias, "none", [], "")
        return F.linear(x, self.weight, bias)

    def pack(self):
        """Give a CPU's weight the blocks in which oneDNN reads it; returns self. Shard before.

        F.linear has to take rows as they lie: with a few rows of x that is a third to a half slower. The operators are
        those that torch.compile's own freezing puts in; they have no public name."""
        half = self.weight.dtype == torch.bfloat16
        if (self.weight.is_cpu and not self.packed and torch.backends.mkldnn.is_available()
                and (not half or torch.ops.mkldnn._is_mkldnn_bf16_supported())):
            self.order, self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 1), True
            self.weight = None
        return self


class QuantizedLinear(nn.Module):
    """An inference-only linear, x (…, in) → (…, out), whose weight is codes · scale; `quantize` makes one.

    Buffers: weight, for 8 bits int8 (out, in), for 4 bits uint8 (out, in/2) with two codes + 8 a byte; scale
    (in/group, out), the step of each group of inputs (8 bits: one group) of each output; bias (out,) or None. Scale and
    bias have the dtype of the float weight, which x must have too."""

    def __init__(self, weight, scale, bias, bits: int, group_size: int):
        super().__init__()
        for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, tensor)
        self.out_features, self.in_features = weight.size(0), weight.size(1) * 8 // bits
        self.bits, self.group_size, self.packed = bits, group_size, False

    def forward(self, x):
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x):
        """x Wᵀ without the bias, which a row-parallel linear adds after the sum over ranks."""
        rows = x.reshape(-1, self.in_features).contiguous()
        if self.packed:
            y = torch._weight_int4pack_mm_for_cpu(rows, self.weight, self.group_size, self.scale)
        elif self.bits == 4:
            codes = self._codes().unflatten(1, (-1, self.group_size)).to(x.dtype) - 8  # (out, in/group, group)
            y = F.linear(rows, (codes * self.scale.T[:, :, None]).flatten(1))
        # For a few rows the time goes on reading weights, which ATen's kernel reads as int8; with more rows the bf16
        # GEMM wins. The kernel takes 16 inputs at a time and, where 16 does not divide them, reads past the end.
        elif x.is_cpu and x.dtype == torch.bfloat16 and rows.size(0) <= 16 and self.in_features % 16 == 0:
            y = torch._weight_int8pack_mm(rows, self.weight, self.scale[0])
        else:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale[0]
        return y.view(*x.shape[:-1], self.out_features)

    def _codes(self):
        return torch.stack((self.weight & 15, self.weight >> 4), dim=-1).flatten(1)  # 4 bits: (out, in) of 1…15

    def pack(self):
        """Reorder 4-bit weights on a CPU for ATen's kernel, where it takes the shape; returns self. Shard before."""
        if (self.bits == 4 and not self.packed and self.weight.is_cpu and self.out_features % 16 == 0
                and self.group_size in (32, 64, 128, 256)):
            self.weight, self.packed = torch._convert_weight_to_int4pack_for_cpu(self._codes().int(), 1), True
            self.scale = torch.stack((self.scale, torch.zeros_like(self.scale)), dim=-1)  # the kernel has zero points
        return self


@torch.no_grad()
def quantize(linear: nn.Linear, bits: int, group_size: int = 64) -> QuantizedLinear:
    """Round weights to 255 levels over ±largest of an output channel (bits = 8), or to 15 levels over ±largest of each
    `group_size` inputs of a channel (bits = 4). Raises UserError for other bits, and for 4 where group_size is odd or
    does not divide the inputs."""
    if bits not in (4, 8) or (bits == 4 and (group_size < 2 or group_size % 2 or linear.in_features % group_size)):
        raise UserError(f"bits = {bits}, group_size = {group_size}: bits must be 8, or 4 with an even group_size that "
                        f"divides the {linear.in_features} inputs")
    group_size, levels = (linear.in_features, 127) if bits == 8 else (group_size, 7)
    weight = linear.weight.float().unflatten(1, (-1, group_size))  # (out, in/group, group)
    # The least scale is for a channel of zeros, as in a padded head: 0/0 would be NaN.
    scale = (weight.abs().amax(-1) / levels).clamp(min=torch.finfo(torch.bfloat16).tiny).to(linear.weight.dtype)
    codes = (weight / scale.float()[:, :, None]).round().clamp(-levels, levels).to(torch.int8).flatten(1)
    if bits == 4:
        codes = (codes + 8).to(torch.uint8)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    bias = None if linear.bias is None else linear.bias.clone()
    return QuantizedLinear(codes.contiguous(), scale.T.contiguous(), bias, bits, group_size)
