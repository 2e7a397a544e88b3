"""Every Python block of the README runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_block_runs(block, capsys):
    exec(compile(BLOCKS[block], f"README.md block {block}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "the block printed nothing"


def test_the_batch_script_stays_short():
    """The README says about thirty lines: what a batch-generation script needs of the functional layer."""
    lines = [line for line in BLOCKS[-1].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 32
