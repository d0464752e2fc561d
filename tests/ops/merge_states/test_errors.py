import pytest
import torch

from flashlatte import merge_states

OUTS, LSES = [torch.zeros(3, 4, 8) for _ in range(2)], [torch.zeros(3, 4) for _ in range(2)]
META = torch.device("meta")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outs": 1.0}, TypeError, "^outs must be a sequence of tensors or one stacked tensor, got float$"),
        ({"outs": [1.0, 2.0]}, TypeError, "^outs must be a sequence of tensors or one stacked tensor, got list$"),
        ({"lses": None}, TypeError, "^lses must be a sequence of tensors or one stacked tensor, got NoneType$"),
        ({"outs": torch.tensor(0.0)}, ValueError, "^outs must be .* one stacked tensor, got a scalar$"),
        ({"outs": [], "lses": []}, ValueError, "^outs and lses must hold .* at least 1, got 0 and 0$"),
        ({"outs": OUTS[:1]}, ValueError, "^outs and lses must hold the same number of parts.* got 1 and 2$"),
        ({"lses": [*LSES, LSES[0]]}, ValueError, "^outs and lses must hold the same number of parts.* got 2 and 3$"),
        ({"outs": torch.zeros(2)}, ValueError, r"^outs\[0\] must have shape \[\.\.\., d\], got a scalar$"),
        ({"outs": [OUTS[0].int(), OUTS[1]]}, TypeError, r"^outs\[0\] must be bfloat16 .* got int32$"),
        ({"outs": [OUTS[0], OUTS[1].half()]}, TypeError, r"^outs\[1\] must be float32, got float16$"),
        ({"outs": [OUTS[0], OUTS[1][:2]]}, ValueError, r"^outs\[1\] must have shape \[3, 4, 8\] .* got \[2, 4, 8\]$"),
        ({"outs": [OUTS[0], OUTS[1].to(META)]}, ValueError, r"^outs\[1\] must be on cpu like the other arguments"),
        ({"lses": [LSES[0].half(), LSES[1]]}, TypeError, r"^lses\[0\] must be float32, got float16$"),
        ({"lses": [LSES[0], LSES[1].T]}, ValueError, r"^lses\[1\] must have shape \[3, 4\] .* got \[4, 3\]$"),
        ({"lses": [LSES[0], LSES[1].to(META)]}, ValueError, r"^lses\[1\] must be on cpu"),
        ({"out": [0.0]}, TypeError, "^out must be a tensor, got list$"),
        ({"out": OUTS[0].half()}, TypeError, "^out must be float32, got float16$"),
        ({"out": torch.zeros(3, 4)}, ValueError, r"^out must have shape \[3, 4, 8\] .* got \[3, 4\]$"),
        ({"out": OUTS[0].to(META)}, ValueError, "^out must be on cpu"),
        ({"lse": LSES[0].half()}, TypeError, "^lse must be float32, got float16$"),
        ({"lse": LSES[0].T}, ValueError, r"^lse must have shape \[3, 4\] .* got \[4, 3\]$"),
        ({"lse": LSES[0].to(META)}, ValueError, "^lse must be on cpu"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of hopper, portable, reference or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of merge_states: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        merge_states(**({"outs": OUTS, "lses": LSES} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.empty(2, 3)}, "^out and lse must be None if gradients are recorded"),
        ({"lse": torch.empty(2)}, "^out and lse must be None if gradients are recorded"),
        ({"backend": "portable"}, "^backend must be 'reference' or None if gradients are recorded, got 'portable'$"),
    ],
)
def test_calls_that_cannot_record_gradients_are_rejected(change, message):
    outs = [torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)]
    with pytest.raises(ValueError, match=message):
        merge_states(outs, [torch.zeros(2), torch.zeros(2)], **change)
