"""Figures of the server, in the text format of Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from flashlatte.engine.async_engine import AsyncEngine
from flashlatte.engine.outputs import RequestOutput
from flashlatte.serve.job import GenerationJob

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# Statistics of the engine: name in Prometheus, name in ``AsyncEngine.statistics``, description.
_COUNTERS = (
    ("computed_tokens", "computed_tokens", "tokens of prompts and outputs that steps computed"),
    ("cached_tokens", "cached_tokens", "prompt tokens that the prefix cache provided"),
    ("generation_tokens", "generated_tokens", "generated tokens"),
    ("draft_tokens", "draft_tokens", "draft tokens that were verified"),
    ("accepted_draft_tokens", "accepted_tokens", "draft tokens that were accepted"),
    ("swapped", "swapped", "preempted outputs whose pages were copied to the host"),
    ("recomputed", "recomputed", "preempted outputs that were computed again"),
)
_GAUGES = (
    ("outputs_accepted", "accepted", "outputs that run, wait, or are not read to their end"),
    ("outputs_running", "running", "outputs that have pages"),
    ("outputs_waiting", "waiting", "outputs that wait for pages"),
    ("kv_cache_pages", "pages", "pages of the cache"),
    ("kv_cache_pages_in_use", "pages_in_use", "pages that outputs use"),
)


class ServerMetrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        ProcessCollector(registry=self._registry)
        self._http = Counter("flashlatte_http_requests", "responses", ("path", "status"), registry=self._registry)
        self._started = Counter("flashlatte_outputs_started", "outputs that were accepted", registry=self._registry)
        self._ended = Counter(
            "flashlatte_outputs_ended", "outputs that ended", ("finish_reason",), registry=self._registry
        )
        self._prompt_tokens = Counter("flashlatte_prompt_tokens", "tokens of prompts", registry=self._registry)
        self._first, self._each, self._whole = (
            Histogram(f"flashlatte_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)
            for name, text in (
                ("time_to_first_token", "from the request to its first token"),
                ("time_per_output_token", "of an output, after its first token"),
                ("request_latency", "from the request to its last token"),
            )
        )

    def text(self) -> tuple[bytes, str]:
        """All figures, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def responded(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    @contextlib.contextmanager
    def measuring(self, job: GenerationJob) -> Iterator[RequestTimer]:
        """Count and time a request's outputs. Those that have not ended at the end of the block were aborted."""
        self._started.inc(job.num_outputs)
        self._prompt_tokens.inc(sum(map(len, job.prompts)))
        timer = RequestTimer(job, self._first, self._each, self._whole, self._ended)
        try:
            yield timer
        finally:
            self._ended.labels("abort").inc(timer.num_unfinished)


class RequestTimer:
    """Times the outputs of a request."""

    def __init__(self, job: GenerationJob, first: Histogram, each: Histogram, whole: Histogram, ended: Counter) -> None:
        self.num_unfinished, self._begin = job.num_outputs, job.parsed_at
        self._first, self._each, self._whole, self._ended = first, each, whole, ended
        self._first_times: dict[tuple[int, int], float] = {}
        self._finished: set[tuple[int, int]] = set()

    def update(self, index: int, request: RequestOutput) -> None:
        """Take the latest result of a request's prompt."""
        now = time.perf_counter()
        for output in request.outputs:
            key, count = (index, output.index), len(output.token_ids)
            if count and key not in self._first_times:
                self._first_times[key] = now
                self._first.observe(now - self._begin)
            if output.finish_reason is not None and key not in self._finished:
                self._finished.add(key)
                self.num_unfinished -= 1
                self._ended.labels(output.finish_reason).inc()
                self._whole.observe(now - self._begin)
                if count > 1:
                    self._each.observe((now - self._first_times[key]) / (count - 1))


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        statistics = self._engine.statistics()
        for name, key, text in _COUNTERS:
            yield CounterMetricFamily(f"flashlatte_{name}", text, value=statistics[key])
        for name, key, text in _GAUGES:
            yield GaugeMetricFamily(f"flashlatte_{name}", text, value=statistics[key])
