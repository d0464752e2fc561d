"""Runs a step on the device: copies pages, prepares the inputs, runs the forward pass, samples.

The host does not wait for the device, so it can plan a step while the last one runs. A token that the host does not
have yet is read on the device, where its step stored it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.distributed.model.single_process import SingleProcess
from flashlatte.engine.batch import EngineLimits, StepBatch
from flashlatte.engine.logits_processing import LogitsRow, TokenHistory, process_logits
from flashlatte.engine.logprobs import LogprobRows, RankedToken, num_top_tokens
from flashlatte.engine.paged import PagedModel
from flashlatte.engine.request import PageCopies, Request, ScheduledRequest, Step
from flashlatte.engine.sampling import sample
from flashlatte.ops.cache_copy import copy_blocks, swap_blocks
from flashlatte.runtime.transfer import to_device

# Batch sizes of decode steps that have a CUDA graph. Other batches are padded to the next size.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# PyTorch captures one graph at a time in a process.
_capturing = threading.Lock()


@dataclass(frozen=True)
class RequestResult:
    """A request's results of a step: sampled tokens, and log-probabilities if they were requested."""

    scheduled: ScheduledRequest
    tokens: list[int]
    logprobs: list[list[RankedToken]]
    prompt_logprobs: list[list[RankedToken]]


@dataclass(frozen=True)
class StepResult:
    """The results of a step, which are being copied to the host.

    Attributes:
        step: the step.
        tokens: int64 [rows], on the host once ``arrived`` is reached. A request that samples has one row, and one more
            for each draft token.
        logprobs: log-probabilities of these rows; None if not requested.
        prompt_logprobs: log-probabilities of the scored prompt tokens; None if there are none.
        ranks: the ranks that computed the step.
    """

    step: Step
    tokens: torch.Tensor
    logprobs: LogprobRows | None
    prompt_logprobs: LogprobRows | None
    arrived: torch.cuda.Event | None
    ranks: SingleProcess

    def wait(self) -> list[RequestResult]:
        """Wait for the copies; the results of each request."""
        if self.arrived is not None:
            self.ranks.wait(self.arrived)
        tokens, results, row, scored = self.tokens.tolist(), [], 0, 0
        for one in self.step.scheduled:
            params, count = one.request.sampling, (1 + one.num_drafts) * one.samples
            logprobs, prompt_logprobs = [], []
            if self.logprobs is not None and params.logprobs is not None:
                logprobs = self.logprobs.ranked(row, row + count, params.logprobs)
            if self.prompt_logprobs is not None and one.num_scored:
                prompt_logprobs = self.prompt_logprobs.ranked(scored, scored + one.num_scored, params.prompt_logprobs)
            results.append(RequestResult(one, tokens[row : row + count], logprobs, prompt_logprobs))
            row, scored = row + count, scored + one.num_scored
        return results


