"""JSON Lines as people write them. A batch's requests and results and the texts to train on are all read by this."""

from __future__ import annotations

import json
from typing import Any


def value(line: bytes) -> Any:
    """The value of one line. A byte order mark before it and a carriage return after it are ignored. Raises ValueError for anything but
    JSON in UTF-8.

    line: of a file that was opened in binary mode. Only a line feed ends a line there: a string may contain U+2028 or U+0085.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except json.JSONDecodeError as error:  # its own text counts lines, of which the file has others
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
