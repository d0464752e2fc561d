"""The epilogue: store dK and dV through the shared memory of K and V, which are no longer needed.

The stores run after the warpgroups have joined, because they would cost the consumers registers.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.dense_prefill.hopper.backward.state import MAIN, OWN_KEYS

# A thread stores 16 bytes at a time.
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def stage_gradient(tile, gradient):
    """Write [64 keys, columns] to the tile of the keys or values."""
    tile.index(0).store(gradient.to(tile.dtype))


@gluon.jit
def store_gradient(gradient, tile, block, kv_head, OWN: gl.constexpr, FIRST: gl.constexpr):
    """Store a consumer's tile [64 keys, columns] at columns from FIRST on."""
    COLUMNS: gl.constexpr = tile.shape[2]
    key = OWN * OWN_KEYS + gl.arange(0, OWN_KEYS, gl.SliceLayout(1, STORE))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORE))
    start = (block.k_token + key).to(gl.int64) * gradient.token_stride + kv_head.to(gl.int64) * gradient.head_stride
    pointers = gradient.start + (start * gradient.align)[:, None] + column[None, :]
    gl.store(pointers, tile.index(0).load(STORE), mask=(key < block.keys)[:, None])


@gluon.jit
def store_gradients(dk, dv, shared, block, kv_head, HAS_ROPE: gl.constexpr):
    _store_own(dk, dv, shared.keys0, block, kv_head, 0, HAS_ROPE)
    _store_own(dk, dv, shared.keys1, block, kv_head, 1, HAS_ROPE)


@gluon.jit
def _store_own(dk, dv, own, block, kv_head, OWN: gl.constexpr, HAS_ROPE: gl.constexpr):
    store_gradient(dk, own.main, block, kv_head, OWN, 0)
    if HAS_ROPE:
        store_gradient(dk, own.rope, block, kv_head, OWN, MAIN)
    store_gradient(dv, own.v, block, kv_head, OWN, 0)
