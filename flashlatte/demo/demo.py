"""The demo: compares stock transformers with FlashLatte's engine, as a table and an exit code."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashlatte.demo.model import FAMILIES, ByteTokenizer
from flashlatte.kv_cache.registry import DEEPSEEK_V4_FORMAT

if TYPE_CHECKING:
    from rich.console import Console

    from flashlatte.demo.runs import Run
    from flashlatte.engine.paged import PagedModel

OK, CHECK_FAILED, MISTAKE = 0, 1, 2

DEFAULT_PROMPT = Path(__file__).with_name("prompt.txt")
MAX_PROMPT_BYTES = 2048
MIN_NEW_TOKENS, MAX_NEW_TOKENS = 64, 1024


@dataclass(frozen=True)
class CacheChoice:
    """A row of the table.

    Attributes:
        cache_format: format of the paged cache.
        meaning: description of the format.
        logit_bound: maximum accepted difference of a logit from that of stock attention.
        expanded_itemsize: bytes per element of the expanded cache that this one is compared with.
        same_tokens: whether every token must equal that of stock attention.
        min_overlap: minimum accepted overlap of the indexer's selection with that of stock attention.
    """

    cache_format: str
    meaning: str
    logit_bound: float
    expanded_itemsize: int
    same_tokens: bool = False
    min_overlap: float = 0.0


# The standard deviation of the models' logits is 2. Measured with the demo's prompt: differences of 3e-5, 0.15, 1.05.
CHOICES = (
    CacheChoice("fp32", "exact", 0.001, 4, same_tokens=True),
    CacheChoice("bf16", "16 bits", 0.3, 2),
    CacheChoice("v32", "8 bits", 2.0, 2),
)
# An indexer with rounded scores selects some other tokens. With random weights every token matters, so selections are
# compared instead of logits, except in fp32. Measured: 98.1% and 90.3%.
INDEXED_CHOICES = (
    CacheChoice("fp32", "exact", 0.001, 4, same_tokens=True, min_overlap=1.0),
    CacheChoice("bf16", "16 bits", math.inf, 2, min_overlap=0.97),
    CacheChoice("v32", "8 bits", math.inf, 2, min_overlap=0.88),
)
# The indexer selects all groups, so selections are not compared.
V4_CHOICES = (
    CacheChoice("fp32", "exact", 0.001, 4, same_tokens=True),
    CacheChoice(DEEPSEEK_V4_FORMAT, "8 bits", 2.0, 2),
)
CHOICES_OF = {"v3": CHOICES, "v3.2": INDEXED_CHOICES, "v4": V4_CHOICES}


@dataclass(frozen=True)
class Row:
    """The results of one cache format. ``overlap``: fraction of stock attention's selected tokens that are selected."""

    choice: CacheChoice
    run: Run
    same_tokens: int
    logit_difference: float
    overlap: float | None = None

    @property
    def passed(self) -> bool:
        same = self.same_tokens == len(self.run.tokens)
        if self.overlap is not None and self.overlap < self.choice.min_overlap:
            return False
        return self.logit_difference <= self.choice.logit_bound and (same or not self.choice.same_tokens)


class Mistake(Exception):
    """Arguments that are not accepted, or a missing package. The message gives the reason."""


def run_demo(
    prompt_file: str | Path | None = None,
    new_tokens: int = 64,
    device: str | None = None,
    model: str = "v3",
    *,
    prompt: str | None = None,
) -> int:
    """Generate with a small DeepSeek model in stock transformers and in FlashLatte's engine, and print a comparison.

    Args:
        prompt_file: file with a text of at most 2048 bytes; None: one that the package contains.
        new_tokens: tokens to generate, 64 to 1024.
        device: torch device; None: a GPU if there is one, else the CPU.
        model: "v3", "v3.2" (with an indexer) or "v4" (windows and compressed groups).
        prompt: the text, instead of a file.

    Returns:
        An exit code: 0 if every comparison is within its bound, 1 if one is not, 2 if an argument is not accepted or
        transformers or rich is missing. For 2, a line on stderr gives the reason.
    """
    try:
        if prompt is None:
            path = DEFAULT_PROMPT if prompt_file is None else Path(prompt_file)
            text, source = _read(path), path.name
        else:
            text, source = prompt.encode(errors="surrogateescape"), "the prompt"
        return _run(text, source, new_tokens, device, model)
    except Mistake as mistake:
        print(f"flashlatte demo: {mistake}", file=sys.stderr)
        return MISTAKE


