"""Build the sources of FlashLatte's kernel for the Hugging Face Hub from the package.

    python hub/build.py FOLDER

FOLDER gets the inputs of ``kernel-builder``: build.toml, flake.nix, CARD.md, tests/ and torch-ext/flashlatte/. Its
package consists of hub/entry.py and the modules that it needs, with relative imports, since the Hub loads a kernel
under a different name.
"""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

from rewrite import ROOT_MODULE, Module

HUB = Path(__file__).resolve().parent
REPOSITORY = HUB.parent
PACKAGE = "flashlatte"
COPIED = ("flake.nix", "CARD.md", "tests")
# Packages that code on the Hub may import in addition to the standard library.
ALLOWED = ("torch", "triton")
INTERPRETER = "triton.runtime.interpreter"
ROOT_TEXT = '"""The name that this package was loaded under."""\n\nROOT = __package__\n'


def main(folder: Path) -> None:
    """Write the kernel's sources into ``folder``, which must be empty or not exist."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    package = folder / "torch-ext" / PACKAGE
    package.mkdir(parents=True)
    for name, module in closure().items():
        check_imports(name, module)
        path = package / source_path(name).relative_to(REPOSITORY / PACKAGE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.rewritten())
    (package / "__init__.py").write_text(entry().rewritten())
    (package / f"{ROOT_MODULE}.py").write_text(ROOT_TEXT)
    (folder / "build.toml").write_text((HUB / "build.toml").read_text().format(version=version().partition(".")[0]))
    for name in COPIED:
        if (HUB / name).is_dir():
            shutil.copytree(HUB / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(HUB / name, folder / name)
    shutil.copyfile(REPOSITORY / "LICENSE", folder / "LICENSE")


def entry() -> Module:
    """hub/entry.py, which becomes the package's ``__init__.py``."""
    return Module(PACKAGE, (HUB / "entry.py").read_text(), is_package=True)


def closure() -> dict[str, Module]:
    """The modules that the entry imports, directly or indirectly, by name.

    All modules of an operation are included, since implementations are imported when they first run.
    """
    found: dict[str, Module] = {}
    wanted = needs(entry())
    while wanted:
        name = wanted.pop()
        if name not in found:
            path = source_path(name)
            found[name] = Module(name, path.read_text(), is_package=path.name == "__init__.py")
            wanted |= needs(found[name]) | parents(name) | operation_of(name)
    return found


def needs(module: Module) -> set[str]:
    """The modules that a module names, without the package's own ``__init__``."""
    found = {longest_module(name) for name in module.imports | module.paths}
    missing = {name for name in module.imports if longest_module(name) == PACKAGE}
    if missing:
        raise ValueError(f"names of the package itself, which has others on the Hub: {sorted(missing)}")
    return found - {PACKAGE}


def parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(2, len(parts))}


def operation_of(name: str) -> set[str]:
    """All modules of the operation that a module is part of."""
    parts = name.split(".")
    if parts[1] != "ops" or len(parts) < 3:
        return set()
    root = REPOSITORY / PACKAGE / "ops" / parts[2]
    paths = (path.relative_to(REPOSITORY).with_suffix("") for path in root.rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__") for path in paths}


def longest_module(name: str) -> str:
    """The module that a dotted name begins with."""
    while not is_module(name):
        name = name.rpartition(".")[0]
    return name


def is_module(name: str) -> bool:
    path = REPOSITORY.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def source_path(name: str) -> Path:
    path = REPOSITORY.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def check_imports(name: str, module: Module) -> None:
    """Refuse a module that imports what a kernel on the Hub may not."""
    imported: list[str] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.append(node.module or "")
    # Triton's interpreter imports numpy itself.
    allowed = {*sys.stdlib_module_names, *ALLOWED, PACKAGE, *(("numpy",) if INTERPRETER in imported else ())}
    refused = sorted({other for other in imported if other.partition(".")[0] not in allowed})
    if refused:
        raise ValueError(f"{name} imports {', '.join(refused)}, which a kernel on the Hub may not")


def version() -> str:
    """The package's version, read without importing it."""
    tree = ast.parse((REPOSITORY / PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{PACKAGE}/__init__.py has no __version__")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python hub/build.py FOLDER")
    main(Path(sys.argv[1]))
    print(f"The kernel's sources are in {sys.argv[1]}")
