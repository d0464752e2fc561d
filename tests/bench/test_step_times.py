"""Results computed from engines' outputs; tests with engines need vLLM or SGLang."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any, cast

import pytest

from flashlatte.bench.serving.engine_process import EngineEnded, EngineProcess
from flashlatte.bench.serving.step_cases import cases_of, parsed
from flashlatte.bench.serving.step_times import (
    ATTENTION,
    INDEXER,
    BackendTimes,
    Host,
    agreement,
    compare,
    first_difference,
    largest_error,
    surviving,
)

PAIRS = [
    # tokens, others, agreement, first difference, largest error
    ([[[5, -1.0], [6, -2.0]]], [[[5, -1.0], [6, -2.5]]], (1, 0.5), None, 0.5),
    ([[[5, -1.0], [6, -2.0]]], [[[5, -1.25], [7, -9.0]]], (0, 0.25), 1, 7.0),
    # After a different token the contexts differ.
    ([[[4, -1.0], [6, -2.0]], [[1, -1.0]]], [[[5, -1.5], [6, -9.0]], [[1, -1.125]]], (1, 0.125), 0, 0.5),
]
CASES = argparse.Namespace(cases="2x40", prefill="9", steps=4, rounds=2, json=None)


@pytest.mark.parametrize(("ours", "theirs", "equal", "first", "error"), PAIRS)
def test_comparison_ends_at_the_first_different_token(ours, theirs, equal, first, error):
    assert agreement(ours, theirs) == equal
    assert first_difference(ours, theirs) == first
    assert largest_error(ours, theirs) == error


def test_nan_is_the_largest_error():
    assert math.isnan(largest_error([[[5, math.nan], [6, -2.0]]], [[[5, -1.0], [6, -5.0]]]))


@pytest.mark.parametrize(
    ("kernel", "is_attention"),
    [
        ("dense_decode_kernel", True),
        ("combine_fp24_kernel", True),
        ("dense_prefill_forward_kernel", True),
        ("void legacy::sm90::decode::dense::flash_fwd_splitkv_mla_kernel<>", True),
        ("void legacy::smxx::decode::flash_fwd_mla_combine_kernel<>", True),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>", True),
        ("void flash::prepare_varlen_num_blocks_kernel<>", True),
        ("void sm90::fwd::sparse_attn_fwd_kernel<>", True),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<>", True),
        ("_fwd_grouped_kernel_stage1", True),
        ("void vllm::concat_and_cache_mla_kernel<>", False),
        ("concat_mla_q_kernel", False),
        ("set_mla_kv_buffer_kernel", False),
        ("nvjet_sm90_tst_192x128_64x5_2x1_v_bz_coopB_TNT", False),
        ("void cublasLt::splitKreduce_kernel<>", False),
        ("void vllm::act_and_mul_kernel<>", False),
        ("_fused_kv_compress_norm_rope_insert_sparse_attn", False),
        ("void vllm::moe::topkGatingSoftplusSqrt<>", False),
    ],
)
def test_kernels_of_attention(kernel, is_attention):
    assert (ATTENTION.search(kernel) is not None) == is_attention
    assert INDEXER.search(kernel) is None


@pytest.mark.parametrize(
    "kernel",
    [
        "sm90_fp8_paged_mqa_logits",
        "index_logits_paged_kernel",
        "topk_kernel<>",
        "void vllm::cooperative::cooperative_topk_cs4<2048u>",
        "void vllm::topKPerRowPrefill<>",
        "index_convert_kernel",
        "sparse_mla_index_remap_kernel",
        "index_gather_kernel",
        "void vllm::cp_gather_indexer_k_quant_cache_kernel<4>",
    ],
)
def test_kernels_of_the_indexer(kernel):
    assert INDEXER.search(kernel)
    assert ATTENTION.search(kernel) is None


def test_an_engine_that_ends_does_not_stop_the_others(capsys):
    """Both processes end because the module is missing: one before a request is sent, one during it."""
    engines = [EngineProcess("CUSTOM", "no_such_module", {}) for _ in range(2)]
    engines[0].process.wait()
    assert surviving(map(BackendTimes, engines), lambda row: row.engine.ask("about")) == []
    assert capsys.readouterr().err.count("the engine with CUSTOM ended with") == 2


@pytest.mark.parametrize("cases", ["4096", "1x", "0x40", "1x-5", "1x40x2", "ax40"])
def test_malformed_cases_are_refused(cases):
    with pytest.raises(ValueError, match="--cases must be requests x tokens of context"):
        parsed(cases)


def test_cases_are_decode_and_prefill():
    decode, prefill = cases_of(CASES)
    assert (decode.name, decode.measure, decode.is_decode) == ("b2-40", ("time", 4), True)
    assert (prefill.name, prefill.prepare, prefill.is_decode) == ("prefill-9", ("prefill", 9), False)


class Engine:
    """A fake engine process that records its requests."""

    def __init__(self, backend: str, us: float, tokens: list[list[list[float]]], kernels: dict[str, float]) -> None:
        self.backend, self.us, self.generated, self.of_kernels = backend, us, tokens, kernels
        self.requests: list[tuple[Any, ...]] = []

    def answer(self) -> dict[str, Any]:
        return {"device": "a GPU"}

    def ask(self, *request: Any) -> Any:
        self.requests.append(request)
        answers = {"tokens": self.generated, "time": self.us, "prefill": self.us, "kernels": self.of_kernels}
        return answers.get(request[0])


TOKENS = [[[5, -1.0], [6, -2.0]], [[7, -1.0], [8, -1.0]]]
NEAR = [[[5, -1.1], [6, -2.0]], [[7, -1.0], [9, -1.0]]]
FAR = [[[5, -3.0], [6, -2.0]], [[7, -1.0], [8, -1.0]]]


def compared(engines: list[Engine], tmp_path, **host: Any) -> tuple[int, list[dict[str, Any]]]:
    file = tmp_path / "steps.jsonl"
    options = argparse.Namespace(**vars(CASES) | {"json": file})
    names = [engine.backend for engine in engines]
    code = compare(names, cast("list[EngineProcess]", engines), Host("step", {"model": "v3"}, **host), options)
    return code, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_engines_are_measured_alternately_and_recorded(tmp_path, capsys):
    order: list[str] = []
    kernels = {"flash_fwd": 30.0, "gemm": 60.0, "topk": 10.0, "copy": 0.5}
    engines = [Engine("A", 200.0, TOKENS, kernels), Engine("B", 100.0, NEAR, kernels)]
    for engine in engines:
        ask = engine.ask
        engine.ask = lambda *request, ask=ask, name=engine.backend: order.append(name + request[0]) or ask(*request)
    code, lines = compared(engines, tmp_path)
    assert code == 0
    assert [name[0] for name in order if name.endswith("time")] == ["A", "B", "B", "A"]
    assert [(line["case"], line["backend"]) for line in lines] == [
        (case, name) for case in ("b2-40", "prefill-9") for name in ("a", "b")
    ]
    assert lines[1] | {"commit": "", "date": ""} == {
        "op": "step",
        "case": "b2-40",
        "backend": "b",
        "us": 100.0,
        "us_min": 100.0,
        "us_max": 100.0,
        "gpu_us": 100.5,
        "attention_us": 30.0,
        "indexer_us": 10.0,
        "kernels": {"flash_fwd": 30.0, "gemm": 60.0, "topk": 10.0},
        "requests": 2,
        "agreement": {"a": [1, pytest.approx(0.1)]},
        "model": "v3",
        "device": "a GPU",
        "commit": "",
        "date": "",
    }
    printed = capsys.readouterr().out
    assert re.search(
        r"b2-40 B +0\.100 ms, 0\.500 of the first backend's; GPU 0\.101, attention 0\.030, indexer", printed
    )
    assert "equal tokens 1 of 2, first difference at token 1, logprobs within 0.1000" in printed
    assert "B: 0.500 times as long as A (geometric mean of 2 cases)" in printed


def test_wrong_tokens_are_not_recorded(tmp_path, capsys):
    engines = [Engine("A", 200.0, TOKENS, {}), Engine("B", 100.0, FAR, {}), Engine("C", 90.0, NEAR, {})]
    host = {"reference": lambda backend: None if backend == "A" else "A", "tolerance": 0.15}
    code, lines = compared(engines, tmp_path, **host)
    assert code == 1
    assert [line["backend"] for line in lines] == ["a", "c"] * 2
    output = capsys.readouterr()
    assert output.err.count("WRONG: a log-probability differs by 2.0000 from that of A") == 2
    assert " B " not in output.out


def test_tokens_without_a_reference_are_not_recorded(tmp_path, capsys):
    """The engine that has the reference ended."""
    first = Engine("A", 200.0, TOKENS, {})

    def end(*_: Any) -> Any:
        raise EngineEnded("the engine with A ended with 1")

    first.ask = end
    engines = [Engine("C", 9.0, TOKENS, {}), first, Engine("B", 100.0, TOKENS, {})]
    code, lines = compared(engines, tmp_path, reference=lambda backend: "A" if backend == "B" else None)
    assert code == 1
    assert [line["backend"] for line in lines] == ["c", "c"]
    assert "there are no tokens of A to compare with" in capsys.readouterr().err


def test_rows_with_a_fault_are_not_recorded(tmp_path, capsys):
    engines = [Engine("A", 200.0, TOKENS, {"x": 1.0}), Engine("B", 100.0, TOKENS, {})]
    code, lines = compared(
        engines, tmp_path, fault=lambda case, row: None if row.kernels or not case.is_decode else "nothing ran"
    )
    assert code == 1
    assert [(line["case"], line["backend"]) for line in lines] == [
        ("b2-40", "a"),
        ("prefill-9", "a"),
        ("prefill-9", "b"),
    ]
    assert "B                        WRONG: nothing ran" in capsys.readouterr().err
