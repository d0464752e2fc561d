"""Removes paths, host names and user names from the texts of a report."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
import sys
import tempfile
from pathlib import Path

MOST_CHARACTERS = 2000
# An absolute path, or one below the home directory: at least one folder, and the last part, which is kept.
_PATH = re.compile(
    r"(?:[A-Za-z]:[\\/]|~[\w.-]*[\\/]|(?<![\w.)])[\\/])(?:[^\s\\/:'\"<>|,;()]+[\\/])*([^\s\\/:'\"<>|,;()]*)"
)
# Shorter names are not removed: they occur in other words.
_SHORTEST_NAME = 3


def without_private(text: str) -> str:
    """``text`` without folders, host name and user name: the last 2,000 characters.

    The last part of a path is kept.
    """
    for folder in sorted(_folders(), key=len, reverse=True):
        text = text.replace(folder, "/…")
    text = _PATH.sub(r"…/\1", text)
    for word, name in _names():
        if len(name) >= _SHORTEST_NAME:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", f"<{word}>", text, flags=re.IGNORECASE)
    return text if len(text) <= MOST_CHARACTERS else "…" + text[1 - MOST_CHARACTERS :]


def _folders() -> set[str]:
    """Folders whose paths may have spaces, which the pattern of a path does not cover."""
    found = {str(Path(__file__).resolve().parents[2]), sys.prefix, tempfile.gettempdir(), str(Path.cwd())}
    with contextlib.suppress(RuntimeError):  # no home directory
        found.add(str(Path.home()))
    return {folder for folder in found if len(Path(folder).parts) > 1}


def _names() -> list[tuple[str, str]]:
    """(kind, name) of the host, with and without its domain, and of the user."""
    host = socket.gethostname()
    names = [("host", host), ("host", host.partition(".")[0])]
    with contextlib.suppress(OSError, KeyError):  # a user without a name, as in a container
        names.append(("user", getpass.getuser()))
    return names
