import math

import pytest
import torch

from flashlatte import sparse_prefill
from flashlatte.testing.cases import SparsePrefillCase

VALID = SparsePrefillCase(3, 30, 4, 9, head_dim=24, d_v=16, topk_lengths=True).inputs()
Q, KV, INDICES, LENGTH, SINK = (VALID[name] for name in ("q", "kv", "indices", "topk_length", "attn_sink"))
META = torch.device("meta")
BF16 = torch.bfloat16


def test_the_arguments_that_the_errors_start_from_are_right():
    sparse_prefill(**VALID)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "^q must be a tensor, got list$"),
        ({"q": Q.double()}, TypeError, "^q must be bfloat16 or float16 or float32, got float64$"),
        ({"q": Q[0]}, ValueError, r"^q must have shape \[s_q, h_q, d\] .* got \[4, 24\]$"),
        ({"q": Q[:, :0]}, ValueError, r"^q must have shape .* no empty axis .*, got \[3, 0, 24\]$"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "^q must have last stride 1"),
        ({"kv": [0.0]}, TypeError, "^kv must be a tensor, got list$"),
        ({"kv": KV.half()}, TypeError, "^q and kv must agree in dtype, got q in bfloat16 and kv in float16$"),
        ({"kv": KV[:, 0]}, ValueError, r"^kv must have shape \[s_kv, 1, 24\] .* got \[30, 24\]$"),
        ({"kv": KV.repeat(1, 2, 1)}, ValueError, r"^kv must have shape \[s_kv, 1, 24\] .* got \[30, 2, 24\]$"),
        ({"kv": KV[..., :16]}, ValueError, r"^kv must have shape \[s_kv, 1, 24\] .* got \[30, 1, 16\]$"),
        ({"kv": KV[:0]}, ValueError, r"^kv must have shape .* no empty axis, got \[0, 1, 24\]$"),
        ({"kv": KV.to(META)}, ValueError, "^kv must be on cpu like the other arguments, got meta$"),
        ({"kv": KV.repeat(1, 1, 2)[..., ::2]}, ValueError, "^kv must have last stride 1"),
        ({"indices": [[[0]]]}, TypeError, "^indices must be a tensor, got list$"),
        ({"indices": INDICES.float()}, TypeError, "^indices must be int32 or int64, got float32$"),
        ({"indices": INDICES[:, 0]}, ValueError, r"^indices must have shape \[3, 1, topk\] .* got \[3, 9\]$"),
        ({"indices": INDICES[:2]}, ValueError, r"^indices must have shape \[3, 1, topk\] .* got \[2, 1, 9\]$"),
        ({"indices": INDICES[..., :0]}, ValueError, r"^indices must have shape .* no empty axis, got \[3, 1, 0\]$"),
        ({"indices": INDICES.to(META)}, ValueError, "^indices must be on cpu"),
        ({"indices": INDICES[..., ::2]}, ValueError, "^indices must have last stride 1"),
        ({"softmax_scale": 0.0}, ValueError, "^softmax_scale must be a finite number above 0, got 0.0$"),
        ({"softmax_scale": -math.inf}, ValueError, "^softmax_scale must be a finite number above 0, got -inf$"),
        ({"softmax_scale": SINK}, TypeError, "^softmax_scale must be a number, got Tensor$"),
        ({"d_v": 25}, ValueError, "^d_v must be at most q's last dimension 24, got 25$"),
        ({"d_v": -1}, ValueError, "^d_v must be at least 1, got -1$"),
        ({"d_v": "16"}, TypeError, "^d_v must be an int, got str$"),
        ({"attn_sink": 0.5}, TypeError, "^attn_sink must be a tensor, got float$"),
        ({"attn_sink": SINK.bfloat16()}, TypeError, "^attn_sink must be float32, got bfloat16$"),
        ({"attn_sink": SINK[:3]}, ValueError, r"^attn_sink must have shape \[4\] .* got \[3\]$"),
        ({"attn_sink": SINK.to(META)}, ValueError, "^attn_sink must be on cpu"),
        ({"topk_length": 9}, TypeError, "^topk_length must be a tensor, got int$"),
        ({"topk_length": LENGTH.float()}, TypeError, "^topk_length must be int32 or int64, got float32$"),
        ({"topk_length": LENGTH[:2]}, ValueError, r"^topk_length must have shape \[3\] .* got \[2\]$"),
        ({"topk_length": LENGTH.to(META)}, ValueError, "^topk_length must be on cpu"),
        ({"empty_lse": 0}, ValueError, r"^empty_lse must be float\('inf'\) or float\('-inf'\), got 0$"),
        ({"out": [0.0]}, TypeError, "^out must be a tensor, got list$"),
        ({"out": torch.empty(3, 4, 16)}, TypeError, "^out must be bfloat16, got float32$"),
        ({"out": torch.empty(3, 4, 24, dtype=BF16)}, ValueError, r"^out must have shape \[3, 4, 16\]"),
        ({"out": torch.empty(3, 4, 16, dtype=BF16, device=META)}, ValueError, "^out must be on cpu"),
        ({"out": torch.empty(3, 16, 4, dtype=BF16).mT}, ValueError, "^out must have last stride 1"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of hopper, portable, reference or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of sparse_prefill: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        sparse_prefill(**(VALID | change))
