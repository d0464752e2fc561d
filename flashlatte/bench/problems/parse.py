"""A problem from its text, as ``repr`` writes it."""

from __future__ import annotations

import ast

from flashlatte.bench import problems
from flashlatte.bench.problems import Problem


def parse(text: str) -> Problem:
    """The problem whose repr is ``text``: "TopK(rows=1, width=32768)", with or without names.

    Raises:
        ValueError: no such kind of problem, or something other than literals and problems in it.
    """
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"problem must be like TopK(rows=1, width=32768), got {text!r}: {error}") from error
    if not isinstance(found, Problem):
        raise ValueError(f"problem must be like TopK(rows=1, width=32768), got {text!r}")
    return found


def _value(node: ast.expr) -> object:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    if kind not in problems.__all__ or kind == "Problem":
        raise ValueError(f"no kind of problem is named {kind!r}")
    named = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
    return getattr(problems, kind)(*(_value(argument) for argument in node.args), **named)
