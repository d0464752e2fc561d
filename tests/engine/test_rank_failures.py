"""A rank that fails, is interrupted or killed, or leaves ends the other ranks of an engine within seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support import rank_engine_jobs
from support.ranks import SOON, Ranks

from flashlatte.engine.model import Model
from flashlatte.engine.runner import Runner


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
    assert time.monotonic() - begin < SOON
    assert failed.message.startswith(message)
    assert other.message.startswith(f"RuntimeError: rank 1 failed, therefore rank 0 stops: {message}")
    # Creating engines again works.
    assert two.run(rank_engine_jobs.options_by_rank, [{}, {}]) == [None, None]


def test_unsupported_calls_on_each_rank_raise(two):
    leader, follower = two.run(rank_engine_jobs.misuse)
    assert "follow() is for ranks other than 0" in leader
    assert "add() is for rank 0" in follower


@pytest.mark.parametrize(("rank", "at_step"), [(0, 3), (1, 1), (1, 4)])
def test_a_rank_that_fails_ends_the_others_immediately(two, rank, at_step):
    begin = time.monotonic()
    messages = [failure.message for failure in two.outcomes(rank_engine_jobs.fail, rank, at_step)]
    assert time.monotonic() - begin < SOON
    assert messages[rank] == "ValueError: this rank has no memory left"
    other = 1 - rank
    assert messages[other] == (
        f"RuntimeError: rank {rank} failed, therefore rank {other} stops: ValueError: this rank has no memory left"
    )


# With keys over both the other rank waits in the store first, else in a collective.
@pytest.mark.parametrize("options", [{}, {"context_parallel": 2}], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_rank_ends_the_others_within_seconds(two, rank, options):
    begin = time.monotonic()
    messages = [failure.message for failure in two.outcomes(rank_engine_jobs.fail, rank, 1, "interrupt", **options)]
    assert time.monotonic() - begin < SOON
    other = 1 - rank
    assert messages[rank] == "AssertionError: interrupted"
    assert messages[other] == f"RuntimeError: rank {rank} failed, therefore rank {other} stops: KeyboardInterrupt"


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
        messages = [failure.message for failure in fresh.outcomes(*job)]
        assert time.monotonic() - begin < SOON
    finally:
        fresh.close()
    killed = 0 if job[1:2] == (0,) else 1
    other = 1 - killed
    assert messages[killed].startswith("EOFError")
    assert messages[other] == f"RuntimeError: rank {killed} failed, therefore rank {other} stops: its process has ended"


def test_close_reports_a_rank_that_failed_after_the_last_step(two):
    leader, follower = two.outcomes(rank_engine_jobs.fail_when_done)
    assert leader == "rank 1 failed, therefore rank 0 stops: ValueError: this rank has no time left"
    assert follower.message == "ValueError: this rank has no time left"


@pytest.mark.parametrize("kind", [Runner, pytest.param(Model, marks=pytest.mark.full)])
def test_a_rank_that_cannot_be_created_ends_the_others_immediately(two, kind):
    leader, follower = two.outcomes(rank_engine_jobs.fail_when_created, kind)
    assert (
        leader.message
        == "RuntimeError: rank 1 failed, therefore rank 0 stops: ValueError: this rank has no memory left"
    )
    assert follower.message == "ValueError: this rank has no memory left"


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
