"""The ``push`` kernel, which stores on every rank: in Triton's interpreter, and its machine code."""

from __future__ import annotations

import pytest
import torch
from support.compile import Recorder, compile_launch

from flashlatte.distributed import push, push_kernel
from flashlatte.runtime import machine


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [(3, 2, 576), (5, 4, 576), (1, 3, 5), (0, 2, 64)],  # less than one program, more, odd sizes, nothing
)
def test_every_rank_gets_every_ranks_heads(tokens, heads, dim, dtype):
    size = 3
    whole = torch.randn(tokens, size * heads, dim).to(dtype)
    everywhere = [torch.full_like(whole, torch.nan) for _ in range(size)]
    for rank, mine in enumerate(whole.chunk(size, 1)):
        push.push(mine, [queries.chunk(size, 1)[rank] for queries in everywhere])
    assert all(queries.equal(whole) for queries in everywhere)


@pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")
def test_elements_are_copied_16_bytes_at_a_time(monkeypatch):
    whole = torch.empty(4, 64, 128, 576, dtype=torch.bfloat16)
    targets = [queries[:, 32:64] for queries in whole]
    recorder = Recorder(push_kernel.push_kernel)
    monkeypatch.setattr(push_kernel, "push_kernel", recorder)
    push._launch(torch.empty(128, 32, 576, dtype=torch.bfloat16), targets)
    (launch,) = recorder.launches
    compiled = compile_launch(recorder.fn, launch, 90)
    assert compiled.spills == 0
    assert "LDG.E.128" in compiled.sass
    assert compiled.sass.count("STG.E.128") == 4 * compiled.sass.count("LDG.E.128")
