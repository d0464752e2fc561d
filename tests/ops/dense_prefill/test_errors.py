import pytest
import torch

from flashlatte import dense_prefill
from flashlatte.runtime import dispatch
from flashlatte.testing.cases import DensePrefillCase

VALID = DensePrefillCase(3, 4, 6, 4, 2, head_dim=24, d_v=16, varlen=True).inputs()
Q, K, V, CU_Q, CU_K = (VALID[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
TOKENS = Q.shape[0]
META = torch.device("meta")
BF16 = torch.bfloat16


def test_the_arguments_that_the_errors_start_from_are_right():
    dense_prefill(**VALID)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "^q must be a tensor, got list$"),
        ({"q": Q.int()}, TypeError, "^q must be bfloat16 or float16 or float32 or float64, got int32$"),
        ({"q": Q[0]}, ValueError, r"^q must have shape .* got \[4, 24\]$"),
        ({"q": Q[:, :0]}, ValueError, r"^q must have shape .* no empty axis .*, got \[\d+, 0, 24\]$"),
        ({"q": Q[:, :3]}, ValueError, "^q must have a multiple of k's 2 heads, got 3$"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "^q must have last stride 1"),
        ({"k": K.half()}, TypeError, "^k must be bfloat16, got float16$"),
        ({"k": K[..., :16]}, ValueError, r"^k must have shape \[T_k, h_k, 24\] .* got \[\d+, 2, 16\]$"),
        ({"k": K.to(META)}, ValueError, "^k must be on cpu like the other arguments, got meta$"),
        ({"k": K[:-1]}, ValueError, r"^v must have shape \[\d+, 2, d_v\]"),
        ({"v": V[:, :1]}, ValueError, r"^v must have shape \[\d+, 2, d_v\] .* got \[\d+, 1, 16\]$"),
        ({"v": V.float()}, TypeError, "^v must be bfloat16, got float32$"),
        ({"v": V.repeat(1, 1, 2)[..., ::2]}, ValueError, "^v must have last stride 1"),
        ({"cu_seqlens_q": [0, 4]}, TypeError, "^cu_seqlens_q must be a tensor, got list$"),
        ({"cu_seqlens_q": CU_Q.float()}, TypeError, "^cu_seqlens_q must be int32 or int64, got float32$"),
        ({"cu_seqlens_q": CU_Q[:1]}, ValueError, r"^cu_seqlens_q must have shape \[b \+ 1\] with b at least 1"),
        ({"cu_seqlens_q": CU_Q[None]}, ValueError, r"^cu_seqlens_q must have shape \[b \+ 1\]"),
        ({"cu_seqlens_q": CU_Q.to(META)}, ValueError, "^cu_seqlens_q must be on cpu"),
        ({"cu_seqlens_q": CU_Q.flip(0)}, ValueError, "^cu_seqlens_q must not decrease, got"),
        ({"cu_seqlens_q": CU_Q + 1}, ValueError, "^cu_seqlens_q must be between 0 and "),
        ({"cu_seqlens_q": CU_Q - 1}, ValueError, f"^cu_seqlens_q must be between 0 and {TOKENS}, the number of tokens"),
        ({"cu_seqlens_k": CU_K[:-1]}, ValueError, r"^cu_seqlens_k must have shape \[4\] .* got \[3\]$"),
        ({"cu_seqlens_k": CU_K.flip(0)}, ValueError, "^cu_seqlens_k must not decrease"),
        ({"max_seqlen_q": -1}, ValueError, "^max_seqlen_q must be at least 0, got -1$"),
        ({"max_seqlen_k": 2.0}, TypeError, "^max_seqlen_k must be an int, got float$"),
        ({"softmax_scale": 0.0}, ValueError, "^softmax_scale must be a finite number above 0, got 0.0$"),
        ({"causal": 1}, TypeError, "^causal must be True or False, got 1$"),
        ({"deterministic": None}, TypeError, "^deterministic must be True or False, got None$"),
        ({"window": 0}, ValueError, "^window must be at least 1, or a pair, got 0$"),
        ({"window": 1.5}, TypeError, "^window must be an int, a pair of ints or None, got 1.5$"),
        (
            {"window": (1, -2)},
            ValueError,
            r"^window must hold lengths of at least 0, or -1 for unbounded, got \(1, -2\)$",
        ),
        ({"window": (1, None)}, TypeError, r"^window must be an int, a pair of ints or None, got \(1, None\)$"),
        ({"window": (1, 2, 3)}, TypeError, r"^window must be an int, a pair of ints or None, got \(1, 2, 3\)$"),
        ({"empty_lse": 0}, ValueError, r"^empty_lse must be float\('inf'\) or float\('-inf'\), got 0$"),
        ({"out": torch.empty(TOKENS, 4, 16)}, TypeError, "^out must be bfloat16, got float32$"),
        ({"out": torch.empty(TOKENS, 4, 24, dtype=BF16)}, ValueError, r"^out must have shape \[\d+, 4, 16\]"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of hopper, portable, reference or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of dense_prefill: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        dense_prefill(**(VALID | change))


def test_out_where_gradients_are_recorded():
    out = torch.empty(TOKENS, 4, 16, dtype=BF16)
    given = VALID | {"v": V.clone().requires_grad_()}
    with pytest.raises(ValueError, match=r"^out must be None if gradients are recorded"):
        dense_prefill(**given, out=out)
    with torch.no_grad():
        dense_prefill(**given, out=out)


def test_other_head_dims_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    call = dispatch.CallSpec("dense_prefill", torch.device("cuda"), BF16, head_dim=576, head_dim_v=512)
    reasons = {choice.backend: choice.refusal for choice in dispatch.explain(call)}
    assert reasons["hopper"] == "takes head dims from 64 to 256 by 8, not 576"
    assert reasons["portable"] == "takes head dims up to 256, not 576"
