"""Two CTAs of a cluster: access to the peer's shared memory (DSMEM), and mbarriers in both CTAs.

Triton is not aware of the cluster or of these mbarriers. The launcher sets the cluster size and reserves bytes after
Triton's shared memory, the *tail*, for the mbarriers. The code assumes that the symbol ``global_smem`` is the start of
the CTA's shared memory, and that both CTAs run the same kernel, so that shared memory has the same layout in both.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.threads import broadcast_to_threads


@gluon.constexpr_function
def _constraints(operands):
    return ",".join(["=r"] + ["r"] * operands)


@gluon.jit
def _run_per_thread(ASM: gl.constexpr, operands):
    CONSTRAINTS: gl.constexpr = _constraints(len(operands))
    gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _address_asm(tail_bytes, of_peer):
    code = "{ .reg .b32 rank, size; mov.u32 $0, global_smem;"
    if tail_bytes:
        code += f" mov.u32 size, %dynamic_smem_size; add.u32 $0, $0, size; sub.u32 $0, $0, {tail_bytes};"
    if of_peer:
        code += " mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1; mapa.shared::cluster.u32 $0, $0, rank;"
    return code + " }"


@gluon.jit
def shared_address(TAIL_BYTES: gl.constexpr, OF_PEER: gl.constexpr):
    """Address of shared memory in this CTA or in its peer: of the first byte, or with TAIL_BYTES > 0 of the last
    TAIL_BYTES bytes."""
    asm: gl.constexpr = _address_asm(TAIL_BYTES, OF_PEER)
    return gl.inline_asm_elementwise(asm, "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=True, pack=1)


_ARRIVE = gl.constexpr("barrier.cluster.arrive.relaxed; mov.u32 $0, $1;")
_WAIT = gl.constexpr("barrier.cluster.wait; mov.u32 $0, $1;")


@gluon.jit
def arrive():
    """Arrive at the cluster barrier. Every warp of both CTAs arrives once, and calls ``wait`` before it accesses the
    peer's memory."""
    _run_per_thread(_ARRIVE, (broadcast_to_threads(0),))


@gluon.jit
def wait():
    """Wait until all warps of both CTAs have arrived."""
    _run_per_thread(_WAIT, (broadcast_to_threads(0),))


@gluon.constexpr_function
def _init_asm(counts):
    inits = [f"@p mbarrier.init.shared::cta.b64 [$1+{8 * n}], {count};" for n, count in enumerate(counts)]
    begin = "{ .reg .pred p; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0; "
    return begin + " ".join(inits) + " fence.mbarrier_init.release.cluster; mov.u32 $0, $1; }"


@gluon.jit
def init_mbarriers(address, COUNTS: gl.constexpr):
    """Initialize contiguous mbarriers at ``address``, with the arrival counts COUNTS."""
    _run_per_thread(_init_asm(COUNTS), (broadcast_to_threads(address),))


@gluon.constexpr_function
def _wait_asm(offset):
    attempt = f"mbarrier.try_wait.parity.shared::cta.b64 p, [$1+{offset}], $2;"
    return "{ .reg .pred p; WAITING: " + attempt + " @!p bra.uni WAITING; mov.u32 $0, $1; }"


@gluon.jit
def wait_mbarrier(address, OFFSET: gl.constexpr, phase):
    _run_per_thread(_wait_asm(OFFSET), (broadcast_to_threads(address), broadcast_to_threads(phase)))


@gluon.constexpr_function
def _expect_asm(offset, expected):
    expect = f"@p mbarrier.arrive.expect_tx.shared::cta.b64 state, [$1+{offset}], {expected};"
    begin = "{ .reg .pred p; .reg .b64 state; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0; "
    return begin + expect + " mov.u32 $0, $1; }"


@gluon.jit
def expect_bytes(address, OFFSET: gl.constexpr, BYTES: gl.constexpr):
    """Arrive once, and expect BYTES bytes."""
    _run_per_thread(_expect_asm(OFFSET, BYTES), (broadcast_to_threads(address),))


