"""Keep quotes of code in the documentation equal to the source.

    python .ci/quotes.py            # update the quoted statements
    python .ci/quotes.py --check    # only compare; exit code 1 if one differs

A quote is a code block after one of these comments. ``NAME`` is a function, a class, or the beginning of a statement.

    <!-- source: PATH NAME -->      the whole statement
    <!-- lines: PATH -->            single lines, each of which PATH must contain; these are never rewritten
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/**/*.md", "*.md", "tests/**/*.md")
QUOTE = re.compile(r"(<!-- (source|lines): (\S+)(?: (\S+))? -->\n```\w*\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)


def statement(path: str, name: str) -> str:
    """The source of a top-level statement, with its decorators."""
    text = (ROOT / path).read_text()
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == name or ast.unparse(node).startswith(name):
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    raise ValueError(f"{path} has no statement {name}")


def refreshed(text: str, differs: Callable[[str], None]) -> str:
    """A page with its quotes updated from the source; ``differs`` is called with a description of each difference."""

    def replace(quote: re.Match[str]) -> str:
        opening, kind, path, name, code, closing = quote.groups()
        if kind == "source":
            source = statement(path, name)
            if source != code:
                differs(f"{path} {name}")
            return opening + source + closing
        known = {line.strip() for line in (ROOT / path).read_text().splitlines()}
        for line in code.splitlines():
            if line.strip() not in known:
                differs(f"{path} does not contain the line {line.strip()!r}")
        return quote.group()

    return QUOTE.sub(replace, text)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    differences: list[str] = []
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern)}):
        text = page.read_text()
        of_page: list[str] = []
        new = refreshed(text, of_page.append)
        differences += [f"{page.relative_to(ROOT)}: {difference}" for difference in of_page]
        if new != text and not arguments:
            page.write_text(new)
    for difference in differences:
        print(difference)
    return bool(arguments and differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
