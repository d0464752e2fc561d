"""One process's part in an engine: the only one, the one that takes requests, or one that follows."""

from __future__ import annotations

from typing import TypeVar

from flashlatte.engine.ranks import Ranks
from flashlatte.engine.runner import Runner

_Member = TypeVar("_Member", bound="Member")


class Member:
    """What an engine is to its process. ``with engine:`` ends with ``close``.

    Attributes:
        ranks: that compute together; None: this process alone.
        runner: of this process.
    """

    ranks: Ranks | None
    runner: Runner

    @property
    def leads(self) -> bool:
        """Whether this process takes requests: rank 0, or the only one."""
        return self.ranks is None or self.ranks.leads

    def follow(self) -> None:
        """Compute this rank's part of what rank 0 schedules, until that closes its engine.

        Raises:
            ValueError: on rank 0.
            RuntimeError: another rank failed; says which, and why.
        """
        if self.ranks is None or self.leads:
            raise ValueError("follow() is for ranks other than 0, which schedules and closes the engine")
        self.runner.follow()
        self.ranks.part()

    def close(self) -> None:
        """Let the other ranks go; of one process, nothing.

        Raises:
            RuntimeError: one has failed since the last step; says which, and why.
        """
        if self.ranks is not None and self.leads and not self.ranks.closed:
            with self.ranks.failing_together():
                self.ranks.send(None)
            self.ranks.part()

    def __enter__(self: _Member) -> _Member:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_leads(self, call: str) -> None:
        """Raise ValueError where ``call`` would do nothing, or schedule what nobody follows."""
        if self.ranks is not None and (not self.leads or self.ranks.closed):
            raise ValueError(f"{call}() is for rank 0 of an engine that is not closed; other ranks follow()")
