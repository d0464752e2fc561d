"""A step on the device: pages moved, inputs from tokens, one forward pass, tokens sampled.

Nothing waits for the device, so the host may plan a step while the last one runs: a token that is not known on the host
yet is taken, on the device, from where its step put it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.distributed.model.alone import Alone
from flashlatte.engine.batch import EngineLimits, StepBatch
from flashlatte.engine.paged import PagedModel
from flashlatte.engine.request import PageCopies, Request, ScheduledRequest, Step
from flashlatte.engine.sampling import SamplingParams, log_probabilities, sample
from flashlatte.ops.cache_copy import swap_blocks
from flashlatte.runtime.transfer import to_device

# Batches of so many requests, each generating one token, have a CUDA graph each; others in between are padded.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, on its way to the host.

    Attributes:
        step: that did.
        tokens, logprobs: [rows], on the host as soon as ``arrived`` is done; logprobs None if nobody asked. Of each
            work that samples one row, and one for each of its drafts.
        ranks: that computed it together.
    """

    step: Step
    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    arrived: torch.cuda.Event | None
    ranks: Alone

    def wait(self) -> list[tuple[ScheduledRequest, list[int], list[float]]]:
        """Each work that samples, its tokens, and their logprobs if somebody asked."""
        if self.arrived is not None:
            self.ranks.wait(self.arrived)
        tokens, logprobs = self.tokens.tolist(), [] if self.logprobs is None else self.logprobs.tolist()
        sampling = [one for one in self.step.scheduled if one.samples]
        ends = itertools.accumulate(1 + one.num_drafts for one in sampling)
        rows = [slice(end - 1 - one.num_drafts, end) for one, end in zip(sampling, ends, strict=True)]
        return [(one, tokens[its], logprobs[its]) for one, its in zip(sampling, rows, strict=True)]


