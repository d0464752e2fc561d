"""The engine on 2 and 4 processes compared with transformers' ``generate``, in float32, token by token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fp8_linears, rank_engine_jobs
from support.engine_models import generated_by_transformers, greedy, model, prompt
from support.ranks import Ranks

from flashlatte.engine import Engine, SamplingParams
from flashlatte.engine.model import Model
from flashlatte.engine.runner import Runner

NEW = 8
# The second and later ones are added when the first has ended. Two share its prefix.
PROMPTS = [prompt(40), [*prompt(40)[:37], 5, 6], prompt(3, 1), prompt(26, 2), [*prompt(40), *[9] * 20]]
GREEDY = greedy(NEW, logprobs=0)
# Tensors that are divided in half over two ranks.
_ATTENTION = ("q_b_proj", "kv_b_proj", "o_proj", "sinks", "o_a_proj", "o_b_proj")
HALVED = (*(f"self_attn.{name}" for name in _ATTENTION), "mlp.experts.", "mlp.shared_experts.")


@pytest.fixture(scope="module")
def two():
    made = Ranks(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def four():
    made = Ranks(4)
    yield made
    made.close()


def check(results, family):
    """Check that rank 0's outputs are transformers'; returns its statistics."""
    outputs, statistics = results[0]
    for tokens, (got, logprobs, _) in zip(PROMPTS, outputs, strict=True):
        assert got == generated_by_transformers(family, tokens, NEW)
        with torch.no_grad():
            logits = model(family).forward(torch.tensor([[*tokens, *got]])).logits[0, len(tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(got)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)
    return statistics


@pytest.mark.parametrize(
    "family", ["DeepseekV3", *(pytest.param(name, marks=pytest.mark.full) for name in ("GlmMoeDsa", "AXK1"))]
)
def test_heads_over_two_and_keys_over_two(four, family):
    """Four ranks have one head each, and groups of two share the keys. Later requests reuse tokens within a page."""
    results = four.run(rank_engine_jobs.generate, family, PROMPTS, GREEDY, context_parallel=2)
    check(results, family)
    cached = [cached for _, _, cached in results[0][0]]
    # A page is 4 tokens on each of two ranks.
    assert cached == [0, 32, 0, 0, 40]
    whole = {name: weight.numel() for name, weight in model(family).model.layers[-1].named_parameters()}
    for weights, page in results[1:]:
        assert page == 4 * 40
        for part in ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.shared_experts.up_proj"):
            assert weights[f"{part}.weight"] * 4 == whole[f"{part}.weight"]
        assert weights["mlp.experts.down_proj"] * 4 == whole["mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("DeepseekV3", {}),
        ("DeepseekV32", {"context_parallel": 2, "max_num_batched_tokens": 20}),
        ("DeepseekV3", {"context_parallel": 2, "num_speculative_tokens": 3, "cache_format": "fp32"}),
        ("Youtu", {"context_parallel": 2}),
        ("Mistral4", {"context_parallel": 2}),
        ("HYV4", {}),
        pytest.param("AXK2", {"context_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_two_ranks(two, family, options):
    check(two.run(rank_engine_jobs.generate, family, PROMPTS, GREEDY, **options), family)


def test_three_ranks_divide_unevenly(tmp_path):
    """4 heads are divided into 1, 1 and 2, and an expert's 32 inner dims into 8, 8 and 16: PyTorch does not support
    rows of 10 or 11."""
    three = Ranks(3)
    try:
        check(three.run(rank_engine_jobs.generate, "DeepseekV3", PROMPTS, GREEDY), "DeepseekV3")
        model("DeepseekV3").save_pretrained(tmp_path)
        check(three.run(rank_engine_jobs.generate, tmp_path, PROMPTS, GREEDY), "DeepseekV3")
    finally:
        three.close()


@pytest.mark.parametrize("swap_space", [0, 16])
def test_requests_are_preempted_on_all_ranks(two, swap_space):
    options = {"context_parallel": 2, "num_pages": 11, "swap_space": swap_space, "enable_prefix_caching": False}
    statistics = check(two.run(rank_engine_jobs.generate, "DeepseekV3", PROMPTS, GREEDY, **options), "DeepseekV3")
    assert statistics["swapped" if swap_space else "recomputed"] > 0


def test_draws_equal_those_of_one_process(two):
    """Rank 0 samples, and gets logits of prompt tokens from the other ranks too."""
    drawn = SamplingParams(
        max_tokens=NEW,
        temperature=0.9,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={5: 1.0},
        prompt_logprobs=1,
        seed=3,
    )
    outputs, _ = two.run(rank_engine_jobs.generate, "DeepseekV3", PROMPTS, drawn)[0]
    alone = Engine(model("DeepseekV3"), **rank_engine_jobs.SIZES).generate(PROMPTS, drawn)
    assert [tokens for tokens, _, _ in outputs] == [output.outputs[0].token_ids for output in alone]


def test_a_request_with_nan_logits_ends_and_the_others_continue(two):
    healthy = [PROMPTS[2], prompt(22, 1)]
    assert all(rank_engine_jobs.POISON not in tokens for tokens in healthy)
    poisoned = [*prompt(21, 9), rank_engine_jobs.POISON]
    outputs, _ = two.run(rank_engine_jobs.generate_poisoned, [healthy[0], poisoned, healthy[1]], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    for tokens, output in zip(healthy, outputs[::2], strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers("DeepseekV3", tokens, NEW)


def test_a_checkpoint_is_divided(two, tmp_path):
    model("DeepseekV3").save_pretrained(tmp_path)
    check(two.run(rank_engine_jobs.generate, tmp_path, PROMPTS, GREEDY), "DeepseekV3")
    # Texts end where the checkpoint says, as on one rank.
    whole = generated_by_transformers("DeepseekV3", PROMPTS[2], NEW)
    config = json.loads((tmp_path / "generation_config.json").read_text()) | {"eos_token_id": [96, whole[2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (output, *_), _ = two.run(rank_engine_jobs.generate, tmp_path, PROMPTS[2:3], GREEDY)[0]
    assert output[0] == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({}, ["cached_tokens"]),
        (
            {"num_speculative_tokens": 2, "num_pages": 12, "swap_space": 12, "max_num_batched_tokens": 12},
            ["cached_tokens", "accepted_tokens", "swapped"],
        ),
    ],
    ids=["plain", "drafts and few pages"],
)
def test_deepseek_v4s_groups_of_heads_over_two(two, options, counted):
    family = "DeepseekV4"
    results = two.run(rank_engine_jobs.generate, family, PROMPTS, GREEDY, page_size=8, **options)
    statistics = check(results, family)
    assert all(statistics[name] > 0 for name in counted)
    numbers, _ = results[1]
    for name, weight in model(family).model.layers[-1].named_parameters():
        assert numbers[name] == weight.numel() // (2 if any(part in name for part in HALVED) else 1), name


def test_deepseek_v4_has_a_group_for_each_rank(four):
    failure = four.outcomes(rank_engine_jobs.options_by_rank, [{"source": "DeepseekV4"}] * 4)[0]
    assert failure.message.startswith(
        "ValueError: tensor_parallel must be at most the model's 2 groups of heads, got 4"
    )


@pytest.mark.parametrize(
    ("family", "sizes"), [("DeepseekV3", fp8_linears.SIZES), ("DeepseekV4", {"moe_intermediate_size": 32})]
)
def test_a_float8_checkpoint_is_divided(two, family, sizes, tmp_path, monkeypatch):
    fp8_linears.save(model(family, **sizes), tmp_path)
    ran = two.run(rank_engine_jobs.generate_in_float8, tmp_path, PROMPTS, GREEDY, page_size=8)
    (outputs, _), (numbers, _) = ran
    fp8_linears.install(monkeypatch)
    fp8_linears.keep_quantized(monkeypatch)
    settings: dict[str, Any] = rank_engine_jobs.SIZES | {"page_size": 8}
    alone = Engine(tmp_path, **settings)
    assert [tokens for tokens, _, _ in outputs] == [
        output.outputs[0].token_ids for output in alone.generate(PROMPTS, GREEDY)
    ]
    layer = alone.model._body.layers[-1]
    assert layer.mlp.experts.down_proj.dtype == layer.self_attn.q_b_proj.weight.dtype == torch.float8_e4m3fn
    for name, weight in layer.named_parameters():
        assert numbers[name] == weight.numel() // (2 if any(part in name for part in HALVED) else 1), name


DIFFERENT = [
    ({"num_pages": 8}, {"num_pages": 9}, "num_pages 8", "num_pages 9"),
    ({}, {"num_pages": None}, "num_pages 64", "num_pages None"),
    ({}, {"page_size": 8}, "page_size 4", "page_size 8"),
    ({}, {"cache_format": "bf16"}, "cache_format None", "cache_format bf16"),
    ({}, {"context_parallel": 2}, "context_parallel 1", "context_parallel 2"),
    ({}, {"tensor_parallel": 1}, "tensor_parallel 2", "tensor_parallel 1"),
    ({}, {"source": "GlmMoeDsa"}, "config.model_type deepseek_v3", "config.model_type glm_moe_dsa"),
]


@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize(("one", "other", "said", "told"), DIFFERENT, ids=[told for *_, told in DIFFERENT])
def test_different_engines_raise_on_all_ranks(two, one, other, said, told, late):
    """In any order of creation. An engine of one process does not wait, so it raises only if it is created later."""
    begin = time.monotonic()
    outcomes = two.outcomes(rank_engine_jobs.options_by_rank, [one, other], late)
    assert time.monotonic() - begin < 10
    if "tensor_parallel" in other and outcomes[1] is None:
        assert late != 1
        outcomes = outcomes[:1]
    for failure in outcomes:
        assert failure.message.startswith("ValueError: Engine needs the same arguments on all ranks: rank 0 has ")
        first, second = failure.message.split("; ")
        assert said in first
        assert second.startswith("rank 1 has ")
        assert told in second


def test_ranks_three_and_one(four):
    """Ranks with equal arguments are named together."""
    told = four.outcomes(rank_engine_jobs.options_by_rank, [{}, {}, {"page_size": 8}, {}], 2)
    assert told[2].message == (
        "ValueError: Engine needs the same arguments on all ranks: "
        "ranks 0, 1 and 3 have page_size 4; rank 2 has page_size 8"
    )
    assert all("rank 2 has page_size 8" in failure.message for failure in told)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"source": Path("nowhere")}, "FileNotFoundError: model must be the directory of a checkpoint, got nowhere"),
        (
            {"source": "DeepseekV4", "context_parallel": 2},
            "ValueError: context_parallel must be 1 for deepseek_v4, got 2",
        ),
        ({"tensor_parallel": 0}, "ValueError: tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": "2"}, "TypeError: tensor_parallel must be an int, got str"),
    ],
    ids=str,
)
def test_a_rank_that_cannot_start_ends_the_others_immediately(two, wrong, message, late):
    begin = time.monotonic()
    other, failed = two.outcomes(rank_engine_jobs.options_by_rank, [{}, wrong], late)
    assert time.monotonic() - begin < 10
    assert failed.message.startswith(message)
    assert other.message.startswith(f"RuntimeError: rank 1 failed, therefore rank 0 stops: {message}")
    # Creating engines again works.
    assert two.run(rank_engine_jobs.options_by_rank, [{}, {}]) == [None, None]


def test_more_processes_than_gpus(two):
    one, other = two.outcomes(rank_engine_jobs.more_processes_than_gpus)
    told = "ValueError: tensor_parallel needs a GPU for each process of a host, got 1 GPUs and LOCAL_RANK 1"
    assert other.message == told
    assert one.message == f"RuntimeError: rank 1 failed, therefore rank 0 stops: {told}"


def test_engines_of_each_process_and_of_all(two):
    """Single-process engines are not compared if all processes create the same ones, or if they are created from a
    ``Model``."""
    one, other = two.run(rank_engine_jobs.another_alike)
    assert one == other
    two.run(rank_engine_jobs.of_a_model_alone)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_pages": 0},
        {"page_size": "x"},
        {"enable_prefix_caching": 2},
        {"num_speculative_tokens": -1},
        {"context_parallel": 2},
        {"tensor_parallel": 3},
    ],
    ids=str,
)
def test_a_wrong_argument_of_one_rank_raises_on_all(two, wrong):
    told = two.outcomes(rank_engine_jobs.options_by_rank, [{}, wrong])
    assert all(next(iter(wrong)) in failure.message for failure in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel must be the number of processes, 2, got 3"),
        ({"context_parallel": 3}, "context_parallel must divide tensor_parallel 2, got 3"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
    ],
)
def test_numbers_that_do_not_fit_the_processes(two, options, message):
    for failure in two.outcomes(rank_engine_jobs.options_by_rank, [options, options]):
        assert failure.message.startswith("ValueError")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(failure.message)


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
def test_processes_without_a_process_group(late, tmp_path):
    """As started by ``torchrun``: a rank that creates a single-process engine would never join the group."""
    script = tmp_path / "serve.py"
    script.write_text(
        f"""import os, pathlib, time
