"""What a long run says while it goes on: a line that is written over on a terminal, lines in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = bool | Callable[[str], None]
"""True for lines on stderr, False for none, or a function that gets each line."""


class Reporter:
    """Says how a run goes, to whom `progress` says."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def status(self, line: str) -> None:
        """A line that the next one may take the place of."""
        self._say(line, over=True)

    def note(self, line: str) -> None:
        """A line that stays."""
        self._say(line, over=False)

    def _say(self, line: str, *, over: bool) -> None:
        if callable(self.progress):
            self.progress(line)
        elif self.progress:
            terminal = sys.stderr.isatty()
            start, end = ("\r\033[K" if terminal else ""), ("" if over and terminal else "\n")
            sys.stderr.write(f"{start}{line}{end}")
            sys.stderr.flush()
