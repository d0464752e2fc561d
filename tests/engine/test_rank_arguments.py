"""Engines over several processes need equal arguments on all of them, and numbers that fit the processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import rank_engine_jobs
from support.engine_models import model
from support.marks import mostly_full
from support.ranks import SOON

from flashlatte.engine import Engine
from flashlatte.engine.model import Model

DIFFERENT = [
    ({"num_pages": 8}, {"num_pages": 9}, "num_pages 8", "num_pages 9"),
    ({}, {"num_pages": None}, "num_pages 64", "num_pages None"),
    ({}, {"page_size": 8}, "page_size 4", "page_size 8"),
    ({}, {"cache_format": "bf16"}, "cache_format None", "cache_format bf16"),
    ({}, {"context_parallel": 2}, "context_parallel 1", "context_parallel 2"),
    ({}, {"tensor_parallel": 1}, "tensor_parallel 2", "tensor_parallel 1"),
    ({}, {"source": "GlmMoeDsa"}, "config.model_type deepseek_v3", "config.model_type glm_moe_dsa"),
]


@pytest.mark.parametrize("late", [None, *mostly_full((0, 1))])
@pytest.mark.parametrize(("first", "second", "of_first", "of_second"), DIFFERENT, ids=[text for *_, text in DIFFERENT])
def test_different_engines_raise_on_all_ranks(two, first, second, of_first, of_second, late):
    """In any order of creation. An engine of one process does not wait, so it raises only if it is created later."""
    begin = time.monotonic()
    outcomes = two.outcomes(rank_engine_jobs.options_by_rank, [first, second], late)
    assert time.monotonic() - begin < SOON
    if "tensor_parallel" in second and outcomes[1] is None:
        assert late != 1
        outcomes = outcomes[:1]
    for failure in outcomes:
        assert failure.message.startswith("ValueError: Engine needs the same arguments on all ranks: rank 0 has ")
        rank_0, rank_1 = failure.message.split("; ")
        assert of_first in rank_0
        assert rank_1.startswith("rank 1 has ")
        assert of_second in rank_1


def test_ranks_with_equal_arguments_are_named_together(four):
    failures = four.outcomes(rank_engine_jobs.options_by_rank, [{}, {}, {"page_size": 8}, {}], 2)
    assert failures[2].message == (
        "ValueError: Engine needs the same arguments on all ranks: "
        "ranks 0, 1 and 3 have page_size 4; rank 2 has page_size 8"
    )
    assert all("rank 2 has page_size 8" in failure.message for failure in failures)


def test_more_processes_than_gpus_are_refused(two):
    with_gpu, without_gpu = two.outcomes(rank_engine_jobs.more_processes_than_gpus)
    message = "ValueError: tensor_parallel needs a GPU for each process of a host, got 1 GPUs and LOCAL_RANK 1"
    assert without_gpu.message == message
    assert with_gpu.message == f"RuntimeError: rank 1 failed, therefore rank 0 stops: {message}"


def test_single_process_engines_do_not_disturb_the_engine_of_all_processes(two):
    """Single-process engines are not compared if all processes create the same ones, or if they are created from a
    ``Model``."""
    tokens = two.run(rank_engine_jobs.separate_engines_then_a_common_one)
    assert tokens[0] == tokens[1]
    two.run(rank_engine_jobs.separate_engine_of_a_model_then_a_common_one)


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
    failures = two.outcomes(rank_engine_jobs.options_by_rank, [{}, wrong])
    assert all(next(iter(wrong)) in failure.message for failure in failures)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel must be the number of processes, 2, got 3"),
        ({"context_parallel": 3}, "context_parallel must divide tensor_parallel 2, got 3"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
    ],
)
def test_parallel_sizes_that_do_not_fit_the_processes_are_refused(two, options, message):
    for failure in two.outcomes(rank_engine_jobs.options_by_rank, [options, options]):
        assert failure.message.startswith("ValueError")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(failure.message)


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
def test_processes_of_torchrun_with_different_arguments_are_refused(late, tmp_path):
    """As started by ``torchrun``: a rank that creates a single-process engine would never join the group."""
    script = tmp_path / "serve.py"
    script.write_text(
        f"""import os, pathlib, time
from flashlatte.engine import Engine, SamplingParams
from support.engine_models import model

rank = int(os.environ["RANK"])
source = model()
begun = pathlib.Path({str(tmp_path / "begun")!r})
if rank == {late}:
    while not begun.exists():
        time.sleep(0.1)
    time.sleep(2)
begun.touch()
try:
    Engine(source, tensor_parallel=2 - rank, num_pages=8)
except ValueError as error:
    print(error)
else:
    time.sleep(5)
"""
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=100, env=os.environ | support_path())
    message = "Engine needs the same arguments on all ranks: rank 0 has tensor_parallel 2; rank 1 has tensor_parallel 1"
    assert done.stdout.count(message) == 1 + late, done.stderr


def support_path():
    here = Path(__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])}


def test_parallel_sizes_without_other_processes_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel 2 needs 2 processes: start with torchrun"):
        Engine(model(), tensor_parallel=2)
    with pytest.raises(ValueError, match=r"^context_parallel must divide .* 1, .* got 2: start with torchrun .* 2$"):
        Engine(model(), context_parallel=2)
    with pytest.raises(ValueError, match=r"must be \(1, 1\), as in the Model, got \(2, 1\)"):
        Engine(Model(model()), tensor_parallel=2)


def test_deepseek_v4_has_a_group_for_each_rank(four):
    failure = four.outcomes(rank_engine_jobs.options_by_rank, [{"source": "DeepseekV4"}] * 4)[0]
    assert failure.message.startswith(
        "ValueError: tensor_parallel must be at most the model's 2 groups of heads, got 4"
    )


def test_all_ranks_get_the_minimum(two):
    assert two.run(rank_engine_jobs.minimum, [5, 3]) == [3, 3]
    messages = [failure.message for failure in two.outcomes(rank_engine_jobs.minimum, [5, None])]
    for call, message in zip(("a default of num_pages", "Engine"), messages, strict=True):
        assert message == (
            f"ValueError: {call} needs the same arguments on all ranks: rank 0 has call a default of num_pages; "
            "rank 1 has call Engine"
        )
