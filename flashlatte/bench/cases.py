"""The benchmark's cases, and FlashMLA's recorded times.

FlashMLA's figures were taken on one H100 80GB SXM with PyTorch 2.11 and CUDA 13.0 at commit 9241ae3, on the data that
``workloads`` draws. They were measured as here, by do_bench (median, L2 flushed between calls), except the "cool"
ones, which are FlashMLA's own scripts': a few launches after a pause, which run cooler and faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlatte.bench import problems

# The GPU of FlashMLA's times, as ``environment.gpu_slug`` names it.
RECORDED_GPU = "h100"
# The 8192³ bf16 matmul (780 to 800) and the device-to-device copy in the runs that FlashMLA was recorded in.
RECORDED_MATMUL_TFLOPS = 790.0
RECORDED_COPY_GBPS = 3024.0


@dataclass(frozen=True)
class Recorded:
    """FlashMLA's figures for a case: the shortest time where it was measured several times (``tflops`` and ``gbps``
    of the varlen b 128, s_q 1 case stem from a slower one of them).

    Attributes:
        microseconds, tflops, gbps: time and rates of whole calls by do_bench, or in a CUDA graph for the "graph" cases.
            The rates are as FlashMLA counts; ``results`` compares with our count of its work.
        cool_microseconds, cool_tflops: by FlashMLA's own scripts.
    """

    microseconds: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    cool_microseconds: float | None = None
    cool_tflops: float | None = None

    def text(self) -> str:
        if self.microseconds is not None:
            return f"{self.microseconds:,.1f} µs"
        if self.cool_microseconds is not None:
            return f"{self.cool_microseconds:,.1f} µs cool"
        return f"{self.cool_tflops:,.0f} TFLOPS cool"


@dataclass(frozen=True)
class Case:
    """A problem and how it is timed.

    Attributes:
        method: "device", the time of a call on the device with the L2 flushed before it; "graph", a tenth of ten
            calls in one CUDA graph; "host", host time of a call, without waiting for the device.
    """

    problem: problems.Problem
    method: str = "device"
    recorded: Recorded | None = None

    @property
    def operation(self) -> str:
        return self.problem.operation

    @property
    def name(self) -> str:
        return self.problem.name if self.method == "device" else f"{self.problem.name}-{self.method}"


def _dense(
    batch: int,
    s_q: int,
    h_q: int,
    keys: int,
    microseconds: float,
    tflops: float,
    gbps: float,
    *,
    graph: float | None = None,
    **flags: bool | str,
) -> tuple[Case, ...]:
    problem = problems.DenseDecode(batch, s_q, h_q, keys, **flags)  # pyright: ignore[reportArgumentType]
    case = Case(problem, recorded=Recorded(microseconds, tflops, gbps))
    if graph is None:
        return (case,)
    return case, Case(problem, "graph", Recorded(graph, tflops * microseconds / graph, gbps * microseconds / graph))


DENSE_DECODE = (
    *_dense(128, 1, 128, 4096, 259.3, 563, 2467),
    *_dense(128, 2, 128, 4096, 447.2, 653, 1510),
    *_dense(128, 2, 128, 8192, 908.4, 643, 1408),
    *_dense(128, 1, 128, 4096, 274.5, 501, 2194, varlen=True),
    *_dense(128, 2, 128, 4096, 480.2, 611, 1413, varlen=True, causal=True),
    *_dense(128, 2, 128, 8192, 914.6, 642, 1405, varlen=True, causal=True),
    *_dense(132, 1, 128, 4096, 268.4, 561, 2458),
    *_dense(128, 1, 128, 32768, 2016.6, 579, 2414),
    *_dense(16, 4, 128, 4096, 113.1, 646, 825, causal=True),
    *_dense(128, 2, 128, 8192, 934.9, 625, 1368, dtype="fp16"),
    *_dense(128, 1, 64, 4096, 237.8, 307, 2614),
    *_dense(128, 1, 32, 4096, 235.6, 155, 2602),
    *_dense(128, 1, 16, 4096, 234.6, 78, 2593),
    *_dense(128, 2, 16, 4096, 235.3, 155, 2605, causal=True),
    *_dense(256, 1, 16, 2048, 235.4, 78, 2603, graph=213.6),
    *_dense(64, 1, 128, 8192, 257.4, 567, 2416),
    *_dense(32, 1, 128, 8192, 140.4, 520, 2214),
    *_dense(32, 2, 64, 16384, 268.3, 544, 2284, causal=True),
    *_dense(16, 1, 128, 8192, 81.9, 446, 1898, graph=76.5),
    *_dense(8, 1, 128, 8192, 55.3, 330, 1406),
    *_dense(4, 1, 128, 8192, 41.4, 220, 938, graph=36.5),
    *_dense(4, 1, 16, 8192, 34.0, 34, 1113, graph=28.0),
    *_dense(1, 1, 128, 1024, 18.2, 16, 80, graph=14.3),
    *_dense(1, 1, 128, 4096, 24.4, 47, 205, graph=20.1),
    *_dense(1, 1, 16, 4096, 28.0, 5, 170, graph=23.5),
    *_dense(1, 1, 128, 32768, 49.0, 186, 776),
    *_dense(1, 1, 128, 65536, 61.0, 299, 1243, graph=55.0),
    *_dense(1, 1, 128, 131072, 90.8, 402, 1667),
    *_dense(1, 1, 16, 131072, 95.8, 48, 1576),
    *_dense(2, 1, 128, 131072, 144.6, 505, 2092),
    Case(problems.DenseDecode(1, 1, 128, 4096), "host"),
    *(
        Case(problems.DenseDecode(4, s_q, 16, 45118, causal=s_q > 1, uneven=(4641, 1730, 1696)), method)
        for s_q in (1, 4)
        for method in ("device", "graph")
    ),
    # FlashMLA takes pages of 64 tokens, in two bytes.
    *(Case(problems.DenseDecode(128, 1, 128, 4096, page_size=page_size)) for page_size in (16, 32)),
    *(Case(problems.DenseDecode(128, 1, h_q, 4096, cache_format="fp8")) for h_q in (16, 128)),
    *(
        Case(problems.DenseDecode(128, s_q, 128, keys, cache_format="fp8", precision="fp8"))
        for s_q in (1, 2)
        for keys in (4096, 32768)
    ),
)


def _v32(batch: int, s_q: int, h_q: int, topk: int, recorded: Recorded) -> Case:
    return Case(problems.SparseDecode("v32", batch, s_q, h_q, topk, tokens=32768, page_size=64), recorded=recorded)


def _model1(batch: int, h_q: int, extra_topk: int, recorded: Recorded, **extra: int | bool) -> Case:
    problem = problems.SparseDecode(
        "model1",
        batch,
        2,
        h_q,
        topk=128,
        tokens=16384,
        page_size=256,
        extra_topk=extra_topk,
        extra_tokens=16384,
        **extra,  # pyright: ignore[reportArgumentType]
    )
    return Case(problem, recorded=recorded)


SPARSE_DECODE = (
    _v32(2, 2, 128, 2048, Recorded(24.9, 91, 252, cool_microseconds=21.3)),
    _v32(74, 1, 128, 2048, Recorded(135.2, 311, 884)),
    _v32(64, 2, 128, 2048, Recorded(194.1, 375, 1040, cool_microseconds=191.2)),
    _v32(128, 2, 128, 2048, Recorded(371.5, 393, 1089, cool_microseconds=370.8)),
    _v32(32, 2, 128, 16384, Recorded(699.7, 413, 754)),
    _v32(32, 2, 64, 16384, Recorded(454.4, 322, 1157)),
    _v32(148, 2, 128, 16384, Recorded(cool_tflops=447)),
    _v32(148, 2, 64, 16384, Recorded(cool_tflops=354)),
    _model1(2, 64, 512, Recorded(18.1, 18, 110, cool_microseconds=14.9)),
    _model1(64, 64, 512, Recorded(57.4, 187, 1114, cool_microseconds=54.0)),
    _model1(128, 64, 512, Recorded(102.4, 209, 1245, cool_microseconds=99.4)),
    _model1(64, 128, 1024, Recorded(cool_microseconds=109.3, cool_tflops=354)),
    _model1(128, 128, 1024, Recorded(215.0, 360, 1092, cool_microseconds=212.1)),
    _model1(128, 128, 1024, Recorded(163.6, 278, 1430, cool_microseconds=145.1), extra_page_size=2, extra_varlen=True),
    _model1(128, 64, 1024, Recorded(136.5, 168, 1485, cool_microseconds=133.5), extra_page_size=2, extra_varlen=True),
    # DeepSeek-V4-Flash in decoding: one query token per request, with full lists or lists of varying length.
    *(
        Case(
            problems.SparseDecode(
                "model1", 64, 1, 64, 128, 16384, 256, extra_topk=512, extra_tokens=16384, extra_varlen=varlen
            )
        )
        for varlen in (False, True)
    ),
    # FlashMLA refuses fewer than 64 heads, and caches without scales.
    Case(problems.SparseDecode("v32", 128, 1, 16, topk=2048, tokens=32768, page_size=64)),
    Case(problems.SparseDecode("bf16", 128, 2, 128, topk=2048, tokens=32768, page_size=64)),
    # Rows without RoPE, and the formats of DeepSeek-V4.1: of the same shapes, so that their times compare.
    *(
        Case(problems.SparseDecode(cache_format, *shape, 2048, 32768, 64))
        for cache_format in ("v32_no_rope", "v41", "v41_fp4")
        for shape in ((2, 2, 128), (128, 2, 128), (64, 2, 64), (128, 1, 16))
    ),
    # FlashMLA's peak case: one cache, 32,768 tokens a request, page 64.
    Case(
        problems.SparseDecode("model1", 148, 2, 128, topk=16384, tokens=32768, page_size=64),
        recorded=Recorded(cool_tflops=479),
    ),
)

SPARSE_PREFILL = (
    Case(problems.SparsePrefill(576, 128, 2048, 8192), recorded=Recorded(3830, 610, cool_tflops=675)),
    Case(problems.SparsePrefill(576, 128, 2048, 32768), recorded=Recorded(4057, 576, cool_tflops=626)),
    Case(problems.SparsePrefill(576, 128, 2048, 131072), recorded=Recorded(4556, 513, cool_tflops=547)),
    Case(problems.SparsePrefill(512, 64, 512, 8192), recorded=Recorded(557, 494, cool_tflops=513)),
    Case(problems.SparsePrefill(512, 64, 512, 65536), recorded=Recorded(692, 397, cool_tflops=393)),
    Case(problems.SparsePrefill(512, 128, 1024, 8192), recorded=Recorded(1980, 555, cool_tflops=617)),
    Case(problems.SparsePrefill(512, 128, 1024, 65536), recorded=Recorded(2073, 530, cool_tflops=545)),
    # As for 576 above, without RoPE.
    Case(problems.SparsePrefill(512, 128, 2048, 32768)),
    # FlashMLA refuses fewer than 64 heads.
    *(
        Case(problems.SparsePrefill(576, h_q, 2048, 32768, overlap=overlap))
        for h_q in (16, 32)
        for overlap in (0.0, 0.5, 0.9)
    ),
    *(
        Case(problems.SparsePrefill(head_dim, h_q, 2048, s_kv, precision="fp8"))
        for head_dim, h_q, s_kv in ((576, 128, 32768), (576, 128, 131072), (576, 64, 32768), (512, 128, 32768))
    ),
)

# A training step of 4,096 tokens.
SPARSE_ATTENTION = (
    *(Case(problems.SparseAttentionBackward(576, h_q, 2048, 4096)) for h_q in (128, 64, 16)),
    Case(problems.SparseAttentionBackward(576, 128, 2048, 4096, deterministic=True)),
    Case(problems.SparseAttentionBackward(512, 64, 512, 4096)),
)

# The same step of the indexer: sparse stage, and warm-up.
INDEXER_LOSS = (
    Case(problems.IndexerLoss(128, 64, 2048, 4096)),
    Case(problems.IndexerLoss(128, 64, 2048, 4096, deterministic=True)),
    Case(problems.IndexerLoss(64, 32, 2048, 4096)),
    Case(problems.IndexerLoss(128, 64, 0, 4096)),
    Case(problems.IndexerLoss(128, 64, 0, 16384, s_q=16384)),
)

_HEADS_AND_TOKENS = ((128, 8192), (16, 32768))
# FlashMLA has no such kernel for this GPU; docs/notes/portable.md has cuDNN's times.
_DENSE_PREFILL = (
    *((head_dim, 2, 128, 4096, True) for head_dim in (192, 128)),
    *((192, 64, h_q, 512, True) for h_q in (128, 16)),
    *((d, 1, h_q, tokens, causal) for d in (192, 128) for causal in (True, False) for h_q, tokens in _HEADS_AND_TOKENS),
)
DENSE_PREFILL = (
    *(Case(problems.DensePrefill(*shape)) for shape in _DENSE_PREFILL),
    Case(problems.DensePrefill(192, 16, 128, 4096, causal=True, varlen=True)),
    *(Case(problems.DensePrefillBackward(*shape)) for shape in _DENSE_PREFILL),
    Case(problems.DensePrefillBackward(192, 16, 128, 4096, causal=True, varlen=True)),
    Case(problems.DensePrefillBackward(192, 1, 128, 8192, causal=True, deterministic=True)),
)

KV_CACHE = (
    Case(problems.CacheWrite("v32", 65536)),
    Case(problems.CacheGather("v32", 65536)),
    Case(problems.GatherRecords("v32", 65536)),
    Case(problems.CacheCopy(2048)),
    *(Case(problems.ReshapeAndCache(65536, dtype)) for dtype in ("bf16", "e4m3")),
)

# FlashMLA has none of these; docs/notes/indexer.md has times of DeepGEMM and others' top-k kernels.
INDEXER = (
    *(Case(problems.IndexLogits(*shape)) for shape in ((2048, 8192, 64), (4096, 32768, 64), (4096, 131072, 64))),
    *(Case(problems.IndexLogits(*shape)) for shape in ((2048, 8192, 32), (4096, 32768, 32))),
    *(Case(problems.PagedIndexLogits(*shape)) for shape in ((128, 8192), (64, 32768), (4, 131072), (1, 131072))),
    Case(problems.PagedIndexLogits(64, 32768, next_n=2)),
    *(Case(problems.SparseIndexLogits(rows, 131072, 1024)) for rows in (64, 2048)),
    *(Case(problems.TopK(rows, width)) for rows in (1, 64, 4096) for width in (32768, 131072)),
    Case(problems.TopK(4096, 32768, 512)),
    *(Case(problems.TopK(rows, 4096, page_size=64)) for rows in (1, 32, 128)),
    *(Case(problems.TopK(rows, 32768, values=values)) for rows in (64, 4096) for values in problems.ROW_VALUES[1:]),
    *(Case(problems.IndexSelect(problems.IndexLogits(4096, 32768, 64), workspace_mib=mib)) for mib in (512, 64)),
    Case(problems.PagedIndexSelect(problems.PagedIndexLogits(64, 32768)), "graph"),
    Case(problems.IndexQuantize(65536)),
    Case(problems.IndexGather(4, 16384)),
    *(Case(problems.IndexConvert(128, 32768, compact=compact), "graph") for compact in (False, True)),
    *(Case(problems.IndexQuery(8192, four_bits=four_bits), "graph") for four_bits in (False, True)),
    Case(problems.IndexWeights(128), "graph"),
)

_PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
TURBOQUANT = (
    *(Case(problems.TurboQuantDecode(name, 64, 8192)) for name in _PRESETS),
    Case(problems.TurboQuantDecode("turboquant_4bit_nc", 1, 131072)),
    *(Case(problems.TurboQuantStore(name, 65536)) for name in _PRESETS),
    *(Case(problems.TurboQuantGather(name, 65536)) for name in _PRESETS),
)

# Decode, prefill, and a batch of both.
PAGED_ATTENTION = (
    *(Case(problems.PagedAttention(128, 0, 4096, dtype)) for dtype in ("bf16", "e4m3", "e5m2", "int8")),
    *(Case(problems.PagedAttention(0, 8192, 8192, page_size=page_size)) for page_size in (64, 16)),
    *(
        Case(problems.PagedAttention(*shape, 8192, page_size=size))
        for shape in ((64, 2048), (64, 0))
        for size in (64, 16)
    ),
)

# A decode step and a prefill.
LAYER = (
    *(
        Case(problem(tokens), "graph")
        for problem in (problems.LatentRows, problems.RotateHeads, problems.RopeCacheWrite)
        for tokens in (64, 8192)
    ),
    Case(problems.ConcatMlaQ(8192)),
    Case(problems.MergeStates(8192)),
    *(Case(problem(64, 128), "graph") for problem in (problems.PackSeq, problems.UnpackSeq)),
)

DEEPSEEK_V4 = (
    *(Case(problems.Compress("model1", ratio, tokens=8192), "graph") for ratio in (4, 128)),
    *(Case(problems.Compress("model1", ratio, requests=128), "graph") for ratio in (4, 128)),
    *(Case(problems.Compress(name, 4, tokens=8192), "graph") for name in ("index_fp8", "index_mxfp4")),
    Case(problems.Compress("model1", 4, tokens=8192, dtype="bfloat16"), "graph"),
    *(
        Case(problem(8192), "graph")
        for problem in (
            problems.QKVNorm,
            problems.RotateAndCache,
            problems.InverseRopeQuantize,
            problems.IndexWorkspace,
        )
    ),
    *(Case(problem(tokens), "graph") for problem in (problems.MhcPre, problems.MhcPost) for tokens in (64, 8192)),
)

CASES = (
    *DENSE_DECODE,
    *SPARSE_DECODE,
    *SPARSE_PREFILL,
    *SPARSE_ATTENTION,
    *INDEXER_LOSS,
    *DENSE_PREFILL,
    *PAGED_ATTENTION,
    *KV_CACHE,
    *INDEXER,
    *TURBOQUANT,
    *LAYER,
    *DEEPSEEK_V4,
)
