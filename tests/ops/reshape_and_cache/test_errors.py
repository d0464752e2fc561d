import pytest
import torch

from flashlatte import reshape_and_cache

KEY, VALUE = torch.zeros(3, 2, 16), torch.zeros(3, 2, 8)
GIVEN = {
    "key": KEY,
    "value": VALUE,
    "k_cache": torch.zeros(4, 5, 2, 16),
    "v_cache": torch.zeros(4, 5, 2, 8),
    "slot_mapping": torch.arange(3),
}
QUANTIZED = {"k_cache": GIVEN["k_cache"].char(), "v_cache": GIVEN["v_cache"].char()}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": [1.0]}, TypeError, "^key must be a tensor, got list$"),
        ({"key": KEY.int()}, TypeError, "^key must be bfloat16 or float16 or float32, got int32$"),
        ({"key": KEY[0]}, ValueError, r"^key must have shape \[T, h_kv, d\]"),
        ({"value": VALUE.half()}, TypeError, "^value must be float32, got float16$"),
        ({"value": VALUE[:2]}, ValueError, r"^value must have shape \[3, 2, d_v\]"),
        ({"k_cache": GIVEN["k_cache"].bfloat16()}, TypeError, "^k_cache must be float32 or float8_e4m3fn or"),
        ({"k_cache": GIVEN["k_cache"][..., :15]}, ValueError, r"^k_cache must have shape \[pages, page_size, 2, 16\]"),
        (
            {"k_cache": torch.zeros(4, 5, 2, 3, 5)},
            ValueError,
            r"^k_cache must have shape .* 2, 3, 16\]",
        ),
        ({"k_cache": torch.zeros(4, 5, 2, 4, 2).mT}, ValueError, "^k_cache must have"),
        ({"k_cache": KEY[:1, None, :].expand(4, 5, 2, 16)}, ValueError, "^k_cache must not be an expanded tensor"),
        ({"v_cache": GIVEN["v_cache"].char()}, TypeError, "^v_cache must be float32, got int8$"),
        (
            {"v_cache": GIVEN["v_cache"][:2]},
            ValueError,
            "^v_cache must have .*4 pages of 5 tokens, got 2 of 5$",
        ),
        ({"slot_mapping": torch.zeros(3)}, TypeError, "^slot_mapping must be int32 or int64, got float32$"),
        (
            {"slot_mapping": torch.arange(4)},
            ValueError,
            r"^slot_mapping must not .* key \(3 tokens\), got 4$",
        ),
        ({"slot_mapping": torch.arange(3).to("meta")}, ValueError, "^slot_mapping must be on cpu like"),
        ({"k_scale": 1.0}, ValueError, "^k_scale belongs to a cache in float8_e4m3fn or float8_e5m2 or int8, and this"),
        ({**QUANTIZED, "k_scale": -1.0}, ValueError, "^k_scale must be a finite number above 0, got -1.0$"),
        (
            {**QUANTIZED, "v_scale": torch.ones(3)},
            ValueError,
            r"^v_scale must have one element or .*\[4, 5, 2\]",
        ),
        ({**QUANTIZED, "k_scale": torch.ones(2).half()}, TypeError, "^k_scale must be float32, got float16$"),
        ({**QUANTIZED, "k_scale": torch.ones(4, 5, 2).to("meta")}, ValueError, "^k_scale must be on cpu like"),
        (
            {**QUANTIZED, "k_scale": torch.ones(2).expand(4, 5, 2)},
            ValueError,
            "^k_scale must not be an expanded",
        ),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of reshape_and_cache: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        reshape_and_cache(**(GIVEN | change))