class Runner:
    """Runs the steps of a scheduler, over its own caches.

    Args:
        limits: sizes of the caches and of a step.
        cuda_graphs: whether decode steps run as CUDA graphs.

    Raises:
        ValueError: an unfit cache format, or caches that do not fit the memory.
    """

    def __init__(self, model: PagedModel, cache_format: str, limits: EngineLimits, *, cuda_graphs: bool) -> None:
        self.model, self.ranks, self._cache_format = model, model.ranks, cache_format
        self.caches = model.allocate(cache_format, limits.num_pages, limits.page_size)
        self.host_caches: list[torch.Tensor] = []
        if limits.swap_space:
            self.host_caches = model.allocate(cache_format, limits.swap_space, limits.page_size, on_host=True)
        self.states = model.allocate_states(limits.num_state_slots)
        self.host_states = model.allocate_states(limits.num_host_states, on_host=True)
        max_num_seqs = limits.max_num_seqs
        # With one size, all decode steps run the same kernels.
        smaller = () if model.batch_invariant else GRAPH_SIZES
        self._sizes = [size for size in smaller if size < max_num_seqs] + [max_num_seqs]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._buffers_of_graphs: object = None
        self._use_graphs = cuda_graphs and model.device.type == "cuda" and model.has_graphs
        # The default stream of captures belongs to the GPU of the first one.
        self._capture_stream = torch.cuda.Stream(model.device) if self._use_graphs else None
        try:
            self._plan = model.planner(cache_format, limits)
            with torch.inference_mode(False), torch.device(model.device):
                self._tokens = torch.zeros(max(limits.max_num_batched_tokens, max_num_seqs), dtype=torch.int64)
                # Graphs read this tensor, so it keeps its address.
                self._rows = torch.arange(max_num_seqs)
                # The last sampled token by state index.
                self._last = torch.zeros(max_num_seqs, dtype=torch.int64)
        except RuntimeError as error:
            raise ValueError(
                "max_num_batched_tokens and max_num_seqs must be of a step that fits the memory, got "
                f"{limits.max_num_batched_tokens} and {max_num_seqs}"
            ) from error
        # Allocated for the first request with a penalty.
        self._history: TokenHistory | None = None
        self._free_state_indices: list[int] = []
        self._new_state_indices = itertools.count()

    def run(self, step: Step) -> StepResult:
        """Run a step, on all ranks.

        Raises:
            RuntimeError: another rank failed; says which, and why.
        """
        for one in step.scheduled:
            if one.request.state_index < 0:
                free = self._free_state_indices
                one.request.state_index = free.pop() if free else next(self._new_state_indices)
        batch = StepBatch.of(step)
        with self._device(), self.ranks.failing_together():
            self.ranks.send(batch)
            logits = self._compute(batch)
            rows = [
                LogitsRow(one.request, one.start + one.count - one.num_drafts + drafts, drafts)
                for one in step.scheduled
                if one.samples
                for drafts in range(1 + one.num_drafts)
            ]
            tokens = self._sample(logits[: len(rows)], rows)
            # NO_TOKEN ends the request on the host. Its next step may already be launched, with any token.
            ids = tokens.clamp(min=0)
            self._keep(batch, ids)
            logprobs, top = None, num_top_tokens([row.params.logprobs for row in rows], self.model.vocabulary)
            if top is not None:
                logprobs = LogprobRows.of(logits[: len(rows)], ids, top)
            return self._to_host(step, tokens, logprobs, self._score(step, logits[len(rows) :]))

    def follow(self) -> None:
        """Run the steps that rank 0 runs, until it closes the engine.

        Raises:
            ValueError: on rank 0.
        """
        if self.ranks.is_leader:
            raise ValueError("follow() is for ranks other than 0, which schedules and closes the engine")
        with self._device(), self.ranks.failing_together():
            while (batch := self.ranks.receive()) is not None:
                self._compute(batch)
                self._keep(batch, torch.empty(len(batch.kept), dtype=torch.int64, device=self._last.device))
        self.ranks.leave()

    def release(self, request: Request) -> None:
        """Free the state of a request that has ended."""
        if request.state_index >= 0:
            self._free_state_indices.append(request.state_index)

    def release_all(self) -> None:
        """Free the state of all requests, also after an interrupted step."""
        self._free_state_indices, self._new_state_indices, self._history = [], itertools.count(), None

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model's GPU is current, which events and streams are created on. The current GPU is a
        property of a thread."""
        device = self.model.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def _ensure_state(self, count: int) -> None:
        """Allocate state for more requests. Preempted requests keep theirs, so there can be more than
        ``max_num_seqs``."""
        while len(self._last) < count:
            self._last = torch.cat((self._last, torch.zeros_like(self._last)))
        if self._history is not None:
            self._history.grow(len(self._last))

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        """Copy pages and states, then run the forward pass: logits [rows, vocabulary] of ``batch.rows``."""
        self._move_pages(batch.swap_out, self.caches, self.host_caches)
        self._move_pages(batch.swap_in, self.host_caches, self.caches)
        self._move_pages(batch.state_swap_out, self.states, self.host_states)
        self._move_pages(batch.state_swap_in, self.host_states, self.states)
        if batch.state_copies and self.states:
            copy_blocks(self.states, *to_device(batch.state_copies, self._tokens.device).unbind(1))
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
        if batch.rows == list(range(requests)):
            return logits[:requests]
        return logits[to_device(batch.rows, logits.device)]

    def _keep(self, batch: StepBatch, tokens: torch.Tensor) -> None:
        """Store each request's token, as sampled by rank 0, for its next step."""
        if not batch.kept:
            return
        self.ranks.share_tokens(tokens)
        indices = to_device(batch.kept, tokens.device)
        self._last[indices] = tokens
        if self._history is not None:
            self._history.add(indices, tokens)

    def _move_pages(self, pairs: PageCopies, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        if not pairs:
            return
        # Copied to the device once, for all layers.
        from_pages, to_pages = to_device(pairs, self._tokens.device).unbind(1)
        for source, target in zip(sources, targets, strict=True):
            swap_blocks(source, target, from_pages, to_pages)

    def _logits(self, metadata: Any, rows: torch.Tensor) -> torch.Tensor:
        metadata = self.ranks.shard(metadata, self._cache_format)
        return self.model(self._tokens[: metadata.num_tokens], [*self.caches, *self.states], metadata, rows)

    def _padded(self, size: int, metadata: Any) -> torch.Tensor:
        """Logits of a decode step of ``size`` requests, from its graph, which is captured when first needed.

        If the capture fails, this and all later steps run without graphs.
        """
        if metadata.buffers is not self._buffers_of_graphs:
            self._graphs.clear()
            self._buffers_of_graphs = metadata.buffers
        if self._use_graphs and size not in self._graphs:
            stream = torch.cuda.current_stream()
            try:
                self._graphs[size] = self._capture(size, metadata)
            except BaseException as error:
                # After a failed capture, the capture stream is still current.
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
        # With the default mode, a capture would fail the other threads' allocations.
        with _capturing, torch.cuda.graph(graph, stream=self._capture_stream, capture_error_mode="thread_local"):
            logits = self._logits(metadata, rows)
        return graph, logits

    def _sample(self, logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
        """Tokens of the rows that sample: int64 [rows]."""
        if self._history is None and any(row.params.uses_penalties for row in rows):
            self._history = TokenHistory(len(self._last), self.model.vocabulary, self._last.device)
        processed = process_logits(logits, rows, self._last, self._history)
        return sample(processed, [row.params for row in rows], [row.position for row in rows])

    def _score(self, step: Step, logits: torch.Tensor) -> LogprobRows | None:
        """Log-probabilities of the prompt tokens that the step scores; None if there are none."""
        scored = [one for one in step.scheduled if one.num_scored]
        top = num_top_tokens([one.request.sampling.prompt_logprobs for one in scored], self.model.vocabulary)
        if top is None:
            return None
        tokens = [one.request.prompt[position] for one in scored for position in one.scored]
        return LogprobRows.of(logits, to_device(tokens, logits.device), top)

    def _to_host(
        self, step: Step, tokens: torch.Tensor, logprobs: LogprobRows | None, prompt_logprobs: LogprobRows | None
    ) -> StepResult:
        if tokens.device.type != "cuda":
            return StepResult(step, tokens, logprobs, prompt_logprobs, None, self.ranks)
        tokens = tokens.to("cpu", non_blocking=True)
        logprobs, prompt_logprobs = (None if one is None else one.to_host() for one in (logprobs, prompt_logprobs))
        arrived = torch.cuda.Event()
        arrived.record()
        return StepResult(step, tokens, logprobs, prompt_logprobs, arrived, self.ranks)
