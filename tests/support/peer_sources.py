"""Python sources of the projects whose functions are stood in for, as ``.ci/peers.py`` fetches them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "peers"
MISSING = "the sources of other projects are missing: python .ci/peers.py build/peers"


def folders(name: str) -> list[Path]:
    """Of each fetched version of a wheel, the oldest first."""
    found = FOLDER.glob(f"{name}-[0-9]*")
    return sorted(found, key=lambda folder: [int(word) for word in folder.name.rpartition("-")[2].split(".")[:3]])


@functools.cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    """All functions of a file by name, those within others too."""
    return {node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
