"""The merge kernel as machine code of GPUs that need not be there."""

import re

import pytest
import torch
from support.compile import Recorder, compile_launch, variant_key

from flashlatte.ops.merge_states import portable
from flashlatte.runtime import dispatch

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="kernels are interpreted, not compiled")


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder(portable.merge_kernel)
    monkeypatch.setattr(portable, "merge_kernel", recorder)
    return recorder


def run(n, tokens, heads, d, *, dtype=torch.bfloat16, gap=0, heads_first=True):
    """Parts as kernels leave them: out by token, lse by token or by head."""
    outs = [torch.zeros(tokens, heads + gap, d, dtype=dtype)[:, :heads] for _ in range(n)]
    lses = [torch.zeros(heads, tokens).T if heads_first else torch.zeros(tokens, heads) for _ in range(n)]
    portable.merge_states_into(outs, lses, torch.zeros_like(outs[0]), torch.zeros(tokens, heads))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("n", "registers"), [(2, 64), (8, 128)])
def test_rows_move_in_16_byte_pieces_without_spills(n, registers, arch, recorder):
    run(n, 64, 16, 512)
    (launch,) = recorder.launches
    compiled = compile_launch(recorder.fn, launch, arch)
    assert compiled.spills == 0
    assert compiled.registers <= registers
    assert len(re.findall(r"\bLDG\.E\.128\b", compiled.sass)) == 2 * n
    assert len(re.findall(r"\bSTG\.E\.128\b", compiled.sass)) == 2


@pytest.mark.parametrize("heads_first", [True, False])
def test_new_sizes_compile_nothing(heads_first, recorder):
    for size in range(2, 22):
        run(2, 3 * size, 2 * size, 128, gap=size, heads_first=heads_first)
    assert len({variant_key(recorder.fn, launch) for launch in recorder.launches}) == 1
