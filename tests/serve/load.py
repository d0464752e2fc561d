"""A load test of ``flashlatte serve``: ``python tests/serve/load.py --seconds 3600``.

It starts the server with a tiny random model, and a cache that is too small for all requests. Clients send all kinds of
requests: streamed or not, with several prompts and outputs, and invalid ones. Some disconnect early, and some read
slowly. At the end every accepted output must have ended exactly once, no page may be in use, and the server's memory
must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

MODEL, END, LETTERS = "tiny", 7, "abcdefghijklmnopqrstuvwxyz ,."
SERVER = [
    *("--port", "0", "--num-pages", "160", "--page-size", "8", "--swap-space", "24", "--max-num-seqs", "24"),
    *("--max-queue", "40", "--max-num-batched-tokens", "128", "--served-model-name", MODEL),
]
# Python and malloc need some requests until they reuse their memory.
WARMUP, MAX_GROWTH, MAX_GROWTH_MIB = 0.3, 1.03, 12.0


@dataclass
class Load:
    """The clients, and counts of their results."""

    url: str
    until: float
    random: random.Random
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A random prompt; about half of them have a common beginning."""
        words = "".join(self.random.choices(LETTERS, k=self.random.randrange(1, 60)))
        return ("the same beginning of many prompts, " + words) if self.random.random() < 0.5 else words

    def options(self) -> dict[str, Any]:
        draw = self.random
        options: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": draw.randrange(1, 80),
            "temperature": draw.choice([0.5, 1.0, 1.5]),
            "n": draw.choice([1, 1, 1, 2, 4]),
        }
        if draw.random() < 0.3:
            options["stop"] = [draw.choice(LETTERS) + draw.choice(LETTERS)]
        if draw.random() < 0.2:
            options["frequency_penalty"] = 0.5
        return options

    def check(self, holds: bool, fault: str) -> None:
        if not holds and len(self.faults) < 20:
            self.faults.append(fault)

    def ended(self, reasons: list[Any], expected: int, what: str) -> None:
        """Check that each choice ended exactly once."""
        self.check(len(reasons) == expected and set(reasons) <= {"stop", "length"}, f"{what}: ended by {reasons}")
        self.counts["outputs"] += expected


async def whole(load: Load, client: Any) -> None:
    options, prompts = load.options(), [load.text() for _ in range(load.random.choice([1, 1, 3]))]
    if load.random.random() < 0.3:
        options |= {"logprobs": 3, "echo": True}
    answer = await client.completions.create(prompt=prompts, **options)
    load.ended([one.finish_reason for one in answer.choices], len(prompts) * options["n"], "completions")
    load.check(answer.usage.prompt_tokens == sum(map(len, prompts)), "usage: prompt tokens")
    load.counts["tokens"] += answer.usage.completion_tokens


async def chat(load: Load, client: Any) -> None:
    options = load.options()
    answer = await client.chat.completions.create(messages=[{"role": "user", "content": load.text()}], **options)
    load.ended([one.finish_reason for one in answer.choices], options["n"], "chat")
    load.counts["tokens"] += answer.usage.completion_tokens


async def streamed(load: Load, client: Any, *, leaves: bool = False, slow: bool = False) -> None:
    options, usage, reasons = load.options(), None, []
    stream = await client.chat.completions.create(
        messages=[{"role": "user", "content": load.text()}],
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    parts = load.random.randrange(1, 20)
    async with stream:
        async for part in stream:
            usage = part.usage or usage
            reasons += [one.finish_reason for one in part.choices if one.finish_reason is not None]
            parts -= 1
            if leaves and parts == 0:
                load.counts["left"] += 1
                return
            if slow:
                await asyncio.sleep(0.05)
    load.ended(reasons, options["n"], "stream")
    load.check(usage is not None, "stream: no usage")
    load.counts["tokens"] += usage.completion_tokens if usage else 0


async def impatient(load: Load, client: Any) -> None:
    with contextlib.suppress(openai.APITimeoutError):
        await client.with_options(timeout=load.random.uniform(0.01, 0.3)).completions.create(
            prompt=load.text(), **load.options()
        )
    load.counts["left"] += 1


async def nonsense(load: Load, client: Any) -> None:
    wrong = load.random.choice(
        [{"n": 10**9}, {"max_tokens": -1}, {"prompt": [10**9]}, {"tools": [{}]}, {"temperature": "x"}, {"stop": [""]}]
    )
    try:
        await client.post("/completions", body={"model": MODEL, "prompt": "a", **wrong}, cast_to=object)
        load.check(False, f"accepted: {wrong}")
    except openai.BadRequestError as error:
        load.check(error.param == next(iter(wrong)), f"{wrong}: {error}")
    load.counts["refused"] += 1


async def client_of(load: Load) -> None:
    kinds = [whole, whole, chat, streamed, streamed, streamed, leaver, slow_reader, impatient, nonsense]
    async with openai.AsyncOpenAI(base_url=load.url, api_key="x", max_retries=0, timeout=120) as client:
        while time.monotonic() < load.until:
            kind = load.random.choice(kinds)
            try:
                await kind(load, client)
                load.counts["requests"] += 1
            except openai.RateLimitError:
                load.counts["queue full"] += 1
                await asyncio.sleep(load.random.uniform(0, 0.2))
            except (openai.OpenAIError, OSError) as error:
                load.check(False, f"{kind.__name__}: {error!r} from {error.__cause__!r}")


async def leaver(load: Load, client: Any) -> None:
    await streamed(load, client, leaves=True)


async def slow_reader(load: Load, client: Any) -> None:
    await streamed(load, client, slow=True)


async def figures(url: str) -> dict[str, float]:
    """The samples of /metrics, by name and labels."""
    reader, writer = await asyncio.open_connection(*url.split("/")[2].split(":"))
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:{.*})?) (\S+)$", text, re.MULTILINE)}


