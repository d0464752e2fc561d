"""Python sources of the projects whose functions FlashLatte replaces, as fetched by ``.ci/peers.py``."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "peers"
MISSING = "the sources of other projects are missing: python .ci/peers.py build/peers"


def folders(name: str) -> list[Path]:
    """The folder of each fetched version of a wheel, the oldest first."""
    found = FOLDER.glob(f"{name}-[0-9]*")
    return sorted(found, key=lambda folder: [int(word) for word in folder.name.rpartition("-")[2].split(".")[:3]])


@functools.cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    """All functions of a file by name, including nested ones."""
    return {node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
