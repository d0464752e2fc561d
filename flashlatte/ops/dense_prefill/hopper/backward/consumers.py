"""The two consumer warpgroups: each holds the gradients of 64 keys in registers.

Everything is computed transposed, with keys as rows: then P and dS are register operands of the products for dV and dK,
and only dQ, which sums over the keys of both consumers, needs dS in shared memory. Each consumer computes half of the
columns of dQ and writes them to shared memory for the producer.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import product_here
from flashlatte.kernels.hopper.ptx.threads import warp_sync
from flashlatte.ops.dense_prefill.hopper.backward import state
from flashlatte.ops.dense_prefill.hopper.backward.dq import stage_columns
from flashlatte.ops.dense_prefill.hopper.backward.epilogue import stage_gradient
from flashlatte.ops.dense_prefill.hopper.backward.schedule import QUERIES, needs_mask
from flashlatte.ops.dense_prefill.hopper.backward.state import (
    DQ_32,
    DQ_64,
    GRAD_64,
    GRAD_128,
    MAIN,
    OWN_KEYS,
    ROPE,
    SCORE_COLUMN,
    SCORE_LAYOUT,
    SCORE_ROW,
    STAGES,
    V_DIM,
    operand,
)

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _scores(k, q_main, q_rope, zero, unused, HAS_ROPE: gl.constexpr):
    scores = warpgroup_mma(k.main.index(zero), q_main.permute((1, 0)), unused, use_acc=False, is_async=True)
    if HAS_ROPE:
        scores = warpgroup_mma(k.rope.index(zero), q_rope.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _next_scores(shared, own, step, steps, unused, HAS_ROPE: gl.constexpr):
    """Start the scores of the next step; after the last step, of arbitrary data."""
    step += 1
    stage = step % STAGES
    if step < steps:
        mbarrier.wait(shared.stage_full.index(stage), (step // STAGES) & 1)
    return _scores(own, shared.q_main.index(stage), shared.q_rope.index(stage), step >> 30, unused, HAS_ROPE)


@gluon.jit
def _start_dp(k, dout, delta, zero):
    """dP - delta: the accumulator starts at -delta, which needs no extra registers."""
    negative = gl.zeros([OWN_KEYS, QUERIES], gl.float32, SCORE_LAYOUT) - delta.load(SCORE_COLUMN)[None, :]
    return warpgroup_mma(k.v.index(zero), dout.permute((1, 0)), negative, is_async=True)


@gluon.jit
def _visible(block, query, OWN: gl.constexpr):
    key = OWN * OWN_KEYS + gl.arange(0, OWN_KEYS, SCORE_ROW)
    row = gl.arange(0, QUERIES, SCORE_COLUMN)
    above = key[:, None] <= (row + (query + block.above))[None, :]
    below = key[:, None] >= (row + (query + block.below))[None, :]
    return above & below & (key < block.keys)[:, None]


@gluon.jit
def _dq(ds0, ds1, k0, k1, unused):
    """[64 queries, columns of k]"""
    dq = warpgroup_mma(ds0.permute((1, 0)), k0, unused, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def consume(scale_log2, block, group, shared, OWN: gl.constexpr, HAS_ROPE: gl.constexpr):
    keys0 = shared.keys0
    keys1 = shared.keys1
    own = keys1 if OWN else keys0
    dk_main = gl.zeros([OWN_KEYS, MAIN], gl.float32, GRAD_128)
    dk_rope = gl.zeros([OWN_KEYS, ROPE], gl.float32, GRAD_64)
    dv = gl.zeros([OWN_KEYS, V_DIM], gl.float32, GRAD_128)
    unused = gl.zeros([OWN_KEYS, QUERIES], gl.float32, SCORE_LAYOUT)
    steps = block.tiles * group
    query = block.first_query
    end = query + block.tiles * QUERIES
    if steps > 0:
        mbarrier.wait(shared.keys_full, 0)
        mbarrier.wait(shared.stage_full.index(0), 0)
    pending = _scores(own, shared.q_main.index(0), shared.q_rope.index(0), 0, unused, HAS_ROPE)
    scores = warpgroup_mma_wait(0, deps=[pending])
    for step in range(steps):
        # A zero that is opaque to the compiler, which would otherwise hoist more WGMMA descriptors than fit in
        # registers.
        zero = step >> 30
        stage = step % STAGES
        q_main = shared.q_main.index(stage)
        q_rope = shared.q_rope.index(stage)
        dout = shared.dout.index(zero)
        if not HAS_ROPE:
            mbarrier.wait(shared.dout_full, step & 1)
            dp = _start_dp(own, dout, shared.delta.index(stage), zero)
        lse = shared.lse.index(stage).load(SCORE_COLUMN)
        exponent = scores * scale_log2 - lse[None, :]
        if needs_mask(block, query):
            exponent = gl.where(_visible(block, query, OWN), exponent, float("-inf"))
        p = gl.exp2(exponent)
        p_rounded = p.to(q_main.dtype)
        if HAS_ROPE:
            # Prevents the compiler from moving loads before this point, which would occupy registers.
            warp_sync()
            mbarrier.wait(shared.dout_full, step & 1)
            dp = _start_dp(own, dout, shared.delta.index(stage), zero)
        dv_pending = warpgroup_mma(gl.convert_layout(p_rounded, operand(128)), dout, dv, is_async=True)
        if HAS_ROPE:
            dp, dv = warpgroup_mma_wait(0, deps=[dp, dv_pending])
            if step + 1 < steps:
                barriers.arrive_at(state.DOUT_EMPTY, barriers.ALL_THREADS)
            ds = product_here(p_rounded, dp)
        else:
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = (p * dp).to(q_main.dtype)
        parity = step & 1
        own.ds.index(parity).store(ds)
        fence_async_shared()
        dk_main = warpgroup_mma(gl.convert_layout(ds, operand(128)), q_main, dk_main, is_async=True)
        if HAS_ROPE:
            dk_rope = warpgroup_mma(gl.convert_layout(ds, operand(64)), q_rope, dk_rope, is_async=True)
        barriers.wait(state.DS_FULL, barriers.PAIR_THREADS)

        ds0 = keys0.ds.index(parity)
        ds1 = keys1.ds.index(parity)
        dq_main = _dq(
            ds0,
            ds1,
            keys0.main.index(zero).slice(OWN * 64, 64, dim=1),
            keys1.main.index(zero).slice(OWN * 64, 64, dim=1),
            gl.zeros([QUERIES, 64], gl.float32, DQ_64),
        )
        if HAS_ROPE:
            dk_main, dk_rope = warpgroup_mma_wait(2, deps=[dk_main, dk_rope])
            dq_rope = _dq(
                ds0,
                ds1,
                keys0.rope.index(zero).slice(OWN * 32, 32, dim=1),
                keys1.rope.index(zero).slice(OWN * 32, 32, dim=1),
                gl.zeros([QUERIES, 32], gl.float32, DQ_32),
            )
        else:
            dk_main, dv = warpgroup_mma_wait(2, deps=[dk_main, dv_pending])
            if step + 1 < steps:
                barriers.arrive_at(state.DOUT_EMPTY, barriers.ALL_THREADS)
        if step + STAGES < steps:
            barriers.arrive_at(state.STAGE_EMPTY + stage, barriers.ALL_THREADS)
        rows = block.queries - query
        if HAS_ROPE:
            dq_main = warpgroup_mma_wait(2, deps=[dq_main])
            if step > 0:
                barriers.wait_at(state.DQ_EMPTY, barriers.ALL_THREADS)
            stage_columns(own.dq_main.index(zero), dq_main, rows)
            pending = _next_scores(shared, own, step, steps, unused, HAS_ROPE)
            dq_rope = warpgroup_mma_wait(2, deps=[dq_rope])
            stage_columns(own.dq_rope.index(zero), dq_rope, rows)
        else:
            pending = _next_scores(shared, own, step, steps, unused, HAS_ROPE)
            dq_main = warpgroup_mma_wait(1, deps=[dq_main])
            if step > 0:
                barriers.wait_at(state.DQ_EMPTY, barriers.ALL_THREADS)
            stage_columns(own.dq_main.index(zero), dq_main, rows)
        fence_async_shared()
        barriers.arrive_at(state.DQ_FULL, barriers.ALL_THREADS)
        scores = warpgroup_mma_wait(0, deps=[pending])
        query += QUERIES
        query = gl.where(query >= end, block.first_query, query)

    # Both consumers have finished reading the keys.
    barriers.wait(state.DS_FULL, barriers.PAIR_THREADS)
    stage_gradient(own.main, dk_main * (scale_log2 * LN2))
    if HAS_ROPE:
        stage_gradient(own.rope, dk_rope * (scale_log2 * LN2))
    stage_gradient(own.v, dv)
