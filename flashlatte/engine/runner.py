"""A step on the device: pages moved, inputs from tokens, one forward pass, tokens sampled.

Nothing waits for the device, so the host may plan a step while the last one runs: a token that is not known on the host
yet is taken, on the device, from where its step put it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flashlatte.engine.model import Model
from flashlatte.engine.request import Request
from flashlatte.engine.sampling import SamplingParams, log_probabilities, sample
from flashlatte.engine.step import Copies, Step, Work
from flashlatte.layers import MLAMetadata, MLAMetadataBuilder
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
        model: Model,
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
        num_pages, page_size = caches[0].shape[:2]
        self._sizes = [size for size in GRAPH_SIZES if size < max_requests] + [max_requests]
        self._builder = MLAMetadataBuilder(
            page_size,
            max_requests,
            max(max_tokens, max_requests),
            max_seq_len,
            model.device,
            cache_format=cache_format,
            num_pages=num_pages,
            topk=model.topk,
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._use_graphs = graphs and model.device.type == "cuda"
        with torch.inference_mode(False), torch.device(model.device):
            self._tokens = torch.zeros(max(max_tokens, max_requests), dtype=torch.int64)
            self._last = torch.zeros(max_requests, dtype=torch.int64)
            # What a graph reads must stay where it is.
            self._rows = torch.arange(max_requests)
        self._seen: torch.Tensor | None = None
        self._places: dict[str, int] = {}

    def run(self, step: Step, params: Mapping[str, SamplingParams]) -> Sampled:
        """Execute a step."""
        self._move_pages(step.swap_out, self.caches, self.host_caches)
        self._move_pages(step.swap_in, self.host_caches, self.caches)
        for work in step.work:
            if work.request.id not in self._places:
                self._places[work.request.id] = self._free_place()
        self._put_tokens(step)
        rows, sampling = _sampled_rows(step)
        logits = self._forward(step, rows)
        chosen = [params[work.request.id] for work in sampling for _ in range(1 + work.drafts)]
        positions = _device_ints(
            [work.start + work.count - work.drafts + draft for work in sampling for draft in range(1 + work.drafts)],
            logits,
        )
        tokens = sample(logits, chosen, positions, self._seen_rows(sampling, chosen))
        self._keep(sampling, tokens)
        wanted = any(one.logprobs for one in chosen)
        logprobs = log_probabilities(logits, tokens) if wanted else None
        spans, first = {}, 0
        for work in sampling:
            spans[work.request.id] = first, 1 + work.drafts
            first += 1 + work.drafts
        return _to_host(tokens, logprobs, spans)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._places.pop(request.id, None)

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
        place = next((number for number in range(self._last.shape[0]) if number not in taken), None)
        if place is None:
            # Requests that gave way keep theirs: more places than requests that run.
            place = self._last.shape[0]
            self._last = torch.cat((self._last, torch.zeros_like(self._last)))
            if self._seen is not None:
                self._seen = torch.cat((self._seen, torch.zeros_like(self._seen)))
        return place

    def _put_tokens(self, step: Step) -> None:
        """The flat batch's token ids, those that only the device knows from where their step put them."""
        ids, unknown, places = [], [], []
        for work in step.work:
            request = work.request
            known = [*request.tokens, *request.drafts] if work.drafts else request.tokens
            for position in range(work.start, work.start + work.count):
                if position < len(known):
                    ids.append(known[position])
                else:
                    unknown.append(len(ids))
                    places.append(self._places[request.id])
                    ids.append(0)
        self._tokens[: len(ids)].copy_(torch.tensor(ids, dtype=torch.int64), non_blocking=True)
        if unknown:
            self._tokens[_device_ints(unknown, self._tokens)] = self._last[_device_ints(places, self._tokens)]

    def _metadata(self, step: Step, pad_to: int | None) -> MLAMetadata:
        starts, lengths, pages = [0], [], []
        for work in step.work:
            starts.append(starts[-1] + work.count)
            lengths.append(work.start + work.count)
            pages.append(work.request.pages)
        table = torch.full((len(pages), max(map(len, pages))), -1, dtype=torch.int32)
        for row, numbers in enumerate(pages):
            table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        return self._builder.build(starts, lengths, table, pad_requests_to=pad_to)

    def _forward(self, step: Step, rows: list[int]) -> torch.Tensor:
        requests = len(step.work)
        if self._use_graphs and all(work.count == 1 and work.samples for work in step.work):
            size = next(size for size in self._sizes if size >= requests)
            metadata = self._metadata(step, size)
            logits = self._replay(size, metadata)
            if logits is not None:
                return logits[:requests]
        metadata = self._metadata(step, None)
        tokens = self._tokens[: metadata.num_tokens]
        return self.model(tokens, self.caches, metadata, _device_ints(rows, self._tokens))

    def _replay(self, size: int, metadata: MLAMetadata) -> torch.Tensor | None:
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

    def _capture(self, size: int, metadata: MLAMetadata) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        tokens, rows = self._tokens[:size], self._rows[:size]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.model(tokens, self.caches, metadata, rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.model(tokens, self.caches, metadata, rows)
        return graph, logits

    def _keep(self, sampling: Sequence[Work], tokens: torch.Tensor) -> None:
        """Put each request's sampled token where its next step finds it. Drafts are verified on the host first."""
        if not sampling or any(work.drafts for work in sampling):
            return
        places = _device_ints([self._places[work.request.id] for work in sampling], tokens)
        self._last[places] = tokens
        if self._seen is not None:
            self._seen[places, tokens] = True

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


def _sampled_rows(step: Step) -> tuple[list[int], list[Work]]:
    """Rows of the flat batch whose logits are sampled, and the work that they belong to."""
    rows, sampling, begin = [], [], 0
    for work in step.work:
        begin += work.count
        if work.samples:
            rows += range(begin - 1 - work.drafts, begin)
            sampling.append(work)
    return rows, sampling


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