async def run(url: str, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """Send requests, then check what the server says about them."""
    begin = time.monotonic()
    load = Load(url, begin + seconds, random.Random(seed))
    tasks = [asyncio.ensure_future(client_of(load)) for _ in range(clients)]
    memory: list[tuple[float, float]] = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(min(1.0, seconds / 20))
        now = await figures(url)
        memory.append((time.monotonic() - begin, now["process_resident_memory_bytes"] / 2**20))
    await asyncio.gather(*tasks)
    for _ in range(200):
        now = await figures(url)
        gauges = {
            name: now[f"flashlatte_{name}"] for name in ("outputs_accepted", "outputs_running", "outputs_waiting")
        }
        gauges["pages_in_use"] = now["flashlatte_kv_cache_pages_in_use"]
        if not any(gauges.values()):
            break
        await asyncio.sleep(0.05)
    load.check(not any(gauges.values()), f"left over: {gauges}")
    ended = {name: value for name, value in now.items() if name.startswith("flashlatte_outputs_ended_total")}
    started = now["flashlatte_outputs_started_total"]
    load.check(started == sum(ended.values()), f"{started} outputs were accepted, and ended: {ended}")
    complete = sum(value for name, value in ended.items() if '"stop"' in name or '"length"' in name)
    load.check(complete >= load.counts["outputs"], f"clients saw {load.counts['outputs']} outputs, ended: {ended}")
    load.check(not any('"error"' in name for name in ended), f"outputs ended by errors: {ended}")
    warm = [size for moment, size in memory if moment > WARMUP * seconds]
    first, last = statistics.median(warm[: len(warm) // 4]), statistics.median(warm[-(len(warm) // 4) :])
    load.check(
        last <= max(first * MAX_GROWTH, first + MAX_GROWTH_MIB), f"memory grew from {first:.1f} to {last:.1f} MiB"
    )
    return {
        "seconds": round(time.monotonic() - begin, 1),
        **load.counts,
        "ended": {re.sub(r'.*="(\w+)".*', r"\1", name): value for name, value in ended.items()},
        "preempted": now["flashlatte_swapped_total"] + now["flashlatte_recomputed_total"],
        "memory_mib": [round(size, 1) for _, size in memory[:: max(len(memory) // 12, 1)]],
        "open_files": now["process_open_fds"],
        "faults": load.faults,
    }


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server in a separate process; yields its URL. It must exit with code 0 after SIGTERM."""
    from support.engine_models import model
    from support.letters import CHAT, save_letters

    with tempfile.TemporaryDirectory() as path:
        tiny = model("DeepseekV3", max_position_embeddings=1024)
        tiny.save_pretrained(path)
        config = Path(path) / "generation_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [END]}))
        save_letters(Path(path), CHAT)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "flashlatte", "serve", path, *SERVER]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    sys.stderr.write(line)
                    if found := re.search(r"at (http://\S+/v1),", line):
                        break
                else:
                    raise RuntimeError(f"the server ended with {process.wait()}")
                yield found[1]
                process.send_signal(signal.SIGTERM)
                sys.stderr.write(process.stderr.read())
                if (code := process.wait(60)) != 0:
                    raise RuntimeError(f"the server ended with {code}")
            finally:
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description="Load test of flashlatte serve.")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the test (default 60)")
    parser.add_argument("--clients", type=int, default=64, help="clients at a time (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default 0)")
    options = parser.parse_args()
    with server() as url:
        result = asyncio.run(run(url, options.seconds, options.clients, options.seed))
    print(json.dumps(result, indent=2))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
