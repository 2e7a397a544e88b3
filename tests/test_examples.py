"""Scripts in the folder examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow  # two steps take half a minute, and tests of new weights cover what they call
def test_reinforcement_goes_on_with_new_weights():
    command = [sys.executable, EXAMPLES / "reinforce.py", "--steps", "2", "--samples", "4", "--tokens", "16"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    steps = re.findall(r"step (\d): (\d+)% parse, ([\d.]+) tokens a round", said)
    assert [step for step, _, _ in steps] == ["0", "1"] and all(float(tokens) > 1.2 for _, _, tokens in steps)
