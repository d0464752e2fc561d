"""The inline PTX of ``shared_scan``, emulated for the threads of a CTA."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

import re

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.emulator.global_memory import GlobalMemory
from support.emulator.machine import Machine
from support.emulator.program import parse

from flashlatte.kernels.hopper.ptx import shared_scan, shared_words

LANES = 32
SCRATCH = 4096
SHARED_WORDS = SCRATCH + LANES
WARPS = st.sampled_from([4, 8, 16])

KERNEL = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
    .reg .b32 %i<2>; .reg .b32 %o<8>; .reg .b32 %w<2>; .reg .b64 %a<4>;
    ld.param.b64 %a0, [kernel_param_0]; ld.param.b64 %a1, [kernel_param_1];
    mov.u32 %i0, %tid.x; mul.lo.u32 %i1, %i0, 4;
    mad.wide.u32 %a2, %i0, 4, %a0; mad.wide.u32 %a3, %i0, {result_bytes}, %a1;
    {copy_in}
    bar.sync 0;
    {operands}
    {code}
    {results}
    bar.sync 0;
    {copy_out}
    ret;
}}
"""


def emulate(code: str, memory: np.ndarray, warps: int, results: int, **operands: int) -> np.ndarray:
    """Run ``code`` on shared ``memory``, a multiple of the threads in words, which it changes. Returns $0, $1 and so on
    [threads, results]. ``operands`` by name, as ``_4`` for $4."""
    threads = LANES * warps
    words, out = torch.from_numpy(memory), torch.zeros(threads, results, dtype=torch.int32)
    steps = [4 * threads * i for i in range(len(memory) // threads)]
    program = KERNEL.format(
        threads=threads,
        result_bytes=4 * results,
        copy_in=" ".join(f"ld.global.b32 %w0, [%a2+{at}]; st.shared.b32 [%i1+{at}], %w0;" for at in steps),
        operands=" ".join(f"mov.b32 %o{name[1:]}, {value};" for name, value in operands.items()),
        code=re.sub(r"\$(\d)", r"%o\1", code),
        results=" ".join(f"st.global.b32 [%a3+{4 * i}], %o{i};" for i in range(results)),
        copy_out=" ".join(f"ld.shared.b32 %w0, [%i1+{at}]; st.global.b32 [%a2+{at}], %w0;" for at in steps),
    )
    gpu = GlobalMemory()
    for tensor in (words, out):
        gpu.add(tensor.data_ptr(), tensor.nbytes)
    machine = Machine(parse(program), gpu, memory.nbytes, seed=0, late=True, finds_races=True)
    pointers = (gpu.address(tensor.data_ptr()) for tensor in (words, out))
    machine.parameters = {i: pointer.to_bytes(8, "little") for i, pointer in enumerate(pointers)}
    machine.run((1, 1, 1))
    gpu.copy_back()
    return out.numpy()


def shared(words: np.ndarray) -> np.ndarray:
    memory = np.zeros(-(-SHARED_WORDS // 512) * 512, np.uint32).view(np.int32)
    memory[: len(words)] = words.astype(np.uint32).view(np.int32)
    return memory


@given(
    warps=WARPS, bins=st.sampled_from([1024, 2048]), seed=st.integers(0, 1000), full=st.sampled_from([0.003, 0.5, 1.0])
)
def test_find_bin_of_rank(warps, bins, seed, full):
    rng = np.random.default_rng(seed)
    counts = np.where(rng.random(bins) < full, rng.integers(0, 9, bins), 0)
    counts[rng.integers(bins)] += 1
    wanted = int(rng.integers(1, counts.sum() + 1))
    code = shared_scan._bin_asm(bins, warps)
    results = emulate(code, shared(counts), warps, 3, _4=0, _5=4 * SCRATCH, _6=wanted)
    expected = int(np.searchsorted(counts.cumsum(), wanted))
    assert (results == [expected, counts[:expected].sum(), counts[expected]]).all()


@given(warps=WARPS, seed=st.integers(0, 1000), before=st.integers(0, 5000), bit=st.integers(0, 65535))
def test_count_bits_before(warps, seed, before, bit):
    """Prefix sums of a bitmap, and the count of bits before each bit."""
    words, sums = 2048, 2048
    rng = np.random.default_rng(seed)
    bitmap = rng.integers(0, 2**32, words) & rng.integers(0, 2**32, words)
    memory = shared(bitmap)
    code = shared_scan._ones_asm(words, warps)
    total = emulate(code, memory, warps, 1, _1=0, _2=4 * sums, _3=4 * SCRATCH, _4=before)
    bits = (bitmap[:, None] >> np.arange(32) & 1).reshape(-1)
    assert (total == before + bits.sum()).all()
    pairs = bits.reshape(-1, 64).sum(axis=1)
    assert memory[sums : sums + words // 2].tolist() == (before + pairs.cumsum() - pairs).tolist()

    for is_wanted in (0, 1):
        count = emulate(
            shared_words._COUNT_BITS_BEFORE.value, memory, warps, 1, _1=0, _2=4 * sums, _3=bit, _4=is_wanted
        )
        assert (count == is_wanted * (before + bits[:bit].sum())).all()