@gluon.constexpr_function
def _arrive_both_asm(offset):
    # Without cluster scope, which would wait for all stores of the thread: the thread has only read.
    return (
        "{ .reg .pred p; .reg .b64 state; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        f"@p mbarrier.arrive.shared::cta.b64 state, [$1+{offset}]; "
        f"@p mbarrier.arrive.shared::cluster.b64 _, [$2+{offset}]; mov.u32 $0, $1; }}"
    )


@gluon.jit
def arrive_both(own, peer, OFFSET: gl.constexpr):
    """Each warp arrives at an mbarrier of this CTA and at the same one of its peer. Only for warps that have only
    read."""
    _run_per_thread(_arrive_both_asm(OFFSET), (broadcast_to_threads(own), broadcast_to_threads(peer)))


@gluon.constexpr_function
def _store_asm(offset):
    # Operands: 0 to 7 the words, tied to 8 to 15, then the address eight times.
    return (
        f"{{ .reg .b32 second; st.shared.v4.b32 [$16+{offset}], {{$0, $1, $2, $3}}; "
        f"xor.b32 second, $16, 16; st.shared.v4.b32 [second+{offset}], {{$4, $5, $6, $7}}; }}"
    )


@gluon.constexpr_function
def _store_constraints():
    return ",".join(["=r"] * 8 + [str(i) for i in range(8)] + ["r"] * 8)


@gluon.jit
def store_32_bytes(words, addresses, OFFSET: gl.constexpr):
    """Store 8 ``words`` of each thread: the first four at its address plus OFFSET in shared memory, the others in the
    16 bytes that follow them in a 128-byte swizzle.

    In PTX, since the addresses of the tiles differ by constants only: the compiler would keep all of them in registers.
    """
    gl.inline_asm_elementwise(
        _store_asm(OFFSET), _store_constraints(), [words, addresses], gl.int32, is_pure=False, pack=8
    )


@gluon.constexpr_function
def _send_asm(offset, piece_bytes, pieces, warp_bytes, peer_offset, barrier_offset):
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    copies = [
        f"add.u32 source, from, {piece * piece_bytes}; add.u32 target, to, {piece * piece_bytes}; "
        f"@p {copy} [target], [source], {warp_bytes}, [barrier];"
        for piece in range(pieces)
    ]
    return (
        "{ .reg .pred p; .reg .b32 thread, lane, from, to, barrier, source, target; "
        "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; "
        "mov.u32 thread, %tid.x; and.b32 lane, thread, 31; setp.eq.u32 p, lane, 0; shr.u32 thread, thread, 5; "
        f"mad.lo.u32 from, thread, {warp_bytes}, {offset}; "
        f"add.u32 to, from, $2; add.u32 to, to, {peer_offset}; add.u32 from, from, $1; "
        f"add.u32 barrier, $3, {barrier_offset}; {' '.join(copies)} mov.u32 $0, $1; }}"
    )


@gluon.jit
def send_rows(
    own,
    peer,
    peer_barriers,
    OFFSET: gl.constexpr,
    PIECE_BYTES: gl.constexpr,
    PIECES: gl.constexpr,
    WARP_BYTES: gl.constexpr,
    PEER_OFFSET: gl.constexpr,
    BARRIER: gl.constexpr,
):
    """Warp n of the first partition copies WARP_BYTES bytes at OFFSET + n · WARP_BYTES of each of PIECES pieces to the
    peer, PEER_OFFSET bytes further on (cp.async.bulk). The peer's mbarrier counts the bytes.

    The proxy fence makes the warp's stores visible to the bulk copy; ptxas also makes it wait for the warp's loads.

    Args:
        own, peer: addresses of shared memory in this CTA and in its peer.
        peer_barriers, BARRIER: address of the peer's mbarriers, and offset of the one that counts the bytes.
    """
    asm: gl.constexpr = _send_asm(OFFSET, PIECE_BYTES, PIECES, WARP_BYTES, PEER_OFFSET, BARRIER)
    _run_per_thread(asm, (broadcast_to_threads(own), broadcast_to_threads(peer), broadcast_to_threads(peer_barriers)))
