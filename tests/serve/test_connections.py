"""Clients that disconnect, do not read, do not send, or are too many; and servers that stop or fail."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import rank_engine_jobs
from support.engine_models import prompt
from support.letters import Letters

from flashlatte.engine.output_stream import OutputStream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "tiny", "prompt": "Hello", "max_tokens": 4000, "temperature": 0}


@contextlib.contextmanager
def sent(server: Any, body: Any, headers: str = "", length: int | None = None) -> Iterator[socket.socket]:
    """A connection that has sent a request for completions, with a small receive buffer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
        f"content-length: {len(data) if length is None else length}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + data)
        yield connection


def read_to(connection: socket.socket, end: bytes, limit: int = 1 << 24) -> bytes:
    data = b""
    while end not in data and len(data) < limit and (part := connection.recv(65536)):
        data += part
    return data


def events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_request(server, stream):
    before = server.shared.statistics()["generated_tokens"]
    with sent(server, LONG | {"stream": stream, "n": 2, "temperature": 1}) as connection:
        if stream:
            assert read_to(connection, b"data: ").startswith(b"HTTP/1.1 200")
        else:
            until(lambda: server.shared.statistics()["generated_tokens"] > before)
    assert server.wait_idle()["generated_tokens"] - before < 4000


def test_a_connection_is_kept_longer_than_clients_keep_it(server):
    """httpx keeps an idle connection for 5 s. If the server closed it at the same time, a request could be lost."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    for _ in range(2):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
    assert server.server.config.timeout_keep_alive >= 60
    connection.close()


def test_a_client_that_disconnects_while_it_sends_its_body(server):
    with sent(server, b'{"model":', length=100):
        pass
    assert server.request("GET", "/health")[0] == 200


def test_a_slow_reader_delays_no_others_and_gets_everything(server):
    """Its request ends in the engine long before the response is read; unsent text is merged to one part per choice."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 150, "n": 8, "seed": 1, "logprobs": 20, "stream": True}
    with sent(server, body) as connection:
        until(lambda: server.shared.statistics()["accepted"] == 8)
        status, _ = server.request("POST", COMPLETIONS, LONG | {"max_tokens": 20})
        assert status == 200
        until(lambda: server.shared.statistics()["running"] == 0)
        assert server.shared.statistics()["accepted"] == 8
        found = events(read_to(connection, b"[DONE]"))
    assert found[-1] == "[DONE]"
    choices = [event["choices"][0] for event in found[:-1]]
    for index in range(8):
        tokens = [token for one in choices if one["index"] == index for token in one["logprobs"]["tokens"]]
        texts = [one["text"] for one in choices if one["index"] == index]
        assert (len(tokens), "".join(texts)) == (150, "".join(tokens))
        assert max(len(text) for text in texts) > 10
    server.wait_idle()


@pytest.mark.usefixtures("server")
def test_a_disconnect_at_the_end_of_a_write_is_detected():
    """``asyncio.wait_for`` would lose the cancellation."""
    from flashlatte.serve.context import ServerLimits
    from flashlatte.serve.responses import EventStream

    async def main() -> int:
        left, count = asyncio.Event(), 0

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal count
            count += 1
            if count == 3:
                await left.wait()

        async def many() -> AsyncGenerator[bytes, None]:
            for _ in range(1000):
                yield b"1"
                await asyncio.sleep(0)

        source = OutputStream(["a"], lambda stream: None)
        answer = asyncio.ensure_future(EventStream(many(), source, ServerLimits())({}, receive, send))
        await asyncio.sleep(0.01)
        left.set()
        await asyncio.wait_for(answer, 10)
        assert source._closed
        return count

    assert asyncio.run(main()) < 10


def test_a_client_that_never_reads_is_disconnected(serving):
    from flashlatte.serve.context import ServerLimits

    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 300, "n": 8, "seed": 1, "logprobs": 20, "stream": True}
    with serving(limits=ServerLimits(write_seconds=0.3)) as server, sent(server, body) as connection:
        until(lambda: server.shared.statistics()["generated_tokens"] > 0)
        server.wait_idle()
        assert b"[DONE]" not in read_to(connection, b"[DONE]")


