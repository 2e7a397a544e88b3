"""Progress bars are for somebody who watches."""

import sys

import pytest

from jaxspec.progress import watched


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_shown_where_somebody_watches_and_as_asked(terminal, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert watched(None) == terminal and watched(True) and not watched(False)
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    assert watched(None) and not watched(False)