def _run(text: bytes, source: str, new_tokens: int, device: str | None, name: str) -> int:
    _check_extras()
    if not text.strip():
        raise Mistake(f"{source} is empty")
    if len(text) > MAX_PROMPT_BYTES:
        raise Mistake(f"{source} must have at most {MAX_PROMPT_BYTES} bytes, and has {len(text)}")
    if not MIN_NEW_TOKENS <= new_tokens <= MAX_NEW_TOKENS:
        raise Mistake(f"--new-tokens must be from {MIN_NEW_TOKENS} to {MAX_NEW_TOKENS}, got {new_tokens}")
    if name not in FAMILIES:
        raise Mistake(f"--model must be one of {', '.join(FAMILIES)}, got {name}")
    where = _device(device)

    from rich.console import Console

    from flashlatte.demo.model import load_model
    from flashlatte.engine.model_factory import create_model

    console = Console()
    console.print(
        f"A small {FAMILIES[name]} with random weights, in float32 on {where}, continues {source} "
        f"({len(text)} bytes, a token each) by {new_tokens} tokens: with stock transformers, and with "
        f"FlashLatte's engine over {len(CHOICES_OF[name])} formats of its cache.",
        highlight=False,
    )
    model = load_model(where, name)
    served = create_model(model)
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(text)
    with _one_thread() if where.type == "cpu" else contextlib.nullcontext():
        stock, rows = _compare(console, name, model, served, prompt, new_tokens)

    written = tokenizer.decode(stock.tokens.tolist()).decode("ascii")
    console.print(f"Stock attention wrote, as random weights do: {written}", markup=False, highlight=False)
    console.print(_table(name, model.config, served, stock, rows))
    console.print(_explanation(name, model.config), highlight=False)
    for row in rows:
        if not row.passed:
            console.print(_failure(row), style="bold red")
    if not all(row.passed for row in rows):
        return CHECK_FAILED
    console.print("All checks passed: the same text from the exact cache, and small differences where a cache rounds.")
    return OK


