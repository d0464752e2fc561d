"""The kernel as on NVIDIA GPUs, with codes unpacked by PTX: in Triton's interpreter with an emulator of PTX."""

import numpy as np
import pytest
import torch
import triton.language as tl
from support.ptx import run
from triton.runtime.interpreter import TensorHandle

from flashlatte import turboquant_decode
from flashlatte.kv_cache import turboquant
from flashlatte.ops.turboquant_decode.portable import launch

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


class Assembler:
    """``tl.inline_asm_elementwise`` by the PTX emulator, with float32 results; registers declared for the whole kernel
    are kept."""

    def __init__(self):
        self.kept = {}
        self.calls = 0

    def __call__(self, text, constraints, args, dtype, is_pure, pack):
        self.calls += 1
        (words,) = args
        text = getattr(text, "value", text)
        if not is_pure:
            one = torch.tensor([int(words.handle.data.item())])
            registers = run(text, {"$1": one, "%laneid": one * 0 + 9})
            self.kept = {name: word for name, word in registers.items() if name.startswith("tq_")}
            return None
        # Adjacent elements of the last axis represent the elements of one thread.
        flat = torch.from_numpy(words.handle.data.astype(np.int64)).reshape(-1, pack)
        outputs = constraints.count("=")
        kept = {name: word.expand(len(flat)) for name, word in self.kept.items()}
        registers = run(text, {f"${outputs + place}": flat[:, place] for place in range(pack)} | kept)
        results = []
        for number in range(outputs):
            halves = torch.stack([registers[f"${number}"] >> 16 * place & 0xFFFF for place in range(pack)], dim=-1)
            data = halves.to(torch.uint16).view(torch.float16).float().reshape(words.handle.data.shape).numpy()
            results.append(tl.tensor(TensorHandle(data, tl.float32), tl.block_type(tl.float32, list(data.shape))))
        return tuple(results)


QUICK = {("turboquant_k8v4", 4), ("turboquant_4bit_nc", 2), ("turboquant_3bit_nc", 0), ("turboquant_3bit_nc", 2)}


@pytest.mark.parametrize(
    ("name", "gap"),
    [
        pytest.param(name, gap, marks=() if (name, gap) in QUICK else pytest.mark.full)
        for name in turboquant.TURBOQUANT_NAMES
        for gap in (0, 2, 4)
    ],
)
def test_against_the_reference(monkeypatch, name, gap):
    layout = turboquant.turboquant_format(name, 64)
    generator = torch.Generator().manual_seed(gap)
    key, value = torch.randn(2, 3, 16, 2, 64, generator=generator)
    storage = torch.zeros(3, 16, 2, layout.record_bytes + gap, dtype=torch.uint8)
    cache = storage[..., : layout.record_bytes]
    cache.copy_(layout.encode(key, value))
    q = torch.randn(1, 1, 4, 64, generator=generator).half()
    arguments = (q, cache, torch.tensor([[2, 0]]), torch.tensor([21]))
    expected = turboquant_decode(*arguments, backend="reference")

    assembler = Assembler()
    monkeypatch.setattr(tl, "inline_asm_elementwise", assembler)
    monkeypatch.setattr(launch, "NVIDIA", {"interpreter"})
    monkeypatch.setattr(launch, "converts_e4m3", lambda _: True)
    out, lse = turboquant_decode(*arguments, backend="portable")
    assert assembler.calls
    torch.testing.assert_close(out, expected[0], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(lse, expected[1], rtol=2e-3, atol=2e-3)
