"""Compressed rows compared with the formula in float64, for any division of tokens into calls."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import compress, kv_cache
from flashlatte.kv_cache.codec import as_cache
from flashlatte.kv_cache.registry import as_format
from flashlatte.ops.compress import api
from flashlatte.runtime import machine
from flashlatte.testing.byte_oracles import model1_encode_page, v41_encode, v41_fp4_encode

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernels).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []
PAGE_SIZE, STATE_PAGE_SIZE = 4, 3


def oracle(kv, score, ape, weight, cos_sin, eps) -> torch.Tensor:
    """float64 rows [groups, head_dim] of all tokens of one request, channel by channel."""
    head_dim, (ratio, width) = len(weight), ape.shape
    rows = []
    for group in range(len(kv) // ratio):
        first, row = group * ratio, []
        for channel in range(head_dim):
            members = [(t, channel + width - head_dim) for t in range(first, first + ratio)]
            if width > head_dim and group:
                members += [(t, channel) for t in range(first - ratio, first)]
            logits = [float(score[t, c].double() + ape[t % ratio, c].double()) for t, c in members]
            shares = [math.exp(logit - max(logits)) for logit in logits]
            row.append(
                sum(share * float(kv[at]) for share, at in zip(shares, members, strict=True)) / math.fsum(shares)
            )
        norm = math.sqrt(math.fsum(x * x for x in row) / head_dim + eps)
        row = [x / norm * float(gain) for x, gain in zip(row, weight, strict=True)]
        pairs = cos_sin.shape[1] // 2
        table = cos_sin[min(first, len(cos_sin) - 1)].tolist()
        for pair in range(pairs):
            at = head_dim - 2 * pairs + 2 * pair
            turned = complex(row[at], row[at + 1]) * complex(table[pair], table[pairs + pair])
            row[at], row[at + 1] = turned.real, turned.imag
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).view(-1, head_dim)


@dataclass
class Case:
    """Requests whose tokens arrive in steps; ``kv`` and ``score`` are lists by request."""

    kv: list[torch.Tensor]
    score: list[torch.Tensor]
    ape: torch.Tensor
    weight: torch.Tensor
    cos_sin: torch.Tensor
    columns: int

    @classmethod
    def draw(cls, lengths, ratio, overlaps, head_dim, rope, dtype, drafts, seed):
        generator = torch.Generator().manual_seed(seed)
        width = head_dim * (1 + overlaps)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        angles = torch.rand(max(*lengths, 9), rope // 2, generator=generator) * 6
        return cls(
            [normal(n, width).to(dtype) for n in lengths],
            [normal(n, width).mul(3).to(dtype) for n in lengths],
            normal(ratio, width),
            normal(head_dim),
            torch.cat((angles.cos(), angles.sin()), dim=1),
            -(-((1 + overlaps) * ratio - 1 + drafts) // STATE_PAGE_SIZE),
        )

    def caches(self, form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A cache for all rows, request after request, a state cache full of NaN, and its table."""
        pages = sum(-(-len(kv) // PAGE_SIZE) for kv in self.kv) + 1
        cache = kv_cache.allocate(as_format(form, len(self.weight)), pages, PAGE_SIZE)
        count = len(self.kv) * self.columns
        states = torch.full((count + 2, STATE_PAGE_SIZE, 2 * self.ape.shape[1]), torch.nan)
        table = torch.randperm(count, generator=torch.Generator().manual_seed(3)).view(-1, self.columns)
        return cache, states, table

    def slots(self, request, positions):
        first = sum(-(-len(kv) // PAGE_SIZE) for kv in self.kv[:request]) * PAGE_SIZE
        return [first + p // len(self.ape) for p in positions]

    def run(self, steps, form="fp32", scale_rounding="power_of_two", with_state=True):
        """``steps``: for each call, the first token and the one beyond the last of each request."""
        cache, states, table = self.caches(form)
        for step in steps:
            ids, positions, slots, kv, score = [], [], [], [], []
            for request, (begin, end) in enumerate(step):
                span = range(begin, end)
                ids += [request] * len(span)
                positions += span
                slots += self.slots(request, span)
                kv.append(self.kv[request][begin:end])
                score.append(self.score[request][begin:end])
            # Padding at the end, as in CUDA graphs.
            poison = torch.full((2, kv[0].shape[1]), torch.nan, dtype=kv[0].dtype)
            compress(
                torch.cat([*kv, poison]),
                torch.cat([*score, poison]),
                self.ape,
                self.weight,
                self.cos_sin,
                torch.tensor([*ids, -1, len(self.kv) if with_state else -7]),
                torch.tensor([*positions, len(self.ape) - 1, len(self.ape) - 1]),
                cache,
                torch.tensor([*slots, 0, 0]),
                state_cache=states if with_state else None,
                state_table=table if with_state else None,
                cache_format=form if form.startswith("v41") else None,
                scale_rounding=scale_rounding,
                backend=BACKEND,
            )
        return cache

    def rows(self, cache):
        """Rows of a plain cache, by request."""
        flat = cache.flatten(0, 1)[:, 0]
        ratio = len(self.ape)
        return [flat[self.slots(r, [0])[0] :][: len(kv) // ratio] for r, kv in enumerate(self.kv)]


def steps_of(lengths, seed, drafts):
    """Steps that end with all tokens; up to ``drafts`` tokens of a step are rolled back and repeated."""
    rng = random.Random(seed)
    done, steps = [0] * len(lengths), []
    while done != lengths:
        step = [(d, min(n, d + rng.choice([0, 1, 1, 5, 20]))) for d, n in zip(done, lengths, strict=True)]
        steps.append(step)
        done = [
            end if end == n else max(begin, end - rng.randint(0, drafts))
            for (begin, end), n in zip(step, lengths, strict=True)
        ]
    return steps


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=2),
    shape=st.sampled_from(
        [
            (4, True, 16, 8),
            (4, True, 32, 32),
            (8, False, 16, 4),
            (5, False, 32, 8),
            (1, True, 16, 2),
            (12, False, 64, 8),
        ]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    drafts=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_against_float64_however_divided(lengths, shape, dtype, drafts, seed):
    case = Case.draw(lengths, *shape, dtype=dtype, drafts=drafts, seed=seed)
    # In one call with all tokens.
    whole = case.run([[(0, n) for n in lengths]])
    for request, rows in enumerate(case.rows(whole)):
        expected = oracle(case.kv[request], case.score[request], case.ape, case.weight, case.cos_sin, 1e-6)
        torch.testing.assert_close(rows.double(), expected, rtol=2e-5, atol=2e-5)
    # Slots without a completed group are unchanged.
    assert int((whole != 0).any(dim=-1).sum()) == sum(n // shape[0] for n in lengths)
    divided = case.run(steps_of(lengths, seed, drafts))
    if machine.interpreting():
        assert divided.equal(whole)
    else:  # Rounding of PyTorch's softmax depends on the number of groups per thread.
        torch.testing.assert_close(divided, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not machine.interpreting(), reason="the kernels'")
def test_sums_of_many_tokens_take_several_launches(monkeypatch):
    from flashlatte.ops.compress.portable import launch

    case = Case.draw([13, 12], 12, False, 64, 8, torch.float32, 0, 1)
    steps = [[(0, 13), (0, 12)]]
    at_once = case.run(steps)
    monkeypatch.setattr(launch, "MAX_SUMS_BYTES", 4 * 64 * 9)
    assert case.run(steps).equal(at_once)


def test_without_states():
    case = Case.draw([13, 8], 4, True, 16, 8, torch.float32, 0, 1)
    steps = [[(0, 13), (0, 8)]]
    assert case.run(steps, with_state=False).equal(case.run(steps))


def test_the_table_may_be_as_long_as_the_request():
    case = Case.draw([30], 4, True, 16, 8, torch.float32, 0, 1)
    ring = case.run(steps_of([30], 5, 0))
    case.columns = 10
    assert case.run(steps_of([30], 5, 0)).equal(ring)


@pytest.mark.parametrize("page", [-1, 99, -(2**40)])
def test_pages_outside_the_states_are_not_followed(page):
    case = Case.draw([8], 4, True, 16, 8, torch.float32, 0, 1)
    cache, states, table = case.caches("fp32")
    before = states.clone()
    arguments: dict[str, Any] = {
        **call_arguments(case, range(7), cache),
        "state_cache": states,
        "state_table": torch.full_like(table, page),
    }
    compress(**arguments)
    assert states.view(torch.int32).equal(before.view(torch.int32))
    arguments |= call_arguments(case, range(7, 8), cache)
    compress(**arguments)
    # If only the last token is available, its weight is 1.
    last = case.kv[0][7, 16:] * 1.0
    normed = last * torch.rsqrt(last.square().mean() + 1e-6) * case.weight
    torch.testing.assert_close(cache.flatten(0, 1)[1, 0, :8], normed[:8])


def test_positions_beyond_32_bits_have_no_states():
    case = Case.draw([8], 4, False, 16, 8, torch.float32, 0, 1)
    cache, states, table = case.caches("fp32")
    arguments: dict[str, Any] = {
        **call_arguments(case, range(3), cache),
        "positions": torch.arange(3) + 2**31 - 2,
        "slot_mapping": torch.full((3,), -1),
        "state_cache": states,
        "state_table": table,
    }
    compress(**arguments)
    # The first two are kept.
    assert int(states.isfinite().all(dim=-1).sum()) == 2


@pytest.mark.parametrize("slot", [-1, 10**6, 2**40, -(2**40)])
def test_slots_outside_the_cache_are_skipped(slot):
    case = Case.draw([8], 4, False, 16, 8, torch.float32, 0, 1)
    cache, _, _ = case.caches("fp32")
    arguments = call_arguments(case, range(8), cache)
    arguments["slot_mapping"] = torch.full((8,), slot)
    compress(**arguments)
    assert not cache.any()


def call_arguments(case, positions, cache) -> dict[str, Any]:
    span = slice(positions.start, positions.stop)
    return {
        "kv": case.kv[0][span],
        "score": case.score[0][span],
        "ape": case.ape,
        "weight": case.weight,
        "cos_sin": case.cos_sin,
        "request_ids": torch.zeros(len(positions), dtype=torch.int32),
        "positions": torch.tensor(list(positions)),
        "cache": cache,
        "slot_mapping": torch.tensor(case.slots(0, positions)),
        "backend": BACKEND,
    }


def test_model1_bytes():
    case = Case.draw([24], 4, True, 512, 64, torch.bfloat16, 0, 2)
    step = [[(0, 24)]]
    rows = case.run(step).flatten(0, 1)[:, 0]
    cache = case.run(step, form="model1")
    for page in range(2):
        expected = model1_encode_page(rows[4 * page :][:4].tolist())
        used = 4 if page == 0 else 2
        written = bytes(as_cache(cache, None)[0][page].flatten().tolist())
        assert written[: 576 * used] == expected[: 576 * used]
        assert written[576 * 4 :][: 8 * used] == expected[576 * 4 :][: 8 * used]


@pytest.mark.parametrize(("form", "encode"), [("v41", v41_encode), ("v41_fp4", v41_fp4_encode)])
@pytest.mark.parametrize("ratio", [2, 16])
def test_block_scaled_bytes(form, encode, ratio):
    """Rows of short groups are stored by the sum kernel, those of long groups by the second launch."""
    case = Case.draw([3 * ratio], ratio, False, 512, 64, torch.bfloat16, 0, 2)
    rows = case.run([[(0, 3 * ratio)]]).flatten(0, 1)[:3, 0]
    cache = case.run([[(0, 3 * ratio)]], form=form).flatten(0, 1)[:3, 0]
    for row, written in zip(rows.tolist(), cache.tolist(), strict=True):
        assert bytes(written) == encode(row)


@pytest.mark.parametrize(
    ("form", "rounding"),
    [("index_fp8", "power_of_two"), ("index_fp8", "exact"), ("index_mxfp4", "power_of_two"), ("index_bf16", "exact")],
)
def test_index_keys_bytes(form, rounding):
    case = Case.draw([24], 4, True, 128, 64, torch.bfloat16, 0, 2)
    rows = case.run([[(0, 24)]]).flatten(0, 1)[:6, 0]
    cache = case.run([[(0, 24)]], form=form, scale_rounding=rounding)
    layout = as_format(form, 128)
    written = torch.cat([view.flatten(0, 1)[:6] for view in layout.page_views(as_cache(cache, layout)[0])], dim=-1)
    expected = kv_cache.quantize(rows, layout, scale_rounding=rounding)
    assert written.view(torch.uint8).equal(expected.view(torch.uint8))


def call(**change):
    arguments: dict[str, Any] = {
        "kv": torch.zeros(6, 32),
        "score": torch.zeros(6, 32),
        "ape": torch.zeros(4, 32),
        "weight": torch.zeros(16),
        "cos_sin": torch.ones(5, 8),
        "request_ids": torch.zeros(6, dtype=torch.int32),
        "positions": torch.arange(6),
        "cache": torch.zeros(2, 4, 1, 16),
        "slot_mapping": torch.arange(6),
        "state_cache": torch.zeros(5, 3, 64),
        "state_table": torch.zeros(1, 3, dtype=torch.int32),
    }
    return compress(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"score": torch.zeros(6, 16)}, ValueError, r"^score must have shape \[6, 32\]"),
        ({"score": torch.zeros(6, 32).half()}, TypeError, "^score must be float32, got float16$"),
        ({"weight": torch.zeros(15)}, ValueError, "^kv must be 15 wide like weight, or twice that"),
        ({"ape": torch.zeros(4, 32).half()}, TypeError, "^ape must be float32"),
        ({"cos_sin": torch.ones(5, 7)}, ValueError, "^cos_sin must be contiguous and have an even width of at most 16"),
        ({"positions": torch.arange(5)}, ValueError, r"^positions must have shape \[6\]"),
        ({"cache": torch.zeros(2, 4, 1, 24)}, ValueError, "^cache of format fp32 must take rows of 16, got 24$"),
        (
            {"cache": torch.zeros(1, 4, 1, 16).expand(2, -1, -1, -1)},
            ValueError,
            "^cache must not be an expanded tensor",
        ),
        ({"cache_format": "bf16"}, TypeError, "^cache of format bf16 must be bfloat16"),
        ({"state_table": None}, ValueError, "^state_cache and state_table must be given together"),
        ({"state_cache": torch.zeros(5, 3, 63)}, ValueError, r"^state_cache must have shape \[pages, page_size, 64\]"),
        (
            {"state_table": torch.zeros(1, 2, dtype=torch.int32)},
            ValueError,
            "^state_table must have room for 7 tokens of a request, got 2 pages of 3$",
        ),
        ({"eps": "small"}, TypeError, "^eps must be a number"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of compress: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_no_tokens():
    empty = torch.zeros(0, dtype=torch.int32)
    call(kv=torch.zeros(0, 32), score=torch.zeros(0, 32), request_ids=empty, positions=empty, slot_mapping=empty)


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "compress", call)
