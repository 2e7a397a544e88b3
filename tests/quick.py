"""Engines of few programs, where a test is about something else than which of them runs."""

from jaxspec.engine import runner


def few_programs(patch):
    """One for prompts of every length and one for every number of sequences, while the patch (a pytest.MonkeyPatch) lasts."""
    patch.setattr(runner, "PREFILL_ROWS", runner.PREFILL_CHUNK)
    patch.setattr(runner.Runner, "decode_buckets", property(lambda self: [self.slots]))
