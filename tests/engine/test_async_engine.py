"""``AsyncEngine``: tasks share one engine, and errors or cancellations of one do not affect the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from support import engine_models
from support.engine_models import VOCABULARY, greedy, prompt

from flashlatte.engine import AsyncEngine, Engine, SamplingParams
from flashlatte.engine.async_engine import EngineStopped, QueueFull, StepFailed
from flashlatte.engine.output_stream import OutputStream

NEW = 6


def engine(**options: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 8}
    return engine_models.engine("DeepseekV3", **settings | options)


def run(test: Callable[[AsyncEngine], Coroutine[Any, Any, Any]], served: Engine | None = None, **options: Any) -> Any:
    """Run a coroutine function with an ``AsyncEngine``; checks at its end that no page is in use."""
    served = served or engine()

    async def main() -> Any:
        async with AsyncEngine(served, **options) as shared:
            result = await asyncio.wait_for(test(shared), 120)
            while shared.statistics()["pages_in_use"] or shared.statistics()["accepted"]:
                await asyncio.sleep(0.005)
            return result

    result = asyncio.run(main())
    assert served.pool.in_use == served.unfinished == 0
    return result


async def tokens_of(shared: AsyncEngine, tokens: list[int], params: SamplingParams) -> list[int]:
    received: list[int] = []
    async for output in shared.generate(tokens, params):
        received += output.outputs[0].new_token_ids
        assert received == output.outputs[0].token_ids
    return received


def test_64_concurrent_tasks_get_the_results_of_single_ones():
    prompts = [prompt(3 + number % 20, number) for number in range(64)]

    async def all_at_once(shared: AsyncEngine) -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(shared, tokens, greedy(NEW)) for tokens in prompts))

    expected = [output.outputs[0].token_ids for output in engine().generate(prompts, greedy(NEW))]
    assert run(all_at_once) == expected


def test_requests_that_are_added_together_end_together():
    async def together(shared: AsyncEngine) -> dict[int, Any]:
        stream = await shared.add([prompt(3), prompt(5)], SamplingParams(n=2, max_tokens=NEW, seed=1))
        async with contextlib.aclosing(stream):
            return {index: output async for index, output in stream}

    last = run(together)
    assert sorted(last) == [0, 1]
    assert all(output.finished and len(output.outputs) == 2 for output in last.values())
    (alone,) = engine().generate([prompt(5)], SamplingParams(n=2, max_tokens=NEW, seed=1))
    assert [one.token_ids for one in last[1].outputs] == [one.token_ids for one in alone.outputs]


@pytest.mark.parametrize("wrong", [[], [VOCABULARY], [-1], [1] * 600, ["a"], None])
def test_one_invalid_prompt_refuses_the_whole_call(wrong):
    async def refused(shared: AsyncEngine) -> None:
        with pytest.raises((ValueError, TypeError), match="prompt"):
            await shared.add([prompt(3), wrong], greedy(400))
        assert len(await tokens_of(shared, prompt(3), greedy(NEW))) == NEW

    run(refused)


@pytest.mark.parametrize(
    ("prompts", "request_ids", "message"),
    [
        ("ab", None, "prompts must be a sequence of prompts, got 'ab'"),
        (5, None, "prompts must be a sequence of prompts, got 5"),
        (iter([[1]]), None, "prompts must be a sequence of prompts"),
        ([[1], [2]], ["one"], "request_ids must be one for each of 2 prompts, got 1"),
        ([[1]], ["one", "two"], "request_ids must be one for each of 1 prompts, got 2"),
        ([[1], [2]], ["one", "one"], "request_id must be unique"),
        ([[1]], [5], "request_id must be a string, got 5"),
    ],
)
def test_arguments_of_another_type_or_length_are_refused_by_name(prompts, request_ids, message):
    async def wrong(shared: AsyncEngine) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            await shared.add(prompts, greedy(NEW), request_ids=request_ids)

    run(wrong)


def test_an_engine_of_another_type_is_refused_by_name():
    with pytest.raises(TypeError, match="engine must be of type Engine, got str"):
        AsyncEngine("directory")  # type: ignore[arg-type]


def test_closing_a_stream_aborts_only_its_request():
    async def leave(shared: AsyncEngine) -> list[int]:
        async def leaver() -> None:
            async with contextlib.aclosing(shared.generate(prompt(4, 1), greedy(400))) as outputs:
                async for _ in outputs:
                    return

        async def cancelled() -> None:
            task = asyncio.ensure_future(tokens_of(shared, prompt(5, 2), greedy(400)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        received, *_ = await asyncio.gather(tokens_of(shared, prompt(3), greedy(40)), leaver(), cancelled())
        return received

    assert run(leave) == engine().generate([prompt(3)], greedy(40))[0].outputs[0].token_ids


def test_cancelling_a_task_before_its_request_is_queued_aborts_it():
    async def cancel(shared: AsyncEngine) -> None:
        task = asyncio.ensure_future(shared.add([prompt(4)], greedy(400)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel)


def test_a_slow_reader_holds_one_result_and_delays_no_others():
    async def slow(shared: AsyncEngine) -> list[int]:
        stream = await shared.add([prompt(3)], greedy(40))
        async with contextlib.aclosing(stream):
            # The others need more steps than the request of the slow reader.
            await asyncio.gather(*(tokens_of(shared, prompt(3, seed), greedy(60)) for seed in range(1, 4)))
            assert (stream.ended, len(stream._latest)) == (True, 1)
            ((_, output),) = [one async for one in stream]
        assert output.outputs[0].new_token_ids == output.outputs[0].token_ids
        return output.outputs[0].token_ids

    assert run(slow) == engine().generate([prompt(3)], greedy(40))[0].outputs[0].token_ids


class Failing:
    """Makes a model raise in a step of an engine that has this number of unfinished requests."""

    def __init__(self, served: Engine, requests: int, error: BaseException) -> None:
        self._served, self._model, self._requests, self._error = served, served.runner.model, requests, error
        served.runner.model = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if self._served.unfinished == self._requests:
            raise self._error
        return self._model(*arguments)


def test_a_failed_step_ends_every_request_with_its_error_and_later_ones_run():
    served = engine()
    Failing(served, 12, RuntimeError("out of memory"))

    async def fail(shared: AsyncEngine) -> None:
        waits = (tokens_of(shared, prompt(3, seed), greedy(400)) for seed in range(12))
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(error, StepFailed)
            assert str(error) == "the engine failed: RuntimeError: out of memory"
        assert isinstance(shared.step_error, RuntimeError)
        assert len(await tokens_of(shared, prompt(3), greedy(NEW))) == NEW
        assert shared.step_error is None

    run(fail, served)


def test_an_error_of_the_device_ends_the_engine():
    served = engine()
    Failing(served, 3, torch.AcceleratorError("an illegal memory access was encountered"))

    async def fail(shared: AsyncEngine) -> None:
        waits = (tokens_of(shared, prompt(3, seed), greedy(400)) for seed in range(3))
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(error, StepFailed) for error in errors)
        while shared.is_running:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineStopped, match="the engine is not running: AcceleratorError: an illegal memory"):
            await shared.add([prompt(3)])

    run(fail, served)


def test_outputs_beyond_the_queue_are_refused_until_others_are_read():
    async def fill(shared: AsyncEngine) -> None:
        assert shared.max_num_outputs == 3
        with pytest.raises(ValueError, match="1 to 3 outputs together, got 4"):
            await shared.add([prompt(3)] * 2, SamplingParams(n=2))
        with pytest.raises(ValueError, match="1 to 3 outputs together, got 0"):
            await shared.add([])
        first = await shared.add([prompt(3)], SamplingParams(n=2, max_tokens=NEW))
        with pytest.raises(QueueFull, match="2 of 3 outputs are running or waiting, and the request asks for 2"):
            await shared.add([prompt(3)], SamplingParams(n=2))
        while not first.ended:
            await asyncio.sleep(0.005)
        with pytest.raises(QueueFull):  # its results are not read
            await shared.add([prompt(3)], SamplingParams(n=2))
        await first.aclose()
        await first.aclose()
        await (await shared.add([prompt(3)], SamplingParams(n=3))).aclose()

    run(fill, engine(max_num_seqs=1), max_num_queued=2)


def test_a_stream_that_is_read_to_its_end_frees_its_slots():
    async def read_twice(shared: AsyncEngine) -> None:
        for _ in range(2):
            stream = await shared.add([[1, 2], [3]], greedy(NEW))
            results = [output async for _, output in stream]
            assert results[-1].finished
            assert shared.statistics()["accepted"] == 0

    run(read_twice, engine(max_num_seqs=2), max_num_queued=0)


def test_shutdown_ends_requests_with_an_error_and_the_engine_stays_usable():
    served = engine()

    async def main() -> None:
        async with AsyncEngine(served) as shared:
            tasks = [asyncio.ensure_future(tokens_of(shared, prompt(3, seed), greedy(400))) for seed in range(20)]
            await asyncio.sleep(0.02)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineStopped)
        with pytest.raises(EngineStopped, match="not running"):
            await shared.add([prompt(3)])

    asyncio.run(main())
    assert served.pool.in_use == 0
    assert len(served.generate([prompt(3)], greedy(NEW))[0].outputs[0].token_ids) == NEW


def test_abort_all_ends_requests_and_new_ones_are_accepted():
    async def abort(shared: AsyncEngine) -> None:
        tasks = [asyncio.ensure_future(tokens_of(shared, prompt(3, seed), greedy(400))) for seed in range(20)]
        await asyncio.sleep(0.02)
        await shared.abort_all("the server stops")
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineStopped)
            assert str(error) == "the server stops"
        assert len(await tokens_of(shared, prompt(3), greedy(NEW))) == NEW

    run(abort)


def test_a_failing_stream_yields_earlier_results_first():
    async def main() -> None:
        closed: list[OutputStream] = []
        stream = OutputStream(["a"], closed.append)
        (output,) = engine().generate([prompt(3)], greedy(2))
        output.outputs[0].finish_reason = None
        OutputStream.update_all([(stream, 0, output)])
        stream.fail(StepFailed("no"))
        assert (await anext(stream))[1] is output
        with pytest.raises(StepFailed):
            await anext(stream)
        await stream.aclose()
        OutputStream.update_all([(stream, 0, output)])
        assert (closed, stream._latest) == ([stream], {})

    asyncio.run(main())
