"""Options of XLA's compiler, which come and go from one version to the next."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import jax


def known(options: Mapping[str, Hashable]) -> dict[str, Any]:
    """These options, to be given to a compilation, if this XLA knows them all, and none if it does not. Without options that are asked for
    here a program is slower, not wrong. The first call with some takes milliseconds: a program that does nothing is compiled with them."""
    return dict(options) if _are_known(tuple(options.items())) else {}


@functools.cache
def _are_known(options: tuple[tuple[str, Any], ...]) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=dict(options))
    except Exception as error:  # of many kinds, from one version of XLA to the next
        if not any(name in str(error) for name, _ in options):
            raise
        return False  # XLA knows an option by another name, or other values of it
    return True
