"""FlashMLA's functions with the same arguments: ``import flashlatte.flash_mla as flash_mla``.

The conventions are FlashMLA's: the lse of a row without keys is +inf. The functions accept the signatures of FlashMLA
1.0.0 (commit 9241ae3), of vLLM 0.33's copy and of sgl-flash-mla 1.0.0, by position and by keyword. They also support
any number of heads, any page size, per-tensor fp8 caches and queries in dense decode, and bf16 caches and any number of
indices in sparse decode. Contradictory arguments raise ``ValueError`` or ``TypeError``.

``python -m flashlatte.flash_mla --install-alias DIR`` writes a package ``flash_mla`` into DIR that forwards to this
module, for programs that import the top-level name.
"""

from __future__ import annotations

from pathlib import Path

from flashlatte.flash_attn_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashlatte.flash_mla.decode import flash_mla_with_kvcache
from flashlatte.flash_mla.prefill import flash_mla_sparse_fwd
from flashlatte.flash_mla.schedule import FlashMLASchedMeta, get_mla_decoding_metadata, get_mla_metadata, has_legacy
from flashlatte.runtime import alias

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]

# The version of FlashMLA whose interface this is, for programs that check it.
__version__ = "1.0.0"

ALIAS = '''"""The package name ``flash_mla``, implemented by FlashLatte."""

from flashlatte.flash_mla import *  # noqa: F403
from flashlatte.flash_mla import __version__  # noqa: F401
'''

ALIAS_INTERFACE = '''"""The module ``flash_mla.flash_mla_interface``, implemented by FlashLatte."""

from flashlatte.flash_mla import *  # noqa: F403
'''


ALIAS_FILES = {"__init__.py": ALIAS, "flash_mla_interface.py": ALIAS_INTERFACE}


def install_alias(directory: Path) -> Path:
    """Write the package ``flash_mla`` into a directory and return its path.

    Raises an error if the directory has another ``flash_mla``.
    """
    return alias.install(directory, "flash_mla", ALIAS_FILES)


def main(argv: list[str] | None = None) -> int:
    return alias.main("flashlatte.flash_mla", (__doc__ or "").split("\n")[0], "flash_mla", ALIAS_FILES, argv)
