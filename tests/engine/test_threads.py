"""An engine in several threads, engines in one thread each, and an ``AsyncEngine`` in several event loops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.engine_models import engine, greedy, prompt
from support.threads import at_the_same_time

from flashlatte.engine import AsyncEngine, SamplingParams

NEW = 6


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_threads_generate_with_one_engine():
    prompts = [[prompt(3 + number % 5, number), prompt(4, number)] for number in range(4)]
    expected = [tokens_of(engine("DeepseekV3").generate(each, greedy(NEW))) for each in prompts]
    served = engine("DeepseekV3", max_num_seqs=6, num_pages=24, page_size=4)

    def generate(number: int) -> list[list[int]]:
        stream = served.stream(prompts[number][0], greedy(NEW))
        dropped = served.stream(prompts[number][1], greedy(60))
        next(dropped)
        del dropped
        result = tokens_of(served.generate(prompts[number], greedy(NEW)))
        assert [*stream] == result[0]
        return result

    assert at_the_same_time(generate, threads=4) == expected
    assert served.unfinished == served.pool.in_use == 0


def test_engines_of_one_model_in_a_thread_each():
    prompts = [prompt(5, number) for number in range(4)]
    expected = tokens_of(engine("DeepseekV32").generate(prompts, greedy(NEW)))

    def generate(_: int) -> list[list[int]]:
        return tokens_of(engine("DeepseekV32", num_pages=40).generate(prompts, greedy(NEW)))

    assert at_the_same_time(generate, threads=3) == [expected] * 3


async def all_tokens(shared: AsyncEngine, tokens: list[int]) -> list[int]:
    return [token async for output in shared.generate(tokens, greedy(NEW)) for token in output.outputs[0].new_token_ids]


def test_another_event_loop_is_refused_until_it_uses_the_engines_loop():
    """Otherwise its task would wait forever: results are posted to the loop of ``async with``."""
    expected = tokens_of(engine("DeepseekV3").generate([prompt(3)], greedy(NEW)))[0]

    async def main() -> None:
        async with AsyncEngine(engine("DeepseekV3")) as shared:
            loop = asyncio.get_running_loop()

            def in_another_thread() -> list[int]:
                with pytest.raises(RuntimeError, match="must be called in the event loop of its `async with`"):
                    asyncio.run(all_tokens(shared, prompt(3)))
                return asyncio.run_coroutine_threadsafe(all_tokens(shared, prompt(3)), loop).result(60)

            assert await asyncio.to_thread(in_another_thread) == expected
            assert shared.statistics()["accepted"] == 0

    asyncio.run(main())


def test_an_async_engine_is_entered_once():
    shared = AsyncEngine(engine("DeepseekV3"))

    async def enter() -> None:
        async with shared:
            pass

    asyncio.run(enter())
    with pytest.raises(RuntimeError, match="can be entered once"):
        asyncio.run(enter())


def test_statistics_are_read_while_threads_generate():
    served, ended = engine("DeepseekV3", max_num_seqs=4), threading.Event()

    def use(number: int) -> None:
        if number:
            served.generate([prompt(4, number)] * 3, SamplingParams(max_tokens=NEW, n=2, seed=1))
            ended.set()
            return
        tokens = 0.0
        while not ended.is_set():
            now = served.statistics()
            assert tokens <= now["generated_tokens"]
            assert 0 <= now["pages_in_use"] <= now["pages"]
            tokens = now["generated_tokens"]

    at_the_same_time(use, threads=4)
