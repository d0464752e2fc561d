"""Calls of a workload in several ways; each result is compared bitwise with the first call's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from flashlatte.bench import timing
from flashlatte.bench.workloads import Workload, WrongResult
from flashlatte.bench.workloads.base import Results

# Ways to issue repeated calls.
WAYS = ("burst", "streams", "graph")
CALLS_IN_BURST, CALLS_IN_GRAPH, REPLAYS = 12, 2, 6
# Maximum attempts at a correct first call; maximum number of differing results per workload that are compared with the
# reference.
FIRST_CALLS, CHECKED = 3, 3

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Caller:
    """Calls one workload repeatedly.

    Args:
        workload: its first call, made here, is compared with the reference.
        backend: the one that serves it.
        streams: for calls at the same time; none on a CPU.

    Attributes:
        calls: their number.
        faults: a message for each result that differed, with the way of the call.
    """

    def __init__(self, workload: Workload, backend: str, streams: list[torch.cuda.Stream]) -> None:
        self.workload, self.backend, self.streams = workload, backend, streams
        self.calls = 0
        self.faults: list[str] = []
        self._replay: Callable[[], Results] | None = None
        self._expected = self._first_bits()

    def until(self, stop: float, ways: tuple[str, ...]) -> None:
        """Call in these of ``WAYS``, alternately, until ``time.time()`` reaches ``stop``, each at least once."""
        known = {"burst": self.in_a_row}
        if self.workload.overlaps and self.streams:
            known["streams"] = self.overlapped
        if self.workload.captures and self.workload.call.device.type == "cuda":
            known["graph"] = self.replayed
        rounds = [known[way] for way in ways if way in known]
        number = 0
        while rounds and (number < len(rounds) or time.time() < stop):
            rounds[number % len(rounds)]()
            number += 1

    def in_a_row(self) -> None:
        """One call after another; the last is compared."""
        for _ in range(CALLS_IN_BURST - 1):
            self.workload.run(self.backend)
        self.calls += CALLS_IN_BURST - 1
        self._compare("a burst", self._poisoned_call())

    def overlapped(self) -> None:
        """A call on each stream at the same time; all are compared."""
        current = torch.cuda.current_stream()
        outputs = [self.workload.poisoned_outputs() for _ in self.streams]
        results: list[Results] = []
        for stream, into in zip(self.streams, outputs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(self.workload.run(self.backend, into))
        for stream in self.streams:
            current.wait_stream(stream)
        self.calls += len(results)
        for found in results:
            self._compare("streams at once", found)

    def replayed(self) -> None:
        """Replays of a CUDA graph; the last is compared."""
        if self._replay is None:
            self._replay = self._captured()
        self.calls += REPLAYS * CALLS_IN_GRAPH
        self._compare("a CUDA graph", self._replay())

    def _captured(self) -> Callable[[], Results]:
        outputs = self.workload.poisoned_outputs()
        graph, results = timing.capture(lambda: self.workload.run(self.backend, outputs), CALLS_IN_GRAPH)

        def replay() -> Results:
            for result in results.values():
                result.fill_(torch.nan if result.is_floating_point() else torch.iinfo(result.dtype).max)
            # Also resets tensors that a call writes in place.
            poison = self.workload.poisoned_outputs()
            for name, output in outputs.items():
                output.copy_(poison[name])
            for _ in range(REPLAYS):
                graph.replay()
            return results

        return replay

    def _poisoned_call(self) -> Results:
        """A call whose outputs have the same poisoned contents before each call."""
        self.calls += 1
        return self.workload.run(self.backend, self.workload.poisoned_outputs())

    def _first_bits(self) -> Results:
        for _ in range(FIRST_CALLS):
            results = self._poisoned_call()
            expected = self._bits(results)
            wrong = self._wrong(results)
            if wrong is None:
                break
            self.faults.append(f"the first call: {wrong}")
        return expected

    def _bits(self, results: Results) -> Results:
        """Copies of the results as integers, because the next call may overwrite the results."""
        defined = self.workload.defined(results)
        return {name: x.contiguous().view(INTEGERS[x.dtype.itemsize]).clone() for name, x in defined.items()}

    def _wrong(self, results: Results) -> str | None:
        try:
            self.workload.check(results)
        except WrongResult as error:
            return f"wrong: {error}"
        return None

    def _compare(self, way: str, results: Results) -> None:
        if not self.workload.repeats:
            wrong = self._wrong(results)
            self.faults += [f"{way}: {wrong}"] if wrong else []
            return
        bits = self._bits(results)
        counts = {name: int((found != self._expected[name]).sum()) for name, found in bits.items()}
        if not any(counts.values()):
            return
        others = ", ".join(f"{count} of {bits[name].numel()} in {name}" for name, count in counts.items() if count)
        message = f"{way}: other bits, {others}"
        if len(self.faults) < CHECKED:
            message += f"; {self._wrong(results) or 'within tolerance of the reference'}"
        self.faults.append(message)
