"""Python sources of the projects whose functions FlashLatte replaces, as fetched by ``.ci/peers.py``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "peers"
PEERS = Path(__file__).parents[2] / ".ci" / "peers.py"
MISSING = "the sources of other projects are missing: python .ci/peers.py build/peers"


def folders(name: str) -> list[Path]:
    """The folder of each fetched version of a wheel, the oldest first."""
    found = FOLDER.glob(f"{name}-[0-9]*")
    return sorted(found, key=lambda folder: [int(word) for word in folder.name.rpartition("-")[2].split(".")[:3]])


def listed() -> list[str]:
    """The names of all folders that ``.ci/peers.py`` fetches."""
    versions = re.findall(r"""^    \("([\w-]+)", "([\w.]+)"\),$""", PEERS.read_text(), re.MULTILINE)
    return [f"{name}-{version}" for name, version in versions]


def definition(folder: Path, places: Sequence[str], name: str) -> ast.arguments:
    """The arguments of a function or method ("Class.method") in the first of ``places`` that defines it.

    Of several definitions the last counts: those before it are overloads.
    """
    for place in places:
        file = folder / place
        found = _definitions(ast.parse(file.read_text()).body, name.split(".")) if file.exists() else []
        if found:
            return found[-1].args
    raise LookupError(f"{name} of {folder.name} is not in {' or '.join(places)}: it was moved or removed")


def _definitions(body: list[ast.stmt], names: list[str]) -> list[ast.FunctionDef]:
    if len(names) == 1:
        return [node for node in body if isinstance(node, ast.FunctionDef) and node.name == names[0]]
    return [
        found
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == names[0]
        for found in _definitions(node.body, names[1:])
    ]


@functools.cache
def functions(file: Path) -> dict[str, ast.FunctionDef]:
    """All functions of a file by name, including nested ones."""
    return {node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
