"""The inline PTX of ``shared_scan``, emulated in NumPy one thread at a time."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.ptx_threads import LANES, Threads

from flashlatte.kernels.hopper.ptx import shared_scan, shared_words

SCRATCH = 4096
WARPS = st.sampled_from([4, 8, 16])


def shared(words):
    memory = np.zeros(SCRATCH + 32, np.int64)
    memory[: len(words)] = words
    return memory


@given(
    warps=WARPS, bins=st.sampled_from([1024, 2048]), seed=st.integers(0, 1000), full=st.sampled_from([0.003, 0.5, 1.0])
)
def test_find_bin_of_rank(warps, bins, seed, full):
    rng = np.random.default_rng(seed)
    counts = np.where(rng.random(bins) < full, rng.integers(0, 9, bins), 0)
    counts[rng.integers(bins)] += 1
    wanted = int(rng.integers(1, counts.sum() + 1))
    threads = Threads(LANES * warps, shared(counts))
    threads.run(shared_scan._bin_asm(bins, warps), _4=0, _5=4 * SCRATCH, _6=wanted)
    expected = int(np.searchsorted(counts.cumsum(), wanted))
    for name, value in (("$0", expected), ("$1", counts[:expected].sum()), ("$2", counts[expected])):
        assert (threads.registers[name] == value).all()


@given(warps=WARPS, seed=st.integers(0, 1000), before=st.integers(0, 5000), bit=st.integers(0, 65535))
def test_count_bits_before(warps, seed, before, bit):
    """Prefix sums of a bitmap, and the count of bits before each bit."""
    words, sums = 2048, 2048
    rng = np.random.default_rng(seed)
    bitmap = rng.integers(0, 2**32, words) & rng.integers(0, 2**32, words)
    memory = shared(bitmap)
    threads = Threads(LANES * warps, memory)
    threads.run(shared_scan._ones_asm(words, warps), _1=0, _2=4 * sums, _3=4 * SCRATCH, _4=before)
    bits = (bitmap[:, None] >> np.arange(32) & 1).reshape(-1)
    assert (threads.registers["$0"] == before + bits.sum()).all()
    pairs = bits.reshape(-1, 64).sum(axis=1)
    assert memory[sums : sums + words // 2].tolist() == (before + pairs.cumsum() - pairs).tolist()

    threads.run(shared_words._COUNT_BITS_BEFORE.value, _1=0, _2=4 * sums, _3=bit, _4=1)
    assert (threads.registers["$0"] == before + bits[:bit].sum()).all()
    threads.run(shared_words._COUNT_BITS_BEFORE.value, _1=0, _2=4 * sums, _3=bit, _4=0)
    assert (threads.registers["$0"] == 0).all()
