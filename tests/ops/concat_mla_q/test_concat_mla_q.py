import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import concat_mla_q
from flashlatte.ops.concat_mla_q import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


@given(
    tokens=st.integers(0, 5),
    heads=st.integers(1, 9),
    widths=st.sampled_from([(512, 64), (24, 8), (5, 3), (130, 1)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]),
    heads_first=st.booleans(),
    gap=st.sampled_from([0, 1, 8]),
)
def test_every_byte(tokens, heads, widths, dtype, heads_first, gap):
    latent, rope = widths
    parts = []
    for width in widths:
        values = torch.randint(0, 256, (tokens, heads, width * dtype.itemsize), dtype=torch.uint8)
        if heads_first:
            values = values.transpose(0, 1).contiguous().transpose(0, 1)
        parts.append(values.view(dtype))
    storage = torch.zeros(tokens, heads, latent + rope + gap, dtype=dtype)
    out = concat_mla_q(*parts, out=storage[..., : latent + rope], backend=BACKEND)
    whole = storage.view(torch.uint8)
    split = latent * dtype.itemsize, rope * dtype.itemsize, gap * dtype.itemsize
    written_latent, written_rope, beyond = whole.split(split, dim=-1)
    assert written_latent.equal(parts[0].view(torch.uint8))
    assert written_rope.equal(parts[1].view(torch.uint8))
    assert not beyond.any()
    assert concat_mla_q(*parts, backend=BACKEND).view(torch.uint8).equal(out.contiguous().view(torch.uint8))


LATENT, ROPE = torch.zeros(3, 2, 8), torch.zeros(3, 2, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ql_nope": LATENT.int()}, TypeError, "^ql_nope must be bfloat16 or float16 or float32 or float8_e4m3fn, got"),
        ({"ql_nope": LATENT[0]}, ValueError, r"^ql_nope must have shape \[T, H, latent\]"),
        ({"q_pe": ROPE.half()}, TypeError, "^q_pe must be float32, got float16$"),
        ({"q_pe": ROPE[:2]}, ValueError, r"^q_pe must have shape \[3, 2, rope\]"),
        ({"q_pe": ROPE.to("meta")}, ValueError, "^q_pe must be on cpu like the other arguments"),
        ({"out": torch.zeros(3, 2, 11)}, ValueError, r"^out must have shape \[3, 2, 12\]"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of concat_mla_q: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        concat_mla_q(**({"ql_nope": LATENT, "q_pe": ROPE} | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "concat_mla_q", lambda: concat_mla_q(LATENT, ROPE))
