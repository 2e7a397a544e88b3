"""Drafting: whose weights guess in the next call, those of the drafter in use or of a variant that is tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.decode.accept import COUPLED
from jaxspec.drafters.base import Drafter
from jaxspec.engine.call import Call
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import UNWRITTEN, Request
from jaxspec.engine.slots import Slots
from jaxspec.engine.trials import Tally, Trial
from jaxspec.model.paged_kv import PagedKV


class Drafting:
    """The drafter of a runner, what its rounds accept, and the trial of two variants of it, if there is one.

    drafter: the weights to begin with. programs, slots: the runner's, which learn of each change.
    """

    def __init__(self, drafter: Drafter, programs: Programs, slots: Slots):
        self.drafter: Any = drafter  # in use; None once this is closed
        self.trial: Trial | None = None  # of two variants of the drafter, as long as it is open; see `begin_trial`
        self.watching = False  # whether `watched` counts
        self.watched = np.zeros(2)  # rounds with drafts, and accepted drafts, of calls with the drafter in use
        self._programs, self._slots = programs, slots
        parts = jax.tree.leaves(programs.state.drafter, is_leaf=lambda part: isinstance(part, PagedKV))
        # Whether the drafter keeps K and V of its own, which its weights have computed.
        self.owns_kv = any(isinstance(part, PagedKV) for part in parts)
        self._writer: object = None
        self._writer = slots.writer = self._new_writer()  # of the drafter in use, see `Request.writer`

    def use(self, drafter: Drafter) -> None:
        """Runs with these weights from now on, and ends a trial. They are like those before in shapes and shardings. What other weights
        have computed serves no prompt any more."""
        self._use(drafter, self._writer if drafter is self.drafter else self._new_writer())

    def _use(self, drafter: Drafter, writer: object) -> None:
        self.drafter = self._programs.drafter = drafter
        self._writer = self._slots.writer = writer
        self.trial = None

    def _new_writer(self) -> object:
        return object() if self.owns_kv else self._writer

    def begin_anew(self) -> None:
        """Notes that the target has other weights: what was computed before serves no prompt any more, whatever drafts."""
        self._writer = self._slots.writer = object()
        if self.trial is not None:
            self.trial.writers = {name: object() for name in self.trial.writers}
            self.settle()

    def begin_trial(self, trial: Trial) -> None:
        """Lets variants of the drafter, which is one of them, take turns call by call, until there is a verdict: see `use`.

        They must have its shapes, static fields and placement. Raises ValueError for an acceptance rule with which the text depends on the
        drafter, and while another trial is open."""
        rule = self._programs.settings.accept.name
        if rule != COUPLED.name:
            raise ValueError(
                f"the acceptance rule is {rule!r}; only with {COUPLED.name!r} can drafters be tried, since texts do not change"
            )
        if self.trial is not None:
            raise ValueError(f"a trial of {' and '.join(self.trial.comparison.names)} is open; expected none")
        for name, weights in trial.variants.items():
            if weights is self.drafter:  # what it has computed before serves its calls
                trial.writers[name] = self._writer
        self.trial = trial
        self.settle()

    def settle(self) -> None:
        """Takes the variant of the next call; after the verdict of a trial that is the drafter, from now on."""
        if self.trial is None:
            return
        weights, writer = self.trial.weights, self.trial.writer if self.trial.apart else self._writer
        if self.trial.verdict is None:
            self._programs.drafter, self._slots.writer = weights, writer
        else:
            self._use(weights, writer)

    def written(self, requests: Sequence[Request]) -> None:
        """Notes that the next call computes rows of these requests."""
        for request in requests:
            if request.writer is UNWRITTEN:
                request.writer = self._slots.writer
            elif request.writer is not self._slots.writer:
                request.writer = None

    def see(self, accepted: np.ndarray, tally: Tally, call: Call) -> None:
        """Takes in rounds of a call. accepted: [N] int, the drafts that each round accepted. tally: of those rounds that count in a
        trial."""
        in_use = call.variant is None
        if call.variant is not None and self.trial is not None:
            in_use = self.trial.variants[call.variant] is self.drafter
            self.trial.see(call.variant, tally)
        if call.shape.num_draft_tokens and self.watching and in_use:
            self.watched = self.watched + (len(accepted), accepted.sum())

    def close(self) -> None:
        """Gives up the weights. What was counted stays."""
        self.drafter = self.trial = None
