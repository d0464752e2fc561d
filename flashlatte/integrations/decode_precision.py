"""``FLASHLATTE_DECODE_PRECISION``, the option of the vLLM and SGLang plugins for decode over e4m3 caches.

"fp8" selects ``precision="fp8"`` of ``dense_decode``. Unset or empty: exact products. A plugin refuses to start if the
model, cache or GPU does not have this form, so that the option is never ignored.
"""

from __future__ import annotations

import os

import torch

from flashlatte.kv_cache.registry import plain_format
from flashlatte.ops import dense_decode as _dense_decode  # noqa: F401  (registers the operation's implementations)
from flashlatte.runtime import dispatch

VARIABLE = "FLASHLATTE_DECODE_PRECISION"


def requested() -> str | None:
    """The value of ``FLASHLATTE_DECODE_PRECISION``; None if it is unset or empty.

    Raises:
        ValueError: it is set to another value than "fp8".
    """
    value = os.environ.get(VARIABLE) or None
    if value not in (None, "fp8"):
        raise ValueError(f"{VARIABLE} must be fp8, or unset for exact products, got {value!r}")
    return value


def refusal(
    device_type: str, head_dim: int | None, dtype: torch.dtype, cache_dtype: torch.dtype, page_size: int | None
) -> str | None:
    """Why the requested precision is not available for dense decode; None if it is, or if none is requested.

    Args:
        head_dim, page_size: None if not known yet.
        dtype: dtype of the queries.
    """
    precision = requested()
    if precision is None:
        return None
    if cache_dtype != torch.float8_e4m3fn:
        return needs_message("an fp8 cache in e4m3")
    call = dispatch.CallSpec(
        "dense_decode",
        torch.device(device_type),
        dtype,
        cache_format=plain_format(cache_dtype).name,
        page_size=page_size,
        head_dim=head_dim,
        h_kv=1,
        optional_features=f"precision={precision!r}",
    )
    name = backend(device_type) or "reference"
    reason = dispatch.refusal(call, name)
    return None if reason is None else needs_message(f"a kernel, and that of {name} {reason}")


def needs_message(requirement: str) -> str:
    """The message of a refusal for a missing requirement."""
    return f"{VARIABLE}={requested()} needs {requirement}"


def backend(device_type: str) -> str | None:
    """The ``backend`` of ``dense_decode`` with the requested precision; None lets the operation choose.

    Named on a GPU, so that ``refusal`` states the kernel's reason.
    """
    return "hopper" if requested() is not None and device_type != "cpu" else None
