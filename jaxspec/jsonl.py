"""JSON Lines, as files of people have them: the one reader of a batch's requests and results and of texts to train on."""

from __future__ import annotations

import json
from typing import Any


def value(line: bytes) -> Any:
    """The value of one line of a file that is read as bytes, which ends lines at a line feed alone: a string may hold U+2028 or U+0085
    as it is. A byte order mark before it and a carriage return behind it say nothing.

    Raises ValueError for anything but JSON in UTF-8.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
