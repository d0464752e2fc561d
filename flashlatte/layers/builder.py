"""Builds ``MLAMetadata`` from a batch's lengths and block tables, in device buffers with fixed addresses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from flashlatte.layers.absorbed import MAX_ABSORBED_QUERIES
from flashlatte.layers.metadata import (
    BuilderBuffers,
    DecodePart,
    MLAMetadata,
    PrefillPart,
    needs_gathered_rows,
    plan_chunks,
    request_ids,
    uses_sparse_decode,
    window_slots,
)
from flashlatte.layers.selection import GATHER_TOKENS, LOGIT_BYTES, IndexSelection, plan_selection
from flashlatte.ops.index_convert import to_cache_indices
from flashlatte.runtime import checks
from flashlatte.runtime.transfer import to_device

WORKSPACE_TOKENS = 4096

IntVector = Sequence[int] | torch.Tensor


class MLAMetadataBuilder:
    """Builds the metadata of each step of an engine.

    The tensors of decode parts, positions and slots are buffers of this object, which ``build`` overwrites. A CUDA
    graph captured with the metadata of a decode step can be replayed for a later step with the same numbers of
    requests and tokens, after ``build`` was called for that step. Only the metadata of the last ``build`` is valid; a
    layer raises for an earlier one.

    Args:
        page_size: tokens in a page.
        max_requests, max_tokens: limits of a step.
        max_seq_len: limit on the tokens of a request.
        device: device of the cache.
        cache_format: format of the cache; ``v32`` and ``model1`` need the slots of every token.
        num_pages: pages of the cache; ``build`` then checks pages and slots against it. If None, a layer's forward
            pass checks them.
        workspace_tokens: cached tokens that prefill attends to at a time. A layer allocates their rows and the keys
            and values of all its heads: (nope + rope) + (nope + v) elements a head and token.
        max_decode_queries: the leading requests with at most this many new tokens form the decode part.
        topk: maximum number of tokens that the layers' indexers select; None for layers without an indexer.
        logit_bytes: limit on the index logits allocated at once (at least those of one token); only with ``topk``.
        gather_tokens: limit on the cached tokens that prefill gathers at once: their index keys, and their rows if
            the cache is quantized; only with ``topk``.
        windows: widths of the layers' sliding windows.

    Raises:
        TypeError, ValueError: a size below 1, an unknown cache format or device.
    """

    def __init__(
        self,
        page_size: int,
        max_requests: int,
        max_tokens: int,
        max_seq_len: int,
        device: torch.device | str,
        *,
        cache_format: str = "bf16",
        num_pages: int | None = None,
        workspace_tokens: int = WORKSPACE_TOKENS,
        max_decode_queries: int = MAX_ABSORBED_QUERIES,
        topk: int | None = None,
        logit_bytes: int = LOGIT_BYTES,
        gather_tokens: int = GATHER_TOKENS,
        windows: Sequence[int] = (),
    ) -> None:
        self.page_size = checks.positive_int("page_size", page_size)
        self.max_requests = checks.positive_int("max_requests", max_requests)
        self.max_tokens = checks.positive_int("max_tokens", max_tokens)
        self.max_seq_len = checks.positive_int("max_seq_len", max_seq_len)
        self.workspace_tokens = checks.positive_int("workspace_tokens", workspace_tokens)
        self.num_pages = None if num_pages is None else checks.positive_int("num_pages", num_pages)
        self.max_decode_queries = checks.positive_int("max_decode_queries", max_decode_queries, or_zero=True)
        self.max_pages = -(-max_seq_len // page_size)
        self.topk = None if topk is None else checks.positive_int("topk", topk)
        self.logit_bytes = checks.positive_int("logit_bytes", logit_bytes)
        self.gather_tokens = checks.positive_int("gather_tokens", gather_tokens)
        self._needs_gathered_rows = needs_gathered_rows(cache_format)
        selects = uses_sparse_decode(cache_format)
        # If all tokens are selected, layers attend as if they had no indexer.
        selection_width = 0 if topk is None or topk >= max_seq_len else topk
        self._buffers = BuilderBuffers()
        # Tensors created in inference mode cannot be overwritten outside of it.
        buffer_device = checks.device("device", device)
        if buffer_device is None:
            raise TypeError("device must be a torch.device or its name, got None")
        with torch.inference_mode(False), buffer_device:
            self._positions = torch.zeros(max_tokens, dtype=torch.int64)
            self._slots = torch.full((max_tokens,), -1, dtype=torch.int64)
            self._table = torch.zeros(max_requests, self.max_pages, dtype=torch.int32)
            self._seq_lens = torch.zeros(max_requests, dtype=torch.int32)
            self._pad_index = torch.zeros(max_requests * max(max_decode_queries, 1), dtype=torch.int64)
            self._unpad_index = torch.zeros(max_tokens, dtype=torch.int64)
            self._visible_lens = torch.zeros(max_requests * max(max_decode_queries, 1), dtype=torch.int32)
            self._selected = (
                torch.full((max_tokens, selection_width), -1, dtype=torch.int32) if selection_width else None
            )
            width = self.max_pages * page_size if selects and not selection_width else 0
            self._all_slots = torch.zeros(max_requests, width, dtype=torch.int32)
            sizes = [checks.positive_int("windows", window) for window in windows]
            self._windows = {size: torch.full((max_tokens, size), -1, dtype=torch.int32) for size in sizes}

    @property
    def device(self) -> torch.device:
        return self._table.device

    def build(
        self,
        query_start_loc: IntVector,
        seq_lens: IntVector,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
        *,
        pad_requests_to: int | None = None,
        pad_queries: int | None = None,
    ) -> MLAMetadata:
        """Build the metadata of a step of n requests. A request may have no new token, and n may be 0.

        Args:
            query_start_loc: n + 1 ints, the offset of each request's new tokens in the flat batch. Decode requests
                come first.
            seq_lens: n ints, tokens of each request including the new ones. Both are read on the host: passing a GPU
                tensor synchronizes.
            block_table: int32 or int64 [n, pages], the pages of each request in order. On the CPU, the used entries
                are checked.
            slot_mapping: int32 or int64 [tokens], the slot of each new token; below 0 the token is not stored. By
                default, slots follow from ``block_table``. On the CPU, slots are checked. Every token of a prefill
                that an indexer selects from needs a slot, since it is read from the cache.
            pad_requests_to: pad the step to this many requests, for a captured graph of that size. Added requests are
                empty, with the decode part's number of tokens and slots of -1. Only for steps of decode requests with
                equal numbers of tokens, or steps without requests.
            pad_queries: tokens of each added request in a step without requests; 1 if None.

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape, or beyond the builder's limits; inconsistent
                arguments.
        """
        starts, lengths = _ints("query_start_loc", query_start_loc), _ints("seq_lens", seq_lens)
        query_lens = self._check_lengths(starts, lengths)
        required_pages = self._check_block_table(block_table, lengths)
        tokens, requests = starts[-1], len(lengths)
        decoding = self._decode_requests(query_lens)
        pads, queries = self._padding(pad_requests_to, pad_queries, query_lens, decoding)
        spans = [range(length - count, length) for count, length in zip(query_lens, lengths, strict=True)]
        # On the CPU whatever the default device is: copying a list to a GPU would synchronize.
        positions = torch.tensor(list(itertools.chain.from_iterable(spans)), dtype=torch.int64, device="cpu")
        table = block_table[:, : self.max_pages] if requests else self._table[:0]
        selects_in_prefill = self._selects_in_prefill(query_lens, lengths, decoding)
        if slot_mapping is None:
            slot_mapping = self._slots_of(positions, query_lens, table)
        else:
            required_pages = max(required_pages, self._check_slots(slot_mapping, tokens))
            if (
                selects_in_prefill
                and slot_mapping.device.type == "cpu"
                and (slot_mapping[starts[decoding] :] < 0).any()
            ):
                raise ValueError(
                    "slot_mapping must have a slot for every token of a prefill with an indexer, got a negative one"
                )
        # A request without new tokens has no queries.
        visible = [length if count else 0 for count, length in zip(query_lens, lengths, strict=True)]
        total = tokens + pads * queries
        self._buffers.num_builds += 1
        self._copy_in(self._table[:requests, : table.shape[1]], table)
        self._copy_in(self._positions[:total], nn.functional.pad(positions, (0, total - tokens)))
        self._copy_in(self._slots[:total], nn.functional.pad(slot_mapping, (0, total - tokens), value=-1))
        self._copy_in(self._seq_lens[: requests + pads], visible + [0] * pads)
        decode_lens = query_lens[:decoding] + pads * [queries]
        selection = self._selection(query_lens, lengths, decoding, total, selects_in_prefill)
        self._fill_windows(query_lens, tokens, total)
        return MLAMetadata(
            num_tokens=total,
            num_decode_tokens=starts[decoding] + total - tokens,
            max_seq_len=max(lengths, default=0),
            page_size=self.page_size,
            num_pages=self.num_pages,
            positions=self._positions[:total],
            slot_mapping=self._slots[:total],
            decode=self._decode_part(decode_lens) if any(decode_lens) else None,
            prefill=self._prefill_part(query_lens, lengths, decoding, selects_in_prefill)
            if decoding < requests
            else None,
            selection=selection,
            windows={width: slots[:total] for width, slots in self._windows.items()},
            buffers=self._buffers,
            build_index=self._buffers.num_builds,
            required_pages=required_pages,
        )

    def _slots_of(self, positions: torch.Tensor, query_lens: list[int], table: torch.Tensor) -> torch.Tensor:
        """The slots of new tokens, on the table's device: int64 [tokens]."""
        positions, ids = to_device(positions, table.device), to_device(request_ids(query_lens), table.device)
        return to_cache_indices(positions, table.contiguous(), self.page_size, request_ids=ids, dtype=torch.int64)

    def _fill_windows(self, query_lens: list[int], tokens: int, total: int) -> None:
        if self._windows and total:
            ids = to_device(nn.functional.pad(request_ids(query_lens), (0, total - tokens), value=-1), self.device)
            for width, slots in self._windows.items():
                slots[:total] = window_slots(self._positions[:total], ids, self._table, self.page_size, width)

    def _copy_in(self, buffer: torch.Tensor, values: Sequence[int] | torch.Tensor) -> None:
        """Copy values into a buffer, in stream order and without synchronizing."""
        if buffer.numel():
            buffer.copy_(to_device(values, buffer.device, buffer.dtype))

    def _selects_in_prefill(self, query_lens: list[int], lengths: list[int], decoding: int) -> bool:
        """Whether a prefill request has more tokens than an indexer selects."""
        if self.topk is None or self._selected is None:
            return False
        prefills = zip(query_lens[decoding:], lengths[decoding:], strict=True)
        return max((length for count, length in prefills if count), default=0) > self.topk

    def _selection(
        self, query_lens: list[int], lengths: list[int], decoding: int, total: int, in_prefill: bool
    ) -> IndexSelection | None:
        if self.topk is None:
            return None
        chunks = None
        if in_prefill:
            first, lengths = sum(query_lens[:decoding]), lengths[decoding:]
            chunks = plan_selection(
                query_lens[decoding:],
                lengths,
                self._positions[first:total],
                self._table[decoding : decoding + len(lengths)],
                use_gathered_rows=self._needs_gathered_rows,
                gather_tokens=self.gather_tokens,
            )
        slots = None if self._selected is None else self._selected[:total]
        return IndexSelection(self.topk, slots, chunks, self.logit_bytes)

    def _decode_part(self, query_lens: list[int]) -> DecodePart:
        requests, queries = len(query_lens), max(query_lens)
        table, seq_lens = self._table[:requests], self._seq_lens[:requests]
        pad_index = unpad_index = all_slots = visible_lens = None
        if min(query_lens) < queries:
            pad_index, unpad_index = self._ragged(query_lens, queries)
        if self._all_slots.shape[1]:
            position = torch.arange(self._all_slots.shape[1], device=self.device)
            all_slots = self._all_slots[:requests]
            all_slots.copy_(to_cache_indices(position.expand(requests, -1), table, self.page_size))
            visible_lens = self._visible_lens[: requests * queries].view(requests, queries)
            later = torch.arange(queries - 1, -1, -1, device=self.device)
            visible_lens.copy_((seq_lens[:, None] - later).clamp(min=0))
        return DecodePart(queries, table, seq_lens, pad_index, unpad_index, all_slots, visible_lens)

    def _ragged(self, query_lens: list[int], queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``DecodePart.pad_index`` and ``unpad_index``."""
        pad_index, unpad_index, token = [], [], 0
        last = sum(query_lens) - 1
        for request, count in enumerate(query_lens):
            pad_index += [min(token, last)] * (queries - count) + list(range(token, token + count))
            unpad_index += range((request + 1) * queries - count, (request + 1) * queries)
            token += count
        self._copy_in(self._pad_index[: len(pad_index)], pad_index)
        self._copy_in(self._unpad_index[:token], unpad_index)
        return self._pad_index[: len(pad_index)], self._unpad_index[:token]

    def _prefill_part(self, query_lens: list[int], lengths: list[int], decoding: int, sparse: bool) -> PrefillPart:
        query_lens, lengths = query_lens[decoding:], lengths[decoding:]
        contexts = [length - count if count else 0 for length, count in zip(lengths, query_lens, strict=True)]
        starts = [0, *itertools.accumulate(query_lens)]
        table = self._table[decoding : decoding + len(lengths)]
        return PrefillPart(
            to_device(starts, self.device, torch.int32),
            max(query_lens),
            plan_chunks(query_lens, contexts, table, self.workspace_tokens) if any(contexts) and not sparse else (),
        )

    def _decode_requests(self, query_lens: list[int]) -> int:
        for index, count in enumerate(query_lens):
            if count > self.max_decode_queries:
                return index
        return len(query_lens)

    def _padding(
        self, wanted: int | None, pad_queries: int | None, query_lens: list[int], decoding: int
    ) -> tuple[int, int]:
        """Number of requests to add, and tokens of each."""
        requests = len(query_lens)
        if wanted is None:
            return 0, 0
        queries = query_lens[0] if query_lens else 1
        if pad_queries is not None:
            if query_lens and pad_queries != queries:
                raise ValueError(f"pad_queries must be {queries} like the step's requests, or None, got {pad_queries}")
            queries = checks.positive_int("pad_queries", pad_queries)
        if checks.positive_int("pad_requests_to", wanted) < requests or wanted > self.max_requests:
            raise ValueError(f"pad_requests_to must be from {requests} to {self.max_requests}, got {wanted}")
        if decoding < requests or len(set(query_lens)) > 1 or queries == 0:
            raise ValueError("pad_requests_to needs a step of decode requests with equal numbers of tokens")
        if queries > self.max_decode_queries:
            raise ValueError(f"pad_queries must be at most max_decode_queries {self.max_decode_queries}, got {queries}")
        if wanted * queries > self.max_tokens:
            raise ValueError(
                f"pad_requests_to {wanted} makes {wanted * queries} tokens, max_tokens is {self.max_tokens}"
            )
        return wanted - requests, queries

    def _check_lengths(self, starts: list[int], lengths: list[int]) -> list[int]:
        """Tokens of each request."""
        if len(lengths) > self.max_requests:
            raise ValueError(
                f"seq_lens must have at most {self.max_requests} (max_requests) entries, got {len(lengths)}"
            )
        if len(starts) != len(lengths) + 1:
            raise ValueError(
                f"query_start_loc must have {len(lengths) + 1} entries, one more than seq_lens, got {len(starts)}"
            )
        if starts[0] != 0:
            raise ValueError(f"query_start_loc must begin with 0, got {starts[0]}")
        query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
        for request, (count, length) in enumerate(zip(query_lens, lengths, strict=True)):
            if count < 0:
                raise ValueError(
                    f"query_start_loc must not decrease, got {starts[request]} before {starts[request + 1]} "
                    f"(request {request})"
                )
            if length < count:
                raise ValueError(
                    f"seq_lens must include the new tokens: request {request} has {count} new tokens and "
                    f"seq_lens {length}"
                )
            if length > self.max_seq_len:
                raise ValueError(
                    f"seq_lens must be at most max_seq_len {self.max_seq_len}, request {request} has {length}"
                )
        if starts[-1] > self.max_tokens:
            raise ValueError(f"query_start_loc must end with at most max_tokens {self.max_tokens}, got {starts[-1]}")
        return query_lens

    def _check_block_table(self, block_table: torch.Tensor, lengths: list[int]) -> int:
        """Number of pages that the cache must have; 0 if the table is not on the CPU."""
        if not lengths:
            return 0
        checks.indices("block_table", block_table, (len(lengths), "pages"))
        needed = [-(-length // self.page_size) for length in lengths]
        if max(needed) > block_table.shape[1]:
            request = needed.index(max(needed))
            raise ValueError(
                f"block_table must have {max(needed)} pages for the {lengths[request]} tokens of request {request}, "
                f"got {block_table.shape[1]}"
            )
        if block_table.device.type != "cpu" or not max(needed):
            return 0
        columns = torch.arange(block_table.shape[1], device="cpu")
        is_used = columns < torch.tensor(needed, device="cpu")[:, None]
        lowest, highest = map(int, block_table[is_used].aminmax())
        max_page = highest if self.num_pages is None else self.num_pages - 1
        if lowest < 0 or highest > max_page:
            request, column = (is_used & ((block_table < 0) | (block_table > max_page))).nonzero()[0].tolist()
            raise ValueError(
                f"block_table must hold pages from 0{'' if self.num_pages is None else f' to {max_page}'}, request "
                f"{request} has {int(block_table[request, column])} at {column}"
            )
        return highest + 1

    def _check_slots(self, slot_mapping: torch.Tensor, tokens: int) -> int:
        """Number of pages that the cache must have; 0 if the slots are not on the CPU."""
        checks.indices("slot_mapping", slot_mapping, (tokens,))
        if slot_mapping.device.type != "cpu" or not tokens:
            return 0
        highest = int(slot_mapping.max())
        if self.num_pages is not None and highest >= self.num_pages * self.page_size:
            slots = self.num_pages * self.page_size
            token = int((slot_mapping >= slots).nonzero()[0])
            raise ValueError(
                f"slot_mapping must hold slots of the cache, below {slots}, or negative ones for tokens that are not "
                f"stored, got {int(slot_mapping[token])} for token {token}"
            )
        return highest // self.page_size + 1


def _ints(name: str, values: IntVector) -> list[int]:
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in checks.INDEX_DTYPES:
            raise TypeError(
                f"{name} must be ints or a 1-D int32 or int64 tensor, got {values.dtype} {list(values.shape)}"
            )
        return values.tolist()
    checks.instance(name, values, Sequence)
    result = list(values)
    for value in result:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must hold ints, got {value!r}")
    return result
