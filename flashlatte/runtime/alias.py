"""Opt-in packages that map another project's top-level name to a drop-in replacement in this library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def install(directory: Path, name: str, files: Mapping[str, str]) -> Path:
    """Write a package into a directory; returns its path.

    Args:
        directory: the parent of the package; created if it does not exist.
        name: the package's name.
        files: file contents by file name, including ``__init__.py``.

    Raises:
        FileExistsError: the directory has another package of this name.
    """
    package = directory / name
    init = package / "__init__.py"
    if package.exists() and not (init.is_file() and init.read_text() == files["__init__.py"]):
        raise FileExistsError(f"{package} exists already and was not written by this command; it is left as it is")
    package.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (package / file).write_text(text)
    return package


def main(module: str, description: str, name: str, files: Mapping[str, str], argv: list[str] | None) -> int:
    """The command ``python -m MODULE --install-alias DIR``; returns its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--install-alias",
        metavar="DIR",
        type=Path,
        required=True,
        help=f"write a package {name} into DIR that forwards to FlashLatte",
    )
    directory = parser.parse_args(argv).install_alias
    try:
        package = install(directory, name, files)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{package} forwards to {module}; put {directory} on PYTHONPATH to use it")
    return 0