class Runner:
    """Executes steps of a scheduler, over caches of its own.

    Args:
        limits: of the caches and of a step.
        graphs: whether steps that only generate run as CUDA graphs.

    Raises:
        ValueError: an unfit cache format, or caches that do not fit the memory.
    """

    def __init__(self, model: PagedModel, cache_format: str, limits: EngineLimits, *, cuda_graphs: bool) -> None:
        self.model, self.ranks, self._cache_format = model, model.ranks, cache_format
        self.caches = model.allocate(cache_format, limits.num_pages, limits.page_size)
        self.host_caches: list[torch.Tensor] = []
        if limits.swap_space:
            self.host_caches = model.allocate(cache_format, limits.swap_space, limits.page_size, on_host=True)
        self._plan = model.planner(cache_format, limits)
        max_num_seqs = limits.max_num_seqs
        # Of one size, all steps that generate go through the same kernels.
        smaller = () if model.batch_invariant else GRAPH_SIZES
        self._sizes = [size for size in smaller if size < max_num_seqs] + [max_num_seqs]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._buffers_of_graphs: object = None
        self._use_graphs = cuda_graphs and model.device.type == "cuda"
        with torch.inference_mode(False), torch.device(model.device):
            self._tokens = torch.zeros(max(limits.max_num_batched_tokens, max_num_seqs), dtype=torch.int64)
            # What a graph reads must stay where it is.
            self._rows = torch.arange(max_num_seqs)
            # By place: each request's last token, and which tokens occurred in it, once a penalty asks.
            self._last = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._seen: torch.Tensor | None = None
        self._free_state_indices: list[int] = []
        self._new_state_indices = itertools.count()

    def run(self, step: Step) -> Sampled:
        """Execute a step, on all ranks.

        Raises:
            RuntimeError: another rank failed; says which, and why.
        """
        for one in step.scheduled:
            if one.request.state_index < 0:
                one.request.state_index = (
                    self._free_state_indices.pop() if self._free_state_indices else next(self._new_state_indices)
                )
        batch = StepBatch.of(step)
        with self.ranks.failing_together():
            self.ranks.send(batch)
            logits = self._compute(batch)
            sampling = [one for one in step.scheduled if one.samples]
            rows = [(one, row) for one in sampling for row in range(1 + one.num_drafts)]
            chosen = [one.request.sampling for one, _ in rows]
            positions = [one.start + one.count - one.num_drafts + row for one, row in rows]
            tokens = sample(logits, chosen, positions, self._seen_rows(sampling, chosen))
            # NO_TOKEN is for the host, which ends the request; until then its next step computes some token.
            ids = tokens.clamp(min=0)
            self._keep(batch, ids)
            logprobs = log_probabilities(logits, ids) if any(one.logprobs for one in chosen) else None
            return self._to_host(step, tokens, logprobs)

    def follow(self) -> None:
        """Execute what rank 0 executes, until it has nothing more.

        Raises:
            ValueError: on rank 0.
        """
        if self.ranks.leads:
            raise ValueError("follow() is for ranks other than 0, which schedules and closes the engine")
        with self.ranks.failing_together():
            while (batch := self.ranks.receive()) is not None:
                self._compute(batch)
                self._keep(batch, torch.empty(len(batch.rows), dtype=torch.int64, device=self._last.device))
        self.ranks.part()

    def release(self, request: Request) -> None:
        """A request has ended."""
        if request.state_index >= 0:
            self._free_state_indices.append(request.state_index)

    def release_all(self) -> None:
        """All requests have ended, some of them within a step that was interrupted."""
        self._free_state_indices, self._new_state_indices, self._seen = [], itertools.count(), None

    def _ensure_state(self, count: int) -> None:
        """Requests that gave way keep theirs: there may be more than requests that run."""
        while len(self._last) < count:
            self._last = torch.cat((self._last, torch.zeros_like(self._last)))
            if self._seen is not None:
                self._seen = torch.cat((self._seen, torch.zeros_like(self._seen)))

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        """Move pages, then the forward pass: logits [rows, vocabulary] of the sampled rows."""
        self._move_pages(batch.swap_out, self.caches, self.host_caches)
        self._move_pages(batch.swap_in, self.host_caches, self.caches)
        if not batch.counts:
            return torch.empty(0, self.model.vocabulary, device=self._last.device)
        self._ensure_state(max(batch.state_indices) + 1)
        ids = to_device(batch.tokens, self._tokens.device)
        if min(batch.tokens) < 0:
            ids = torch.where(ids < 0, self._last[(-1 - ids).clamp(min=0)], ids)
        self._tokens[: len(ids)].copy_(ids)
        requests = len(batch.counts)
        if not batch.one_token_each or not (self._use_graphs or self.model.batch_invariant):
            metadata = self._plan(batch, None)
            return self._logits(metadata, to_device(batch.rows, self._tokens.device))
        size = next(size for size in self._sizes if size >= requests)
        logits = self._padded(size, self._plan(batch, size))
        if len(batch.rows) == requests:
            return logits[:requests]
        return logits[to_device(batch.rows, logits.device)]

    def _keep(self, batch: StepBatch, tokens: torch.Tensor) -> None:
        """Put each request's sampled token, rank 0's, where its next step finds it."""
        if not batch.kept:
            return
        self.ranks.share_tokens(tokens)
        places = to_device(batch.kept, tokens.device)
        self._last[places] = tokens
        if self._seen is not None:
            self._seen[places, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def _move_pages(self, pairs: PageCopies, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        if not pairs:
            return
        # Sent to the device once, for the caches of all layers.
        from_pages, to_pages = to_device(pairs, self._tokens.device).unbind(1)
        for source, target in zip(sources, targets, strict=True):
            swap_blocks(source, target, from_pages, to_pages)

    def _logits(self, metadata: Any, rows: torch.Tensor) -> torch.Tensor:
        metadata = self.ranks.shard(metadata, self._cache_format)
        return self.model(self._tokens[: metadata.num_tokens], self.caches, metadata, rows)

    def _padded(self, size: int, metadata: Any) -> torch.Tensor:
        """Logits of a step of ``size`` requests of one token, from its graph, which is captured when first needed.

        A model that cannot be captured runs without graphs from then on.
        """
        if metadata.buffers is not self._buffers_of_graphs:
            self._graphs.clear()
            self._buffers_of_graphs = metadata.buffers
        if self._use_graphs and size not in self._graphs:
            stream = torch.cuda.current_stream()
            try:
                self._graphs[size] = self._capture(size, metadata)
            except BaseException as error:
                # A capture that failed leaves its own stream the current one.
                torch.cuda.set_stream(stream)
                if not isinstance(error, RuntimeError):
                    raise
                self._use_graphs = False
                warnings.warn(f"decode steps run without CUDA graphs: {error}", stacklevel=2)
        if not self._use_graphs:
            return self._logits(metadata, self._rows[:size])
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def _capture(self, size: int, metadata: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        rows = self._rows[:size]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._logits(metadata, rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._logits(metadata, rows)
        return graph, logits

    def _seen_rows(self, sampling: Sequence[ScheduledRequest], chosen: Sequence[SamplingParams]) -> torch.Tensor | None:
        """Which tokens occurred before each sampled one; None if no request asks for it.

        A number of Python that is assigned to chosen places would wait for the GPU: they are filled.
        """
        if all(one.repetition_penalty == 1 for one in chosen):
            return None
        device = self._last.device
        if self._seen is None:
            self._seen = torch.zeros(len(self._last), self.model.vocabulary, dtype=torch.bool, device=device)
        rows = []
        for one in sampling:
            request, seen = one.request, self._seen[one.request.state_index]
            if request.pending == 1:
                # All its tokens are known here; what is not was marked when it was sampled.
                seen.zero_()
                seen.index_fill_(0, to_device(request.tokens, device), True)
            for count in range(1 + one.num_drafts):
                row = seen.clone()
                row.index_fill_(0, to_device(request.draft_tokens[:count], device), True)
                rows.append(row)
        return torch.stack(rows)

    def _to_host(self, step: Step, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> Sampled:
        if tokens.device.type != "cuda":
            return Sampled(step, tokens, logprobs, None, self.ranks)
        host = tokens.to("cpu", non_blocking=True)
        host_logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Sampled(step, host, host_logprobs, arrived, self.ranks)
