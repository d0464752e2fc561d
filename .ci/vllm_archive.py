"""Pack vLLM for a Hopper GPU machine that has PyTorch, Triton and transformers, and no network.

    python .ci/vllm_archive.py FILE.tar.xz

The archive has vLLM's Python files, its compiled extensions with code for sm_90 only, and the Python packages that the
machine lacks. FlashAttention-3 keeps bf16 kernels of MLA's head dims. On the machine, unpack it into a folder, and
start Python with PYTHONPATH=FOLDER:CHECKOUT. Prints each part's size. Exit code 3: a wheel cannot be downloaded here.

vLLM 0.33 pins PyTorch 2.14. Its extensions use PyTorch's stable ABI, and also load in 2.11.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import fatbins
import packing

VLLM = "vllm==0.33.0"
# Packages that vLLM imports to run a model and PyTorch's usual image lacks, in versions that were tested together.
PACKAGES = (
    *packing.SHARED_PACKAGES,
    "apache-tvm-ffi==0.1.15.post2",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "compressed-tensors==0.17.0",
    "httpx2==2.16.2",
    "openai==3.57.0",
    "opentelemetry-exporter-otlp-proto-common==1.45.2",
    "opentelemetry-proto==1.45.2",
    "oss-harmony==0.0.11",
    "xgrammar==0.2.9",
)
# Mangled template arguments of FlashAttention-3's main loop: head dims 64 and 512 (decode), 192 and 128 (prefill).
OTHER_KERNELS = re.compile(
    rb"FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90I(?!\w{0,120}(?:Li64EEESA_SA_EEELi512|Li192EEEEEELi128)"
    rb"ENS_10bfloat16_t)"
)


def has_other_kernels(code: bytes) -> bool:
    return OTHER_KERNELS.search(code) is not None


EXTENSIONS: dict[str, fatbins.Unwanted | None] = {
    "vllm/_C_stable_libtorch.abi3.so": None,
    "vllm/_moe_C_stable_libtorch.abi3.so": None,
    "vllm/_flashmla_C.abi3.so": None,
    "vllm/_flashmla_extension_C.abi3.so": None,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": has_other_kernels,
}
# CUDA sources that are compiled at run time: DeepGEMM's, and kernels that MLA does not use.
LEFT_OUT = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/vllm-rs")

# The layers of V3.2 import this module, which imports CUTLASS's Python package. Its kernel is for sm_100.
STAND_INS = {
    "vllm/models/deepseek_v32/nvidia/ops/fused_q_cutedsl.py": "def is_fused_q_cutedsl_supported(*_, **__):\n"
    "    return False\n\n\nfused_q_cutedsl = None\n",
}


def wanted(name: str) -> bool:
    if not name.startswith("vllm/"):
        return True
    return (not name.endswith(".so") or name in EXTENSIONS) and not name.startswith(LEFT_OUT)


if __name__ == "__main__":
    sys.exit(packing.pack(Path(sys.argv[1]), (VLLM, *PACKAGES), wanted, EXTENSIONS, STAND_INS))
