"""Python reads this as it starts in a process of the tests, which finds no PyTorch then: transformers would spend seconds importing it.

jaxspec itself asks for none. The tests that compare with PyTorch do so in their own process.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
