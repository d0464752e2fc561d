"""DeepGEMM's functions for index logits with the same arguments: ``import flashlatte.deep_gemm as deep_gemm``.

The functions accept the signatures of DeepGEMM 2.8 and of earlier versions, by position and by keyword.
``fp8_mqa_logits`` and ``fp8_paged_mqa_logits`` take queries without scales, the ``fp8_fp4_…`` functions take a tuple,
and the ``…_sparse_…`` functions score candidate blocks only. They support 1 to 128 heads and any page size.

``python -m flashlatte.deep_gemm --install-alias DIR`` writes a package ``deep_gemm`` into DIR that forwards to this
module, for programs that import the top-level name. The package has only these functions, not DeepGEMM's matrix
products.
"""

from __future__ import annotations

from pathlib import Path

from flashlatte.deep_gemm.logits import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_mqa_logits_metadata,
    get_num_sms,
    get_paged_mqa_logits_metadata,
    set_num_sms,
)
from flashlatte.deep_gemm.sparse_logits import (
    fp8_fp4_paged_sparse_mqa_logits,
    fp8_fp4_sparse_mqa_logits,
    get_paged_sparse_mqa_logits_metadata,
    get_sparse_mqa_logits_metadata,
)
from flashlatte.runtime import alias

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_mqa_logits_metadata",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
    "set_num_sms",
]

ALIAS = '''"""DeepGEMM's functions for index logits, implemented by FlashLatte."""

from flashlatte.deep_gemm import *  # noqa: F403
'''
ALIAS_FILES = {"__init__.py": ALIAS}


def install_alias(directory: Path) -> Path:
    """Write the package ``deep_gemm`` into a directory and return its path.

    Raises an error if the directory has another ``deep_gemm``.
    """
    return alias.install(directory, "deep_gemm", ALIAS_FILES)


def main(argv: list[str] | None = None) -> int:
    return alias.main("flashlatte.deep_gemm", (__doc__ or "").split("\n")[0], "deep_gemm", ALIAS_FILES, argv)
