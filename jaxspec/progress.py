"""Whether anybody watches a progress bar."""

import sys


def watched(progress: bool | None) -> bool:
    """Whether to show progress bars: as `progress` says, or for None where stderr is a terminal or the program is a notebook's."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) if progress is None else progress
