"""Make a module of a package independent of the package's name: relative imports, and module paths from its root."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

# The module that holds the package's name at run time, and the name that rewritten modules give it.
ROOT_MODULE, ROOT_NAME = "_root", "_ROOT"
_Located = ast.stmt | ast.expr


@dataclass(frozen=True)
class _Edit:
    """``text[start:end]``, in bytes of UTF-8, becomes ``replacement``."""

    start: int
    end: int
    replacement: str


class Module:
    """One module's source, and what it names of its own package.

    Attributes:
        tree: the source, parsed.
        imports: dotted names, absolute: ``package.module.name`` for each name of a ``from`` import.
        paths: dotted names at the beginning of strings that are module paths (``"package.module:function"``).
    """

    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        """``name``: dotted, from the package on, as ``flashlatte.ops.topk.api``."""
        self.package = name.partition(".")[0]
        self.tree = ast.parse(text, name)
        self.imports: set[str] = set()
        self.paths: set[str] = set()
        self._name, self._bytes = name, text.encode()
        self._dots = "." * (name.count(".") + is_package)
        self._edits: list[_Edit] = []
        self._lines = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._names_root = False
        self._visit(self.tree)

    def rewritten(self) -> str:
        """The source with relative imports only."""
        edits = list(self._edits)
        if self._names_root:
            after = self._after_future_imports()
            edits.append(_Edit(after, after, f"\n\nfrom {self._dots}{ROOT_MODULE} import ROOT as {ROOT_NAME}"))
        text = self._bytes
        for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
            text = text[: edit.start] + edit.replacement.encode() + text[edit.end :]
        return text.decode()

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Import):
            self._refuse_absolute(node)
        elif isinstance(node, ast.ImportFrom):
            self._take_import(node)
        elif isinstance(node, ast.JoinedStr):
            self._take_f_string(node)
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    self._visit(part.value)
            return
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._take_string(node, node.value)
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _refuse_absolute(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == self.package:
                raise ValueError(f"{self._where(node)}: write 'from … import …' instead of 'import {alias.name}'")

    def _take_import(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.partition(".")[0] != self.package:
            return
        self.imports |= {f"{module}.{alias.name}" for alias in node.names}
        self._replace(node, rf"from\s+{re.escape(module)}\b", f"from {self._dots}{module[len(self.package) + 1 :]}")

    def _take_f_string(self, node: ast.JoinedStr) -> None:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and self._is_path(node, first.value):
            # Before Python 3.12 a part of an f-string has no position of its own.
            self._replace(node, rf"([rR]?[fF][rR]?[\"']+){self.package}\b", rf"\g<1>{{{ROOT_NAME}}}")
            self.paths.add(first.value.rstrip(".").partition(":")[0])
            self._names_root = True

    def _take_string(self, node: ast.Constant, value: str) -> None:
        if not self._is_path(node, value):
            return
        if value == self.package:
            self._replace(node, r"(?s).*", ROOT_NAME)
        else:
            _, end = self._span(node)
            self._replace(node, rf"[rR]?([\"']+){self.package}\b", rf"({ROOT_NAME} + \1")
            self._edits.append(_Edit(end, end, ")"))
        self.paths.add(value.partition(":")[0])
        self._names_root = True

    def _is_path(self, node: _Located, value: str) -> bool:
        """Whether a string is a module path of this package, as ``package.module:name`` or the beginning of one."""
        if re.fullmatch(rf"{self.package}(\.\w+)*(\.|:\w*)?", value):
            return True
        if re.search(rf"\b{self.package}\.\w", value):
            raise ValueError(f"{self._where(node)}: a module path within a longer string: {value!r}")
        return False

    def _replace(self, node: _Located, pattern: str, replacement: str) -> None:
        """Replace what ``pattern`` matches at the beginning of a node's source."""
        start, end = self._span(node)
        match = re.match(pattern, self._bytes[start:end].decode())
        if match is None:
            raise ValueError(f"{self._where(node)}: cannot be rewritten: {self._bytes[start:end].decode()!r}")
        length = len(match.group().encode())
        self._edits.append(_Edit(start, start + length, match.expand(replacement)))

    def _after_future_imports(self) -> int:
        """Where the first import may stand: behind the docstring and imports from __future__."""
        last = 0
        for node in self.tree.body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                _, last = self._span(node)
                continue
            break
        return last

    def _span(self, node: _Located) -> tuple[int, int]:
        """Where a node's source begins and ends, in bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _where(self, node: _Located) -> str:
        return f"{self._name}, line {node.lineno}"
