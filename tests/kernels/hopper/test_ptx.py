"""Inline PTX of the Hopper kernels is only in ``kernels/hopper/ptx``."""

from __future__ import annotations

from pathlib import Path

import flashlatte

ROOT = Path(flashlatte.__file__).parent
PTX = ROOT / "kernels" / "hopper" / "ptx"


def test_inline_ptx_is_in_one_package():
    modules = [path for path in ROOT.rglob("*.py") if "hopper" in path.as_posix()]
    with_ptx = {path.parent for path in modules if "inline_asm_elementwise(" in path.read_text()}
    assert with_ptx == {PTX}
