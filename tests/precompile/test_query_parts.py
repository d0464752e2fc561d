"""Calls with queries in two tensors launch dense decode's kernels that ``flashlatte compile`` compiles."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.model_fields import V3_FIELDS

import flashlatte
import flashlatte.flashinfer as flashinfer
from flashlatte.layers import MLAConfig
from flashlatte.layers.warmup import warmup_steps
from flashlatte.runtime import machine, precompile

MODEL = V3_FIELDS
HEADS, PAGE = MODEL["num_attention_heads"], 64
KERNEL = "dense_decode_kernel"


@pytest.fixture
def assume():
    """A function that assumes a GPU of a compute capability until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda capability: stack.enter_context(precompile.assuming(machine.GPU(capability, 132)))


def warm_up(cache_format="bf16", changes=(), **options):
    config = replace(MLAConfig.from_transformers(MODEL), **dict(changes))
    for _ in warmup_steps(config, cache_format=cache_format, max_batch=4, **options):
        pass


def cache_of(dtype=torch.bfloat16):
    return torch.zeros(9, PAGE, 576, dtype=dtype)


def vllm_call(batch, queries, dtype=torch.bfloat16, **options):
    """Parts of other strides than ``flashlatte compile`` has, and fewer pages of a request."""
    q = torch.zeros(batch, queries, HEADS, 512, dtype=torch.bfloat16)
    rope = torch.zeros(batch, queries, HEADS, 64, dtype=torch.bfloat16)
    table, lengths = torch.zeros(batch, 40, dtype=torch.int32), torch.full((batch,), 2000, dtype=torch.int32)
    flashlatte.dense_decode(q, cache_of(dtype)[:, :, None], table, lengths, q_rope=rope, causal=True, **options)


def flashinfer_call(batch, queries, kv_dtype=torch.bfloat16, **scales):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1, dtype=torch.uint8))
    starts, pages = torch.arange(batch + 1, dtype=torch.int32), torch.zeros(40 * batch, dtype=torch.int32)
    lengths = torch.full((batch,), 2000, dtype=torch.int32)
    dtypes = torch.bfloat16, kv_dtype
    wrapper.plan(starts * queries, starts * 40, pages, lengths, HEADS, 512, 64, PAGE, True, 0.1, *dtypes)
    q, cache = torch.zeros(batch * queries, HEADS, 576, dtype=torch.bfloat16), cache_of(kv_dtype)
    parts = (q[..., :512], q[..., 512:].clone(), cache[..., :512], cache[..., 512:])
    wrapper.run(*parts, return_lse=True, **scales)


def decode_variants(*calls):
    """For each call, the number of dense decode's kernels that no earlier call has launched."""
    with precompile.collected() as found:
        counts = []
        for call in calls:
            before = len(found)
            call()
            counts.append(sum(variant.name == KERNEL for variant in found[before:]))
    return counts


@pytest.mark.parametrize("call", [vllm_call, flashinfer_call])
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (3, 2)])
def test_calls_find_the_keys_of_the_steps(assume, call, batch, queries):
    assume((9, 0))
    assert decode_variants(lambda: call(batch, queries)) == [1]
    steps, missing = decode_variants(warm_up, lambda: call(batch, queries))
    assert steps > 1
    assert missing == 0


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(1)], ids=["scalar", "one-element"])
def test_calls_with_vllms_scale_find_the_keys_of_the_steps(assume, precision, scale):
    assume((9, 0))

    def called():
        vllm_call(2, 1, torch.float8_e4m3fn, k_scale=scale, precision=precision)

    assert decode_variants(lambda: warm_up("fp8", decode_precision=precision), called)[1] == 0
    # Exact products over the same cache are another variant than e4m3's.
    other = {None: "fp8", "fp8": None}[precision]
    assert decode_variants(lambda: warm_up("fp8", decode_precision=other), called)[1] == 1


@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (3, 2)])
def test_calls_with_flashinfers_scales_find_the_keys_of_the_steps(assume, batch, queries):
    assume((9, 0))

    def called():
        flashinfer_call(batch, queries, torch.float8_e4m3fn, ckv_scale=0.5, kpe_scale=0.5)

    steps, missing = decode_variants(lambda: warm_up("fp8"), called)
    assert steps > 1
    assert missing == 0


@pytest.mark.parametrize(
    ("capability", "cache_format", "changes"),
    [
        ((8, 0), "bf16", {}),  # the portable kernel reads joined queries
        ((9, 0), "bf16", {"qk_rope_head_dim": 0}),
        ((9, 0), "bf16", {"window": 512}),
        ((9, 0), "v32", {}),  # sparse_decode reads it
    ],
    ids=["portable", "without-rope", "window", "v32"],
)
def test_other_configurations_have_no_second_form(assume, monkeypatch, capability, cache_format, changes):
    assume(capability)
    both = decode_variants(lambda: warm_up(cache_format, changes))
    monkeypatch.setattr("flashlatte.layers.warmup._dense_plugin_steps", lambda *_: iter(()))
    assert decode_variants(lambda: warm_up(cache_format, changes)) == both


STEP = """
import json
import torch
import flashlatte
from flashlatte.runtime import machine, precompile

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)

cache, q, q_rope = zeros(9, 64, 1, 576), zeros(3, 1, 16, 512), zeros(3, 1, 16, 64)
with precompile.assuming(machine.GPU((9, 0), 132)):
    with precompile.collected() as found:
        table, lengths = zeros(3, 40, dtype=torch.int32), zeros(3, dtype=torch.int32)
        flashlatte.dense_decode(q, cache, table, lengths, q_rope=q_rope)
    print(json.dumps([(one.name, one.is_compiled()) for one in found]))
"""


@pytest.mark.full
def test_a_call_finds_its_kernels_in_the_cache(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def python(*command):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = json.loads(python("-c", STEP))
    options = ("--model", str(tmp_path), "--target", "sm_90", "--max-batch", "4", "--max-queries", "1", "--jobs", "2")
    python("-m", "flashlatte", "compile", *options)
    assert Counter(name for name, _ in before)[KERNEL] == 1
    assert not any(compiled for _, compiled in before)
    assert all(compiled for _, compiled in json.loads(python("-c", STEP)))