def test_limits_of_bodies(serving):
    from flashlatte.serve.context import ServerLimits

    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
    with serving(limits=ServerLimits(max_body_bytes=200)) as server:
        assert server.request("POST", COMPLETIONS, body)[0] == 200
        status, answer = server.request("POST", COMPLETIONS, body | {"user": "x" * 300})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "at most 200 bytes" in answer["error"]["message"]
        for length in (10**9, 10**18):
            with sent(server, b"", length=length) as connection:
                assert read_to(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 413")
        # Without a length, in chunks.
        chunk = b"c8\r\n" + b"x" * 200 + b"\r\n"
        request = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
            connection.sendall(request.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunk + chunk)
            assert read_to(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 413")
        # A page of another site can send such a body without a CORS preflight.
        status, answer = server.request("POST", COMPLETIONS, body, **{"content-type": "text/plain"})
        assert (status, answer["error"]["param"]) == (415, "content-type")


def test_a_client_that_does_not_send_its_body_gets_status_408(serving):
    from flashlatte.serve.context import ServerLimits

    with serving(limits=ServerLimits(body_seconds=0.3)) as server, sent(server, b"{", length=100) as connection:
        assert read_to(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 408")


def test_more_requests_than_the_queue_holds_are_refused(serving):
    from support import api_server

    with serving(api_server.engine(max_num_seqs=2), max_queue=1) as server:
        with sent(server, LONG | {"n": 3, "temperature": 1, "stream": True}) as connection:
            read_to(connection, b"data: ")
            status, answer = server.request("POST", COMPLETIONS, LONG)
            assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, "rate_limit_error", "queue_full")
            # A request that can never run gets an error.
            status, answer = server.request("POST", COMPLETIONS, LONG | {"n": 4, "temperature": 1})
            assert (status, answer["error"]["param"]) == (400, "n")
        server.wait_idle()
        assert server.request("POST", COMPLETIONS, LONG | {"max_tokens": 2})[0] == 200


def test_an_api_key(serving):
    with serving(api_key="secret") as server:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer"},
        ):
            for method, path in (("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/none")):
                status, answer = server.request(method, path, None, **headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.request("GET", "/v1/models", None, authorization="Bearer secret")[0] == 200
        assert server.request("GET", "/health")[0] == server.request("GET", "/metrics")[0] == 200


def fail_next_step(server: Any, error: BaseException) -> None:
    runner = server.engine.runner
    compute = runner._compute

    def fail(batch: Any) -> torch.Tensor:
        runner._compute = compute
        raise error

    runner._compute = fail


def test_a_failed_step_is_status_500_or_the_last_event(server, caplog):
    with concurrent.futures.ThreadPoolExecutor(4) as pool, sent(server, LONG | {"stream": True}) as connection:
        whole = [pool.submit(server.request, "POST", COMPLETIONS, LONG) for _ in range(3)]
        read_to(connection, b"data: ")
        until(lambda: server.shared.statistics()["running"] == 4)
        fail_next_step(server, RuntimeError("a secret path"))
        last = events(read_to(connection, b'"error"'))[-1]
        for future in whole:
            status, answer = future.result()
            assert (status, answer["error"]["code"]) == (500, "engine_failed")
    assert last["error"]["code"] == "engine_failed"
    assert "secret" not in str(last)
    assert "a secret path" in caplog.text
    assert server.request("GET", "/health")[0] == 200
    assert server.request("POST", COMPLETIONS, LONG | {"max_tokens": 2})[0] == 200


def test_an_error_while_a_stream_is_written_is_its_last_event(server, caplog, monkeypatch):
    def fail(*_: Any, **__: Any) -> str:
        raise KeyError("unknown token")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine.tokenizer, "decode", fail)
        with sent(server, {**LONG, "max_tokens": 4, "stream": True}) as connection:
            (error,) = events(read_to(connection, b"0\r\n\r\n"))
    assert error["error"]["code"] == "internal_error"
    assert "unknown token" in caplog.text
    assert server.request("POST", COMPLETIONS, {**LONG, "max_tokens": 4})[0] == 200


def test_an_error_of_the_device_stops_the_server(serving, caplog):
    with serving() as server:
        fail_next_step(server, torch.AcceleratorError("an illegal memory access"))
        assert server.request("POST", COMPLETIONS, LONG)[0] == 500
        until(lambda: not server.shared.is_running)
        until(lambda: not server.server.servers[0].is_serving())


def test_nan_logits_are_an_error(serving):
    from support import api_server

    from flashlatte.engine import Engine

    text = "Hello" + Letters().decode([rank_engine_jobs.POISON])
    poisoned = Engine(rank_engine_jobs.poisoned("DeepseekV3"), num_pages=64, tokenizer=api_server.tokenizer())
    with serving(poisoned) as server:
        body = {"model": "tiny", "prompt": text, "max_tokens": 4, "suppress_tokens": [rank_engine_jobs.POISON]}
        status, answer = server.request("POST", COMPLETIONS, body)
        assert (status, answer["error"]["code"]) == (500, "invalid_logits")
        with sent(server, body | {"stream": True}) as connection:
            assert events(read_to(connection, b"0\r\n\r\n"))[-1]["error"]["code"] == "invalid_logits"
        # Other requests are served meanwhile.
        assert server.request("POST", COMPLETIONS, body | {"prompt": "Hello"})[0] == 200


def test_a_stopping_server_finishes_running_requests(serving):
    with serving() as server, sent(server, LONG | {"max_tokens": 100, "stream": True}) as connection:
        read_to(connection, b"data: ")
        server.server.should_exit = True
        until(lambda: not server.server.servers[0].is_serving())
        assert events(read_to(connection, b"[DONE]"))[-1] == "[DONE]"
        with pytest.raises(OSError, match="refused"):
            server.request("GET", "/health")


def test_a_stopping_server_ends_slow_requests_with_an_error(serving):
    from flashlatte.serve.context import ServerLimits

    with (
        serving(limits=ServerLimits(drain_seconds=0.3)) as server,
        sent(server, LONG | {"stream": True}) as connection,
        sent(server, LONG) as other,
    ):
        read_to(connection, b"data: ")
        until(lambda: server.shared.statistics()["accepted"] == 2)
        server.server.should_exit = True
        error = events(read_to(connection, b'"error"'))[-1]["error"]
        assert (error["code"], error["message"]) == ("stopping", "the server is stopping")
        assert read_to(other, b"}}").startswith(b"HTTP/1.1 503")


def test_a_second_interrupt_ends_requests_with_an_error(serving):
    with serving() as server, sent(server, LONG | {"stream": True}) as connection:
        read_to(connection, b"data: ")
        server.server.handle_exit(signal.SIGINT, None)
        read_to(connection, b"data: ")
        server.server.handle_exit(signal.SIGINT, None)
        assert events(read_to(connection, b'"error"'))[-1]["error"]["code"] == "stopping"


def test_metrics_are_consistent(serving):
    from prometheus_client.parser import text_string_to_metric_families

    def figures(server: Any) -> dict[tuple[str, ...], float]:
        text = server.request("GET", "/metrics")[1]
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    with serving() as server:
        for body in (
            {"prompt": "Hello", "max_tokens": 6},
            {"prompt": ["Hello", "Bye"], "n": 2, "max_tokens": 5, "stream": True},
            {"prompt": "Hello", "max_tokens": 9, "temperature": 0, "stop_token_ids": list(range(97))},
            {"prompt": "Hello", "max_tokens": -1},
        ):
            server.request("POST", COMPLETIONS, {"model": "tiny", **body})
        with sent(server, LONG | {"stream": True}) as connection:
            read_to(connection, b"data: ")
        server.wait_idle()
        found = figures(server)
    ended = {key[1]: value for key, value in found.items() if key[0] == "flashlatte_outputs_ended_total"}
    assert ended == {"length": 5, "stop": 1, "abort": 1}
    assert found["flashlatte_outputs_started_total",] == sum(ended.values())
    assert found["flashlatte_prompt_tokens_total",] == 5 + 8 + 5 + 5
    assert found["flashlatte_generation_tokens_total",] >= 6 + 20 + 1
    assert found["flashlatte_kv_cache_pages",] == 512
    for name in ("outputs_accepted", "outputs_running", "outputs_waiting", "kv_cache_pages_in_use"):
        assert found[f"flashlatte_{name}",] == 0
    assert found["flashlatte_request_latency_seconds_count",] == 6
    assert found["flashlatte_http_requests_total", COMPLETIONS, "200"] == 4
    assert found["flashlatte_http_requests_total", COMPLETIONS, "400"] == 1
    assert found["process_resident_memory_bytes",] > 1e6


def test_a_failed_request_is_counted():
    from flashlatte.serve.app import Gate

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a defect")

    counted: list[tuple[str, int]] = []
    metrics: Any = SimpleNamespace(responded=lambda *response: counted.append(response))
    scope, unused = {"type": "http", "path": COMPLETIONS, "headers": []}, cast("Any", None)
    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(Gate(fail, metrics, {COMPLETIONS}, None)(scope, unused, unused))
    assert counted == [(COMPLETIONS, 500)]


def test_prompts_of_one_salt_share_pages(server):
    tokens = prompt(40, 77)
    cached = []
    for salt in ("a", "b", "a"):
        _, answer = server.request(
            "POST", COMPLETIONS, {"model": "tiny", "prompt": tokens, "max_tokens": 1, "cache_salt": salt}
        )
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 32]
