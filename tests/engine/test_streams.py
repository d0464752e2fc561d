"""Streams of one engine, and their tokens and requests when others make steps, batches or aborts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from support.engine_models import VOCABULARY, greedy
from support.engine_requests import NEW, PROMPTS, engine, expected, finished


def test_concurrent_streams_lose_no_token():
    served = engine()
    numbers = (0, 3, 1)
    streams = {number: served.stream(PROMPTS[number], greedy(NEW)) for number in numbers}
    got: dict[int, list[int]] = {number: [] for number in numbers}
    while streams:
        for number in list(streams):
            token = next(streams[number], None)
            if token is None:
                del streams[number]
            else:
                got[number].append(token)
    assert got == {number: expected(number) for number in numbers}
    assert served.unfinished == served.pool.in_use == 0


def test_a_stream_continues_after_other_calls_to_step():
    served = engine()
    stream = served.stream(PROMPTS[0], greedy(NEW))
    got = [next(stream)]
    assert served.generate([PROMPTS[1]], greedy(NEW))[0].outputs[0].token_ids == expected(1)
    served.step()
    assert [*got, *stream] == expected(0)


def test_a_stream_whose_request_is_aborted_ends():
    served = engine()
    served.add(PROMPTS[1], greedy(NEW), request_id="other")
    stream = served.stream(PROMPTS[0], greedy(NEW))
    got = [next(stream)]
    output = served.abort("request-1")
    assert [*got, *stream] == output.outputs[0].token_ids == expected(0)[: len(output.outputs[0].token_ids)]
    assert finished(served) == {"other": expected(1)}


def test_a_stream_is_queued_or_refused_at_the_call():
    served = engine()
    with pytest.raises(ValueError, match="prompt must hold tokens from 0 to 96, got 97"):
        served.stream([VOCABULARY])
    stream = served.stream(PROMPTS[0], greedy(NEW))
    assert served.unfinished == 1
    served.step()
    assert list(stream) == expected(0)
    dropped = served.stream(PROMPTS[0])
    del dropped
    assert served.unfinished == served.pool.in_use == 0


def test_a_stream_that_the_garbage_collector_drops_within_a_step_is_aborted_after_it(monkeypatch):
    served = engine()
    served.add(PROMPTS[1], greedy(NEW), request_id="other")
    caught: list[Any] = [served.stream(PROMPTS[0], greedy(NEW))]
    next(caught[0])
    caught.append(caught)
    make_room, collected = served.scheduler._allocate_for, []

    def collecting(*arguments: Any) -> Any:
        if not collected:
            collected.append(gc.collect())
        return make_room(*arguments)

    monkeypatch.setattr(served.scheduler, "_allocate_for", collecting)
    del caught
    assert finished(served) == {"other": expected(1)}
    assert collected
    assert served.unfinished == served.pool.in_use == 0


@pytest.mark.parametrize("alone", [False, True])
def test_step_does_not_return_results_of_a_stream_or_batch(alone):
    served = engine()
    served.add(PROMPTS[0], greedy(2), request_id="ends meanwhile")
    if not alone:
        served.add(PROMPTS[1], greedy(NEW), request_id="goes on")
    list(served.stream(PROMPTS[3], greedy(NEW)))
    served.generate([PROMPTS[3]], greedy(2))
    new: dict[str, list[int]] = {}
    while served.unfinished:
        for output in served.step():
            new[output.request_id] = new.get(output.request_id, []) + output.outputs[0].new_token_ids
            assert new[output.request_id] == output.outputs[0].token_ids
    assert new == {"ends meanwhile": expected(0)[:2]} | ({} if alone else {"goes on": expected(1)})


def test_a_finished_undelivered_request_can_be_aborted():
    served = engine()
    served.add(PROMPTS[0], greedy(2), request_id="ends meanwhile")
    list(served.stream(PROMPTS[3], greedy(NEW)))
    output = served.abort("ends meanwhile")
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason, served.unfinished) == (
        expected(0)[:2],
        "length",
        0,
    )
    with pytest.raises(ValueError, match="unfinished request, got 'ends meanwhile'"):
        served.abort("ends meanwhile")
