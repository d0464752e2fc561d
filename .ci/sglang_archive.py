"""Pack SGLang for a Hopper GPU machine that has PyTorch 2.11, Triton and torchvision, and no network.

    python .ci/sglang_archive.py FILE.tar.xz

The archive has SGLang's Python files and CUDA headers, sgl-kernel's extensions with code for sm_90 only, and the Python
packages that the machine lacks. FlashAttention-3 keeps bf16 kernels of MLA's head dims. On the machine, unpack it into
a folder, and start Python with PYTHONPATH=FOLDER:CHECKOUT. Prints each part's size. Exit code 3: a wheel cannot be
downloaded here.

SGLang 0.5.17 is the newest one whose sgl-kernel is built for PyTorch 2.11. FlashInfer comes without its CUDA sources:
SGLang imports it, and its kernels cannot be compiled. DeepGEMM and some of SGLang's own kernels come as CUDA sources,
compiled at their first call: the machine needs nvcc, a C++ compiler and ninja.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import fatbins
import packing

SGLANG = ("sglang==0.5.17", "sglang-kernel==0.4.5", "flashinfer-python==0.6.15.post1", "sgl-deep-gemm==0.1.5.post1")
# Packages that SGLang imports to run a model and PyTorch's usual image lacks, in versions that were tested together.
PACKAGES = (
    *packing.SHARED_PACKAGES,
    "apache-tvm-ffi==0.1.11",
    "blobfile==3.3.0",
    "compressed-tensors==0.18.0",
    "dill==0.4.1",
    "distro==1.9.0",
    "gguf==0.19.0",
    "huggingface-hub==1.33.0",
    "interegular==0.3.3",
    "jiter==0.19.0",
    "openai==2.6.1",
    "openai-harmony==0.0.8",
    "orjson==3.13.0",
    "outlines==0.1.11",
    "outlines-core==0.1.26",
    "python-multipart==0.0.34",
    "setproctitle==1.3.8",
    "tokenizers==0.22.2",
    "transformers==5.12.1",
    "uvicorn==0.54.0",
    "xgrammar==0.2.7",
    "zstandard==0.25.0",
)
# Mangled names of FlashAttention-3's kernels: head dims 64 and 512 (decode), 192 and 128 (prefill), bf16; then the
# template arguments causal, local and softcap.
KERNELS = re.compile(
    rb"CollectiveMainloopFwdSm90I\w{0,120}(?:Li64E\w{0,16}EEELi512|Li192EEEEEELi128)E\w{0,16}bfloat16_tEfN\w{1,4}_"
    rb"4arch4Sm90ELb[01]ELb0ELb0E"
)
OTHER_KERNELS = re.compile(rb"CollectiveMainloopFwdSm[89]")


def has_other_kernels(code: bytes) -> bool:
    """Whether a part of FlashAttention-3 can be left out. Compressed parts repeat kernels of the others."""
    return not code.startswith(b"\x7fELF") or (OTHER_KERNELS.search(code) is not None and not KERNELS.search(code))


EXTENSIONS: dict[str, fatbins.Unwanted | None] = {
    "sgl_kernel/sm90/common_ops.abi3.so": None,
    "sgl_kernel/flashmla_ops.abi3.so": None,
    "sgl_kernel/flash_ops.abi3.so": has_other_kernels,
}
LEFT_OUT = ("sglang/multimodal_gen/", "sglang/test/", "sgl_kernel/sm100/", "zstandard/_cffi.")
# SGLang imports it for notebooks.
STAND_INS = {"IPython/__init__.py": "", "IPython/display.py": "HTML = display = None\n"}


def wanted(name: str) -> bool:
    if name.startswith("flashinfer/"):
        return name.endswith(".py")
    if name.startswith(("sglang/", "sgl_kernel/")):
        return (not name.endswith(".so") or name in EXTENSIONS) and not name.startswith(LEFT_OUT)
    return not name.startswith(LEFT_OUT)


if __name__ == "__main__":
    sys.exit(packing.pack(Path(sys.argv[1]), (*SGLANG, *PACKAGES), wanted, EXTENSIONS, STAND_INS))