from flashlatte.engine import Engine, SamplingParams
from support.engine_models import model

rank = int(os.environ["RANK"])
made = model()
begun = pathlib.Path({str(tmp_path / "begun")!r})
if rank == {late}:
    while not begun.exists():
        time.sleep(0.1)
    time.sleep(2)
begun.touch()
try:
    Engine(made, tensor_parallel=2 - rank, num_pages=8)
except ValueError as error:
    print(error)
else:
    time.sleep(5)
"""
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=100, env=os.environ | support_path())
    told = "Engine needs the same arguments on all ranks: rank 0 has tensor_parallel 2; rank 1 has tensor_parallel 1"
    assert done.stdout.count(told) == 1 + late, done.stderr


def support_path():
    here = Path(__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])}


def test_without_processes():
    with pytest.raises(ValueError, match="tensor_parallel 2 needs 2 processes: start with torchrun"):
        Engine(model(), tensor_parallel=2)
    with pytest.raises(ValueError, match=r"^context_parallel must divide .* 1, .* got 2: start with torchrun .* 2$"):
        Engine(model(), context_parallel=2)
    with pytest.raises(ValueError, match=r"must be \(1, 1\), as in the Model, got \(2, 1\)"):
        Engine(Model(model()), tensor_parallel=2)


def test_unsupported_calls_on_each_rank_raise(two):
    leader, follower = two.run(rank_engine_jobs.misuse)
    assert "follow() is for ranks other than 0" in leader
    assert "add() is for rank 0" in follower


@pytest.mark.parametrize(("rank", "at_step"), [(0, 3), (1, 1), (1, 4)])
def test_a_rank_that_fails_ends_the_others_immediately(two, rank, at_step):
    begin = time.monotonic()
    told = [failure.message for failure in two.outcomes(rank_engine_jobs.fail, rank, at_step)]
    assert time.monotonic() - begin < 30  # the groups' own timeout is 60 s
    assert told[rank] == "ValueError: this rank has no memory left"
    other = 1 - rank
    assert told[other] == (
        f"RuntimeError: rank {rank} failed, therefore rank {other} stops: ValueError: this rank has no memory left"
    )


# With keys over both the other rank waits in the store first, else in a collective.
@pytest.mark.parametrize("options", [{}, {"context_parallel": 2}], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_rank_ends_the_others_within_seconds(two, rank, options):
    begin = time.monotonic()
    told = [failure.message for failure in two.outcomes(rank_engine_jobs.fail, rank, 1, "interrupt", **options)]
    assert time.monotonic() - begin < 10
    other = 1 - rank
    assert told[rank] == "AssertionError: interrupted"
    assert told[other] == f"RuntimeError: rank {rank} failed, therefore rank {other} stops: KeyboardInterrupt"


@pytest.mark.parametrize(
    "job",
    [
        (rank_engine_jobs.end_before_the_engine_agrees,),
        (rank_engine_jobs.fail, 1, 1, "kill"),
        (rank_engine_jobs.fail, 0, 1, "kill"),
    ],
    ids=["before the engines agree", "rank 1 in a step", "rank 0 in a step"],
)
def test_a_killed_rank_ends_the_others_within_seconds(job):
    fresh = Ranks(2)
    try:
        fresh.run(rank_engine_jobs.misuse)
        begin = time.monotonic()
        told = [failure.message for failure in fresh.outcomes(*job)]
        assert time.monotonic() - begin < 10
    finally:
        fresh.close()
    killed = 0 if job[1:2] == (0,) else 1
    other = 1 - killed
    assert told[killed].startswith("EOFError")
    assert told[other] == f"RuntimeError: rank {killed} failed, therefore rank {other} stops: its process has ended"


def test_close_reports_a_rank_that_failed_after_the_last_step(two):
    leader, follower = two.outcomes(rank_engine_jobs.fail_when_done)
    assert leader == "rank 1 failed, therefore rank 0 stops: ValueError: this rank has no time left"
    assert follower.message == "ValueError: this rank has no time left"


@pytest.mark.parametrize("kind", [Runner, pytest.param(Model, marks=pytest.mark.full)])
def test_a_rank_that_cannot_be_created_ends_the_others_immediately(two, kind):
    leader, follower = two.outcomes(rank_engine_jobs.fail_when_made, kind)
    assert (
        leader.message
        == "RuntimeError: rank 1 failed, therefore rank 0 stops: ValueError: this rank has no memory left"
    )
    assert follower.message == "ValueError: this rank has no memory left"


def test_all_ranks_get_the_minimum(two):
    assert two.run(rank_engine_jobs.least, [5, 3]) == [3, 3]
    told = [failure.message for failure in two.outcomes(rank_engine_jobs.least, [5, None])]
    for call, message in zip(("a default of num_pages", "Engine"), told, strict=True):
        assert message == (
            f"ValueError: {call} needs the same arguments on all ranks: rank 0 has call a default of num_pages; "
            "rank 1 has call Engine"
        )


def test_a_wait_for_the_gpu_ends_when_another_rank_has_failed(two):
    leader, follower = two.outcomes(rank_engine_jobs.fail_while_a_gpu_waits)
    assert (
        leader.message
        == "RuntimeError: rank 1 failed, therefore rank 0 stops: ValueError: this rank has no memory left"
    )
    assert follower.message == "ValueError: this rank has no memory left"


def test_a_leader_that_leaves_ends_the_others(two):
    leader, follower = two.outcomes(rank_engine_jobs.leave)
    assert leader is None
    assert follower.message.startswith("RuntimeError: rank 0 exited before its engine was closed")
