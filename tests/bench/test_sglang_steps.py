"""``flashlatte bench sglang-steps`` without SGLang: arguments, random contexts, and steps of a stand-in runner."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlatte import bench
from flashlatte.bench.serving import sglang_engine, sglang_steps
from flashlatte.bench.serving.random_model import fill_weights
from flashlatte.bench.serving.sglang_contexts import fill
from flashlatte.bench.serving.step_cases import COMPARED_TOKENS, PREFILLED, cases_of
from flashlatte.bench.serving.step_times import BackendTimes

VOCABULARY = 16


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sglang_steps.add_arguments(parser)
    return parser.parse_args(words)


def test_default_cases():
    options = parse("v3", "v32")
    names = [f"b{requests}-{context}" for context in (4096, 32768) for requests in (1, 32, 128)]
    assert [case.name for case in cases_of(options)] == [*names, "prefill-8192"]
    for model in options.models:
        backends = sglang_steps.backends_of(model, options.backends)
        assert backends[0] == "default"
        assert {one.removesuffix("+flashlatte") for one in backends} <= set(backends)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("v4",), "model must be v3, v32 or a directory"),
        (("v3", "--backends", "fa3,flashinfer"), "--backends must be of default, fa3"),
        (("v3", "--backends", "flashmla+vllm"), r"each also with \+flashlatte, got 'flashmla\+vllm'"),
        (("v3", "--backends", "flashmla+flashlatte"), "--backends needs flashmla, whose tokens"),
        (("v3", "--cases", "4096"), "--cases must be requests x tokens"),
        (("v3", "--cases", "1x1"), "--cases must have contexts of 2 tokens or more"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    with pytest.raises(ValueError, match=message):
        sglang_steps.run(parse(*words))
    with pytest.raises(SystemExit) as refused:
        bench.run_named("sglang-steps", list(words))
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_directory_needs_backends(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--backends is needed"):
        sglang_steps.backends_of(str(tmp_path), None)
    assert sglang_steps.backends_of(str(tmp_path), "fa3") == ["fa3"]


@pytest.mark.parametrize(
    ("backend", "kernels", "fault"),
    [
        ("flashmla+flashlatte", {"dense_decode_kernel": 1.0}, None),
        ("flashmla+flashlatte", {"flash_fwd_splitkv_mla_kernel": 1.0}, "no kernel of FlashLatte ran"),
        ("default", {"void flash_fwd_splitkv_mla_kernel": 1.0}, None),
        ("default", {"sparse_decode_kernel": 1.0, "gemm": 1.0}, "FlashLatte's kernels ran"),
        ("flashmla+flashlatte", {}, "no kernel of FlashLatte ran"),
        ("default", {}, None),
    ],
)
def test_plugin_ran_in_decode_steps(backend, kernels, fault):
    decode, prefill = cases_of(parse("v3", "--cases", "1x40", "--prefill", "9"))
    row = BackendTimes(SimpleNamespace(backend=backend), kernels=kernels)  # pyright: ignore[reportArgumentType]
    assert sglang_steps.kernels_fault(decode, row) == fault
    assert sglang_steps.kernels_fault(prefill, row) is None


def test_pools_hold_the_longest_case():
    options = parse("v3", "--cases", "1x1000,3x100", "--prefill", "2000", "--steps", "5", "--rounds", "1")
    options.options = '{"mem_fraction_static": 0.5}'
    given = sglang_engine.server_options(
        argparse.Namespace(**vars(options), model="folder", server={"attention_backend": "fa3"})
    )
    generated = 2 * 5 + 2 * COMPARED_TOKENS
    assert given["context_length"] == 2000 + generated
    assert given["max_total_tokens"] >= max(2000 + generated, 3 * (100 + generated + 63))
    assert (given["max_running_requests"], given["cuda_graph_bs_decode"]) == (3, [1, 3])
    assert (given["attention_backend"], given["mem_fraction_static"]) == ("fa3", 0.5)


class Pool:
    """A cache with one row per slot, with index keys."""

    layer_num, kv_lora_rank, qk_rope_head_dim, index_head_dim = 2, 8, 4, 4

    def __init__(self, slots: int) -> None:
        self.rows = torch.zeros(2, slots, 12)
        self.keys = torch.zeros(2, slots, 4)

    def set_mla_kv_buffer(self, layer: Any, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        self.rows[layer.layer_id, loc] = torch.cat((nope, rope), -1).squeeze(1).float()

    def set_index_k_scale_buffer(self, layer: int, loc: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> None:
        self.keys[layer, loc] = keys.float() * scales


def test_random_rows_depend_on_the_request_and_the_layer_alone():
    slots = torch.arange(30).view(2, 15)
    moved = slots.flip(1) + 64
    pool, other = Pool(100), Pool(100)
    fill(pool, slots)
    fill(other, moved)
    for cache, copy in ((pool.rows, other.rows), (pool.keys, other.keys)):
        assert torch.equal(cache[:, slots], copy[:, moved])
        assert len({tuple(row.flatten().tolist()) for row in cache[:, slots].flatten(0, 1)}) == 4
        assert not cache[:, 30:].any()


def test_weights_keep_the_scale_of_activations():
    embed, up, norm = torch.nn.Embedding(64, 512), torch.nn.Linear(512, 256), torch.nn.LayerNorm(256)
    fill_weights(torch.nn.ModuleDict({"embed": embed, "up": up, "k_norm": norm}).named_parameters())
    assert 0.9 < up(embed(torch.arange(64))).std() < 1.1
    assert norm.weight.eq(1).all()
    assert not norm.bias.any()


class Runner:
    """Fake of SGLang's runner. Logits are those of the sum of a request's tokens."""

    def __init__(self) -> None:
        self.torch_runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(99).view(1, 99))
        )
        self.seen: list[tuple[int, int, int]] = []
        self.is_finite = True

    def clear(self) -> None:
        self.seen.clear()

    def logits(self, total: int) -> torch.Tensor:
        values = torch.arange(VOCABULARY, dtype=torch.float32)[None] * 0.1
        values[0, total % VOCABULARY] = 9 if self.is_finite else torch.nan
        return values

    def extend(self, requests: list[Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        (request,) = requests
        self.seen.append((len(request.prefix_indices), request.start, request.end))
        logits = self.logits(sum(request.origin_input_ids[: request.end]))
        return logits.argmax(-1), logits, "batch"

    def decode(self, tokens: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch == "batch"
        logits = self.logits(int(tokens.sum()) + 3)
        return logits.argmax(-1), logits


class Request:
    req_pool_idx = 0

    def __init__(self, tokens: list[int]) -> None:
        self.origin_input_ids, self.prefix_indices = tokens, torch.empty(0, dtype=torch.int64)

    def set_extend_range(self, start: int, end: int) -> None:
        self.start, self.end = start, end


def engine() -> sglang_engine.RunnerSteps:
    made = object.__new__(sglang_engine.RunnerSteps)
    made.vocabulary, made.chunk, made.runner = VOCABULARY, 4, Runner()
    made.one_batch = SimpleNamespace(
        prepare_synthetic_inputs_for_latency_test=lambda count, length, prompts: [Request(prompt) for prompt in prompts]
    )
    return made


def test_prompts_are_prefilled_in_chunks():
    steps = engine()
    (tokens,) = steps.tokens(1, 10, PREFILLED)
    assert steps.runner.seen == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]
    first = sum(steps.prompts(1, 10)[0]) % VOCABULARY
    assert [token for token, _ in tokens] == [(first + 3 * i) % VOCABULARY for i in range(COMPARED_TOKENS)]
    assert all(-0.1 < probability < 0 for _, probability in tokens)
    assert steps.prefill(10) > 0


def test_logits_that_are_not_finite_end_the_engine():
    steps = engine()
    steps.runner.is_finite = False
    with pytest.raises(SystemExit, match="not finite"):
        steps.tokens(1, 10, PREFILLED)
