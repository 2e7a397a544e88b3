"""Engines of few programs, where a test is about something else than which of them runs."""

import dataclasses

import jax

from jaxspec.engine import buckets
from jaxspec.engine.programs import Programs


def prompt_rows(patch, rows):
    """Calls that compute prompts have so many rows at most, while the patch (a pytest.MonkeyPatch) lasts."""
    patch.setattr(buckets, "PREFILL_ROWS", rows)
    patch.setattr(buckets, "MOST_PREFILL_ROWS", rows)


def few_programs(patch):
    """One for prompts of every length and one for every number of sequences, while the patch lasts."""
    prompt_rows(patch, buckets.PREFILL_CHUNK)
    patch.setattr(buckets.Buckets, "decode", property(lambda self: [self.slots]))


def shared_programs(patch):
    """LLMs whose programs would be the same have them lowered and compiled once, while the patch lasts."""
    made, lowered = {}, Programs._lowered

    def shared(self, program, pool):
        key = _what_is_compiled(self, program)
        if key in made:
            return lambda: made[key]
        compile = lowered(self, program, pool)

        def compiled():
            made[key] = compile()
            return made[key]

        return compiled

    patch.setattr(Programs, "_lowered", shared)


def _what_is_compiled(programs, program):
    """All that a program of an LLM depends on, but for code that a test replaces."""
    trees = programs._weights, programs.state, programs.automata if program.structured or program.of_automata else None
    leaves, form = jax.tree.flatten(trees)
    shapes = tuple((x.shape, x.dtype, x.weak_type, x.sharding) for x in leaves)
    settings = dataclasses.replace(programs.settings, seed=0, progress=False)
    config = tuple(repr(getattr(jax.config, name, value)) for name, value in sorted(jax.config.values.items()))
    return program, settings, programs.slots, programs.devices, programs._models, form, shapes, config
