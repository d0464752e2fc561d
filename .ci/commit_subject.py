"""Check commit subjects: at most 72 characters, imperative, a capital first and no period last.

python .ci/commit_subject.py FILE             # a commit message, as git's commit-msg hook passes it
python .ci/commit_subject.py --range A..B     # the commits of a range, merges left out
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
# Subjects that git writes itself.
WRITTEN_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
VERBS = (
    *("add", "allow", "avoid", "build", "change", "check", "clean", "compile", "compute", "convert", "copy", "correct"),
    *("create", "delete", "describe", "document", "drop", "enable", "fix", "handle", "improve", "introduce", "make"),
    *("measure", "merge", "move", "optimize", "pass", "port", "prevent", "quantize", "raise", "reduce", "refactor"),
    *("refuse", "remove", "rename", "replace", "restore", "return", "rewrite", "run", "simplify", "speed", "split"),
    *("support", "test", "update", "use", "validate", "write"),
)


def problems(subject: str) -> list[str]:
    """Descriptions of a subject's violations of the rules; empty if there are none."""
    if subject.startswith(WRITTEN_BY_GIT):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"has {len(subject)} characters, and {LONGEST} are allowed")
    if not re.match(r"[A-Z]", subject):
        found.append("does not begin with a capital letter")
    if subject.endswith("."):
        found.append("ends with a period")
    first = re.split(r"[\s:]", subject, maxsplit=1)[0]
    if subject[len(first) : len(first) + 1] == ":":
        found.append(f"begins with a prefix, {first!r}: begin with the verb")
    elif first.lower() in _NOT_IMPERATIVE:
        found.append(f"is not imperative: {_NOT_IMPERATIVE[first.lower()].capitalize()!r}, not {first!r}")
    return found


def _other_forms(verb: str) -> list[str]:
    stem = verb[:-1] if verb.endswith(("e", "y")) else verb
    double = stem + stem[-1]
    third = verb + "es" if verb.endswith(("s", "x", "sh", "ch")) else verb + "s"
    regular = [third, verb + "ing", stem + "ing", double + "ing", stem + "ed", double + "ed"]
    return [*regular, stem + "ies", stem + "ied"] if verb.endswith("y") else regular


_NOT_IMPERATIVE = {form: verb for verb in VERBS for form in _other_forms(verb)}


def subject_of(message: str) -> str:
    """The first line of a commit message that is not one of git's comments."""
    return next((line for line in message.splitlines() if line.strip() and not line.startswith("#")), "")


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--range":
        log = ["git", "log", "--no-merges", "--format=%s", arguments[1]]
        subjects = subprocess.run(log, check=True, capture_output=True, text=True).stdout.splitlines()
    elif len(arguments) == 1:
        subjects = [subject_of(Path(arguments[0]).read_text(encoding="utf-8"))]
    else:
        print(__doc__, file=sys.stderr)
        return 2
    wrong = [f"{subject!r} {problem}" for subject in subjects for problem in problems(subject)]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
