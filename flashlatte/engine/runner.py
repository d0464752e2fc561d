"""A step on the device: pages moved, inputs from tokens, one forward pass, tokens sampled.

Nothing waits for the device, so the host may plan a step while the last one runs: a token that is not known on the host
yet is taken, on the device, from where its step put it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.engine.batch import Batch, make_batch
from flashlatte.engine.model import AnyModel
from flashlatte.engine.request import Request
from flashlatte.engine.sampling import SamplingParams, log_probabilities, sample
from flashlatte.engine.step import Copies, Step, Work
from flashlatte.ops.cache_copy import swap_blocks

# Batches of so many requests, each generating one token, have a CUDA graph each; others in between are padded.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, on its way to the host.

    Attributes:
        tokens, logprobs: [rows], on the host as soon as ``arrived`` is done; logprobs None if nobody asked.
        rows: of each request that sampled: its first row and how many it has.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    rows: Mapping[str, tuple[int, int]]
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()


class Runner:
    """Executes steps of a scheduler.

    Args:
        caches, host_caches: of every layer; host_caches is None if nothing is swapped.
        max_requests, max_tokens: of a step.
        max_seq_len: tokens that a request may come to.
        graphs: whether steps that only generate run as CUDA graphs.
    """

    def __init__(
        self,
        model: AnyModel,
        cache_format: str,
        caches: list[torch.Tensor],
        host_caches: list[torch.Tensor] | None,
        *,
        max_requests: int,
        max_tokens: int,
        max_seq_len: int,
        graphs: bool,
    ) -> None:
        self.model, self.caches, self.host_caches = model, caches, host_caches
        self.ranks, self._cache_format = model.ranks, cache_format
        # Of a page of the scheduler's each rank that has some of the keys has a page.
        num_pages, page_size = caches[0].shape[0], caches[0].shape[1] * model.keys_over
        self._sizes = [size for size in GRAPH_SIZES if size < max_requests] + [max_requests]
        self._planner = model.planner(
            cache_format,
            num_pages,
            page_size,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_seq_len=max_seq_len,
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._use_graphs = graphs and self._planner.fits_graphs and model.device.type == "cuda"
        with torch.inference_mode(False), torch.device(model.device):
            self._tokens = torch.zeros(max(max_tokens, max_requests), dtype=torch.int64)
            self._last = torch.zeros(max_requests, dtype=torch.int64)
            # What a graph reads must stay where it is.
            self._rows = torch.arange(max_requests)
        self._seen: torch.Tensor | None = None
        self._places: dict[str, int] = {}

    def run(self, step: Step, params: Mapping[str, SamplingParams]) -> Sampled:
        """Execute a step, on all ranks.

        Raises:
            RuntimeError: another rank failed; says which, and why.
        """
        with self._failing_together():
            return self._run(step, params)

    def _run(self, step: Step, params: Mapping[str, SamplingParams]) -> Sampled:
        for work in step.work:
            if work.request.id not in self._places:
                self._places[work.request.id] = self._free_place()
        batch = make_batch(step, self._places)
        if self.ranks is not None:
            self.ranks.send(batch)
        logits = self.compute(batch)
        sampling = [work for work in step.work if work.samples]
        chosen = [params[work.request.id] for work in sampling for _ in range(1 + work.drafts)]
        positions = _device_ints(
            [work.start + work.count - work.drafts + draft for work in sampling for draft in range(1 + work.drafts)],
            logits,
        )
        tokens = sample(logits, chosen, positions, self._seen_rows(sampling, chosen))
        self.keep(batch, tokens)
        wanted = any(one.logprobs for one in chosen)
        logprobs = log_probabilities(logits, tokens) if wanted else None
        spans, first = {}, 0
        for work in sampling:
            spans[work.request.id] = first, 1 + work.drafts
            first += 1 + work.drafts
        return _to_host(tokens, logprobs, spans)

    def follow(self) -> None:
        """Execute what rank 0 executes, until it has nothing more."""
        assert self.ranks is not None
        with self._failing_together():
            while (batch := self.ranks.receive()) is not None:
                self.compute(batch)
                self.keep(batch, torch.empty(len(batch.rows), dtype=torch.int64, device=self._last.device))

    def compute(self, batch: Batch) -> torch.Tensor:
        """Move pages, then the forward pass: logits [rows, vocabulary] of the sampled rows."""
        self._move_pages(batch.swap_out, self.caches, self.host_caches)
        self._move_pages(batch.swap_in, self.host_caches, self.caches)
        if not batch.counts:
            return torch.empty(0, self.model.vocabulary, device=self._last.device)
        self._put_tokens(batch)
        return self._forward(batch)

    def keep(self, batch: Batch, tokens: torch.Tensor) -> None:
        """Put each request's sampled token, rank 0's, where its next step finds it."""
        if not batch.kept:
            return
        if self.ranks is not None:
            self.ranks.share_tokens(tokens)
        self._make_places(max(batch.kept) + 1)
        places = _device_ints(batch.kept, tokens)
        self._last[places] = tokens
        if self._seen is not None:
            self._seen[places, tokens] = True

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._places.pop(request.id, None)

    def _failing_together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.ranks is None else self.ranks.failing_together()

    def _move_pages(
        self, pairs: Copies, sources: list[torch.Tensor] | None, targets: list[torch.Tensor] | None
    ) -> None:
        if not pairs:
            return
        assert sources is not None
        assert targets is not None
        # Sent to the device once, for the caches of all layers.
        listed = torch.tensor(pairs, dtype=torch.int64).to(self._tokens.device, non_blocking=True)
        from_pages, to_pages = listed.unbind(1)
        for source, target in zip(sources, targets, strict=True):
            swap_blocks(source, target, from_pages, to_pages)

    def _free_place(self) -> int:
        """Where the last token of a request is kept on the device."""
        taken = set(self._places.values())
        # Requests that gave way keep theirs: more places than requests that run.
        place = next(number for number in itertools.count() if number not in taken)
        self._make_places(place + 1)
        return place

    def _make_places(self, count: int) -> None:
        """Room for the last tokens of so many requests."""
        while self._last.shape[0] < count:
            self._last = torch.cat((self._last, torch.zeros_like(self._last)))
            if self._seen is not None:
                self._seen = torch.cat((self._seen, torch.zeros_like(self._seen)))

    def _put_tokens(self, batch: Batch) -> None:
        """The flat batch's token ids, those that only the device knows from where their step put them."""
        ids = torch.tensor(batch.tokens, dtype=torch.int64)
        self._tokens[: len(ids)].copy_(ids, non_blocking=True)
        if batch.unknown:
            places = _device_ints(batch.origins, self._tokens)
            self._tokens[_device_ints(batch.unknown, self._tokens)] = self._last[places]

    def _forward(self, batch: Batch) -> torch.Tensor:
        requests = len(batch.counts)
        if self._use_graphs and batch.generates:
            size = next(size for size in self._sizes if size >= requests)
            metadata = self._planner.plan(batch, size)
            logits = self._replay(size, metadata)
            if logits is not None:
                return logits[:requests]
        metadata = self._planner.plan(batch, None)
        return self._logits(self._tokens[: metadata.num_tokens], metadata, _device_ints(batch.rows, self._tokens))

    def _logits(self, tokens: torch.Tensor, metadata: Any, rows: torch.Tensor) -> torch.Tensor:
        if self.ranks is not None:
            metadata = self.ranks.shard(metadata, self._cache_format)
        return self.model(tokens, self.caches, metadata, rows)

    def _replay(self, size: int, metadata: Any) -> torch.Tensor | None:
        """Logits of a decode step of ``size`` requests from its graph, which is captured when first needed.

        None where the model cannot be captured: then no step runs as a graph any more.
        """
        if size not in self._graphs:
            stream = torch.cuda.current_stream()
            try:
                self._graphs[size] = self._capture(size, metadata)
            except RuntimeError as error:
                # A capture that failed leaves its own stream the current one.
                torch.cuda.set_stream(stream)
                self._use_graphs = False
                warnings.warn(f"decode steps run without CUDA graphs: {error}", stacklevel=2)
                return None
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def _capture(self, size: int, metadata: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        tokens, rows = self._tokens[:size], self._rows[:size]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._logits(tokens, metadata, rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._logits(tokens, metadata, rows)
        return graph, logits

    def _seen_rows(self, sampling: Sequence[Work], chosen: Sequence[SamplingParams]) -> torch.Tensor | None:
        """Which tokens occurred before each sampled one; None if no request asks for it."""
        if all(one.repetition_penalty == 1 for one in chosen):
            return None
        if self._seen is None:
            shape = self._last.shape[0], self.model.vocabulary
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._last.device)
        rows = []
        for work in sampling:
            request, seen = work.request, self._seen[self._places[work.request.id]]
            if request.pending == 1:
                # All its tokens are known here; what is not was marked when it was sampled.
                seen.zero_()
                seen[_device_ints(request.tokens, seen)] = True
            for count in range(1 + work.drafts):
                row = seen.clone()
                row[_device_ints(request.drafts[:count], seen)] = True
                rows.append(row)
        return torch.stack(rows)


def _to_host(tokens: torch.Tensor, logprobs: torch.Tensor | None, rows: Mapping[str, tuple[int, int]]) -> Sampled:
    if tokens.device.type != "cuda":
        return Sampled(tokens, logprobs, rows, None)
    host = tokens.to("cpu", non_blocking=True)
    host_logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return Sampled(host, host_logprobs, rows, arrived)


def _device_ints(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(like.device, non_blocking=True)
