"""Engines of few programs, where a test is about something else than which of them runs."""

from jaxspec.engine import buckets


def prompt_rows(patch, rows):
    """Calls that compute prompts have so many rows at most, while the patch (a pytest.MonkeyPatch) lasts."""
    patch.setattr(buckets, "PREFILL_ROWS", rows)
    patch.setattr(buckets, "MOST_PREFILL_ROWS", rows)


def few_programs(patch):
    """One for prompts of every length and one for every number of sequences, while the patch lasts."""
    prompt_rows(patch, buckets.PREFILL_CHUNK)
    patch.setattr(buckets.Buckets, "decode", property(lambda self: [self.slots]))
