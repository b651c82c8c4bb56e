"""quantize.py beside float64 on the same weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from config import UserError
from quantize import FloatLinear, quantize


def relative(got, want):
    """Largest difference over largest value."""
    assert got.shape == want.shape
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize(("bits", "group_size", "shape"), [
    (8, 0, (128, 64)), (8, 0, (40, 7)), (4, 32, (128, 48)), (4, 128, (256, 16)), (4, 2, (8, 5)), (4, 32, (64, 5))])
def test_quantized(bits, group_size, shape, rows, dtype):
    """Weights within half a step of the float ones, and every way of multiplying equal to float64 on the same codes."""
    n_in, n_out = shape
    torch.manual_seed(6)
    linear = nn.Linear(n_in, n_out).to(dtype)
    linear.weight = nn.Parameter(linear.weight.t().contiguous().t())  # as from a Hugging Face file
    with torch.no_grad():
        linear.weight[1] = 0  # as in a padded head
    quantized = quantize(linear, bits, group_size)
    with torch.no_grad():
        eye = torch.eye(n_in, dtype=torch.float64)
        exact = copy.deepcopy(quantized).double()
        weight = exact.product(eye).T  # (out, in)
    step = exact.scale.T.repeat_interleave(n_in // exact.scale.size(0), 1)
    assert ((weight - linear.weight.double()).abs() <= step * 0.5 * (1 + 2**-6)).all()
    assert (weight[1] == 0).all()
    x = torch.randn(2, rows, n_in).to(dtype)[0]
    want = F.linear(x.double(), weight, linear.bias.double())
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative(quantized(x), want) < limit
    assert relative(quantized(x[None])[0], want) < limit
    packed = quantized.pack()
    assert packed.packed == (bits == 4 and group_size >= 32 and n_out % 16 == 0)
    assert relative(packed.pack()(x), want) < limit
    assert relative(packed(x[None, None])[0, 0], want) < limit
    strided = x.repeat_interleave(3, 0)[:, None].expand(-1, 2, -1)[::3, 1]  # as the last position of each prompt
    assert relative(quantized(strided), want) < limit


@pytest.mark.parametrize(("bits", "group_size"), [(3, 32), (4, 0), (4, 5), (4, 48), (4, -2)])
def test_quantize_refuses(bits, group_size):
    with pytest.raises(UserError, match="bits must be 8, or 4 with an even group_size that divides the 32 inputs"):
        quantize(nn.Linear(32, 16), bits, group_size)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(48, 64), (5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_floats(dtype, limit, shape, bias):
    n_in, n_out = shape
    torch.manual_seed(7)
    linear = FloatLinear(n_in, n_out, bias=bias).to(dtype).requires_grad_(False)
    weight, b = linear.weight.double(), linear.bias.double() if bias else None
    assert linear.pack().packed == torch.backends.mkldnn.is_available()
    for x in (torch.randn(1, n_in), torch.randn(8, n_in), torch.randn(2, 9, n_in), torch.randn(3, 4, n_in)[:, -1]):
        x = x.to(dtype)
        assert relative(linear(x), F.linear(x.double(), weight, b)) < limit
        assert relative(linear.product(x), F.linear(x.double(), weight)) < limit