def _check_extras() -> None:
    try:
        import rich  # noqa: F401
    except ImportError:
        raise Mistake("this needs rich and transformers: pip install 'flashlatte[transformers]'") from None
    from flashlatte.integrations.transformers import check_transformers

    try:
        check_transformers()
    except ImportError as error:
        raise Mistake(str(error)) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Mistake(f"the prompt file cannot be read: {path}: {error.strerror}") from None


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise Mistake(f"--device must be cuda or cpu, got {name!r}, which cannot be used: {reason}") from None
    return device


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: a decode step of the small model gains little from more, and loses much if cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compare(
    console: Console, name: str, model: Any, served: Any, prompt: list[int], new_tokens: int
) -> tuple[Run, list[Row]]:
    """Run stock transformers, then the engine with each cache format, with a progress bar; returns all runs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flashlatte.demo import runs

    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    unreadable = ByteTokenizer.unreadable
    with Progress(*columns, console=console) as progress:

        def advance() -> None:
            progress.advance(task)

        def recording(
            record: Callable[[Any], AbstractContextManager[list[frozenset[int]]]], model: Any
        ) -> AbstractContextManager[list[frozenset[int]]]:
            return record(model) if name == "v3.2" else contextlib.nullcontext([])

        task = progress.add_task("stock transformers", total=2 * new_tokens)
        stock = runs.generate_by_transformers(model, prompt, new_tokens, unreadable, advance)
        with recording(runs.choices_of_transformers, model) as wanted:
            expected = runs.logits_of_transformers(model, prompt, stock.tokens, advance)
        rows = []
        for choice in CHOICES_OF[name]:
            task = progress.add_task(f"FlashLatte, {choice.cache_format} cache", total=2 * new_tokens)
            run = runs.generate_by_engine(served, choice.cache_format, prompt, new_tokens, unreadable, advance)
            with recording(runs.choices_of_engine, served) as made:
                got = runs.logits_of_engine(served, choice.cache_format, prompt, stock.tokens, advance)
            same = int((run.tokens == stock.tokens).sum())
            shared = runs.overlap(made, wanted) if wanted else None
            rows.append(Row(choice, run, same, (got - expected).abs().max().item(), shared))
    return stock, rows


def _token_bytes(served: PagedModel, cache_format: str) -> int:
    """Bytes per token in the caches of all layers."""
    layouts = served.layouts(cache_format, served.page_size)
    return round(sum(layout.bytes_per_token * rows for layout, rows in layouts) / served.page_size)


def _table(name: str, config: Any, served: PagedModel, stock: Run, rows: list[Row]) -> Any:
    from rich.table import Table

    table = Table(title=f"{FAMILIES[name]}: stock attention, and FlashLatte's by cache format")
    table.add_column("attention,\ncache")
    table.add_column("bytes\nper token", justify="right")
    table.add_column("of keys\nand values", justify="right")
    table.add_column("compared with\nstock attention")
    table.add_column("tokens/s", justify="right")
    table.add_row("stock", "", "", "", f"{stock.tokens_per_second:.1f}")
    for row in rows:
        cache_bytes = _token_bytes(served, row.choice.cache_format)
        expanded = config.num_hidden_layers * _expanded_elements(name, config) * row.choice.expanded_itemsize
        table.add_row(
            f"{row.choice.cache_format}, {row.choice.meaning}",
            f"{cache_bytes}",
            f"1/{expanded / cache_bytes:.1f}",
            f"{'ok' if row.passed else 'FAILED'}: {_comparison(row)}",
            f"{row.run.tokens_per_second:.1f}",
        )
    return table


def _comparison(row: Row) -> str:
    if row.choice.same_tokens:
        text = f"{row.same_tokens} of {len(row.run.tokens)} the same"
        return text if row.overlap is None else f"{text}, {row.overlap:.1%} of the selection"
    return f"logits within {row.logit_difference:.2g}" if row.overlap is None else f"{row.overlap:.1%} of the selection"


def _explanation(name: str, config: Any) -> str:
    rounding = [choice for choice in CHOICES_OF[name] if not choice.same_tokens]
    if name == "v3.2":
        minimum = " and ".join(f"{choice.min_overlap:.0%} with {choice.cache_format}" for choice in rounding)
        rounded = (
            f"Each layer's indexer selects {config.index_topk} tokens for a query, by cached index keys. Rounded keys "
            "select some other tokens, and with random weights every token matters. So the demo compares the "
            f"selections along stock attention's text: at least {minimum} must be the same."
        )
    else:
        allowed = " and ".join(f"{choice.logit_bound:g} with {choice.cache_format}" for choice in rounding)
        rounded = (
            "With a rounded cache the text differs as soon as two tokens are almost equally likely. So the demo "
            f"compares logits along stock attention's text. Their standard deviation is 2; allowed: {allowed}."
        )
    stored = "its key, and its share of the groups' keys and index keys" if name == "v4" else "its cache entries"
    return (
        f"Bytes per token: {stored} in all {config.num_hidden_layers} layers. Keys and values: compared with a cache "
        f"of the keys and values of every head, {_expanded_elements(name, config)} elements per layer, of 4 bytes for "
        f"fp32 and 2 bytes for the other formats. {rounded}"
    )


def _expanded_elements(name: str, config: Any) -> int:
    """Elements per token and layer of a cache of the keys and values of every head."""
    if name == "v4":
        return config.num_attention_heads * 2 * config.head_dim
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return config.num_attention_heads * (key + value)


def _failure(row: Row) -> str:
    if row.logit_difference > row.choice.logit_bound:
        return (
            f"FAILED: with the {row.choice.cache_format} cache a logit differs by {row.logit_difference:.3g}, "
            f"and the bound is {row.choice.logit_bound:g}"
        )
    if row.overlap is not None and row.overlap < row.choice.min_overlap:
        return (
            f"FAILED: with the {row.choice.cache_format} cache the indexers select {row.overlap:.1%} of stock "
            f"attention's tokens, and the minimum is {row.choice.min_overlap:.0%}"
        )
    return f"FAILED: with the {row.choice.cache_format} cache not every token is stock attention's"
