"""Merging of attention results: ``merge_state``, ``merge_states`` and ``merge_state_in_place``."""

from __future__ import annotations

import torch

from flashlatte.flashinfer.conventions import LN_2, LOG2_E
from flashlatte.ops.merge_states import merge_states as merge
from flashlatte.runtime import checks


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention of the same queries over two sets of keys: ``flashlatte.merge_states``.

    Args:
        v_a, v_b: [seq_len, heads, d], bf16, fp16 or float32.
        s_a, s_b: base-2 lse [seq_len, heads], converted to float32; infinite without keys.

    Returns:
        The merged result in the dtype of ``v_a``, and its base-2 lse, float32. Without any key, 0 and -inf.

    Raises:
        TypeError, ValueError: states that differ in shape, dtype or device.
    """
    with checks.naming(**{"outs[0]": "v_a", "outs[1]": "v_b", "lses[0]": "s_a", "lses[1]": "s_b"}):
        out, lse = merge(
            [checks.given("v_a", v_a), checks.given("v_b", v_b)], [_natural("s_a", s_a), _natural("s_b", s_b)]
        )
    return out, lse.mul_(LOG2_E)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge_state`` of any number of states.

    Args:
        v: [seq_len, states, heads, d], states at least 1.
        s: base-2 lse [seq_len, states, heads], converted to float32.

    Returns:
        [seq_len, heads, d] in the dtype of ``v``, and its base-2 lse, float32 [seq_len, heads].

    Raises:
        TypeError, ValueError: no state, or shapes that do not match.
    """
    checks.tensor("v", v, ("seq_len", "states", "heads", "d"), checks.FLOAT_DTYPES, may_be_empty=1)
    natural = _natural("s", s)
    checks.tensor("s", natural, tuple(v.shape[:3]), (torch.float32,), v.device, may_be_empty=1)
    out, lse = merge(v.unbind(1), natural.unbind(1))
    return out, lse.mul_(LOG2_E)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """``merge_state`` that writes to its first state.

    Args:
        v, v_other: [seq_len, heads, d], bf16, fp16 or float32.
        s: base-2 lse, float32 [seq_len, heads].
        s_other: base-2 lse [seq_len, heads], converted to float32.
        mask: bool or uint8 [seq_len]; a token whose entry is 0 stays as it is. Its values may change between replays of
            a CUDA graph.

    Raises:
        TypeError, ValueError: states that differ in shape, dtype or device; ``s`` is not float32.
    """
    checks.tensor("s", s, ("seq_len", "heads"), (torch.float32,), unit_last_stride=False, may_be_empty=1)
    checks.writable("s", s)
    checks.writable("v", checks.given("v", v))
    with checks.naming(**{"outs[0]": "v", "outs[1]": "v_other", "lses[0]": "s", "lses[1]": "s_other"}):
        out, lse = merge([v, checks.given("v_other", v_other)], [s * LN_2, _natural("s_other", s_other)])
    lse.mul_(LOG2_E)
    if mask is not None:
        checks.tensor("mask", mask, (s.shape[0],), (torch.bool, torch.uint8), s.device, may_be_empty=1)
        merged = mask.bool()
        out, lse = torch.where(merged.view(-1, 1, 1), out, v), torch.where(merged.unsqueeze(1), lse, s)
    v.copy_(out)
    s.copy_(lse)


def _natural(name: str, s: torch.Tensor) -> torch.Tensor:
    """A base-2 lse as a natural logarithm in float32."""
    return checks.given(name, s).float() * LN_2
