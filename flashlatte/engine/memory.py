"""Memory of the caches: how many pages fit, and what to change where they do not."""

from __future__ import annotations

import os

import torch

from flashlatte.engine.model import AnyModel
from flashlatte.kv_cache import FORMAT_NAMES, get_format

# Of a GPU's free memory, what the cache takes when ``num_pages`` is not given; a cache on the CPU has so many tokens.
CACHE_SHARE, CPU_TOKENS = 0.8, 16384


def default_pages(model: AnyModel, cache_format: str, page_size: int) -> int:
    """Pages of a cache whose size nobody chose; the same on all ranks."""
    if model.device.type != "cuda":
        return -(-CPU_TOKENS // page_size)
    pages = max(_pages_that_fit(model, cache_format, page_size, model.device), 1)
    return pages if model.ranks is None else model.ranks.least(pages)


def allocate(
    model: AnyModel, cache_format: str, num_pages: int, page_size: int, *, on_host: bool = False
) -> list[torch.Tensor]:
    """The caches of all layers, on the model's device, or their copies ``on_host``.

    Raises:
        ValueError: they do not fit; says how many pages do.
    """
    device = torch.device("cpu") if on_host else model.device
    # Asked before the attempt, whose memory may not be free again when it has failed.
    fit = _pages_that_fit(model, cache_format, page_size, device)
    try:
        return model.allocate(cache_format, num_pages, page_size, pinned=on_host)
    except RuntimeError as error:
        name = "host_pages" if on_host else "num_pages"
        memory = "the host's" if device.type == "cpu" else "the GPU's"
        raise ValueError(
            f"{name} must fit {memory} free memory: of {num_pages} pages of {page_size} tokens about {fit} do"
        ) from error


def plain_format(dtype: torch.dtype) -> str:
    """The format that keeps rows as they are."""
    for name in FORMAT_NAMES:
        layout = get_format(name)
        if layout.plain and layout.record_dtype == dtype:
            return name
    raise ValueError(f"cache_format must be given for a model in {dtype}")


def _pages_that_fit(model: AnyModel, cache_format: str, page_size: int, device: torch.device) -> int:
    return int(_free_bytes(device) * CACHE_SHARE) // model.page_bytes(cache_format, page_size)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
