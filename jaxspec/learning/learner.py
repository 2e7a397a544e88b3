"""A learner: the float32 master weights of a drafter, and updates of them on texts that a target has written.

An update is another pass of the target over whole texts, as in `jaxspec.train`: what the loop computed of them is gone by then (rings of
sliding layers, hidden states), and to keep it would take more than the pass. See benchmarks/results/2026-11-22-learning.md.

On a mesh, a batch lies over "data" and weights as the placement says. The update is one program of the whole mesh, which XLA cuts up: it
sums the gradients over "data".
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxspec.collectives import DATA
from jaxspec.interrupts import compiled
from jaxspec.learning.losses import Batch, distil_loss
from jaxspec.learning.reservoir import Reservoir
from jaxspec.learning.settings import Learn, objective_of, parts
from jaxspec.learning.update import join, optimizer, split, updater
from jaxspec.sharding.kv_heads import unspread
from jaxspec.sharding.placement import Placement
from jaxspec.sharding.specs import WHOLE

WARM = 10  # updates until the learning rate is reached, from the beginning and after weights were given up
LEAST = 2  # batches of texts that there must be before the first update


def rate_of(rate: float) -> optax.Schedule:
    """The learning rate by update: it rises for WARM updates, then falls as the inverse square root. Nobody knows when a job ends."""

    def at(count: Any) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1.0
        return rate * jnp.minimum(step / WARM, jnp.sqrt(WARM / step))

    return at


class Learner:
    """Updates of a drafter's weights.

    target: the weights that the LLM computes with, as `Placement.spread` gives them. drafter: the drafter's, as `Placement.place` lays
    them out. Neither is changed. num_draft_tokens: drafts of a round. max_len: tokens of the longest text.
    """

    def __init__(self, target: Any, drafter: Any, learn: Learn, *, num_draft_tokens: int, max_len: int, placement: Placement):
        objective = objective_of(learn, drafter, num_draft_tokens)
        self.learn, self._placement, self.target = learn, placement, target
        self.length = min(learn.length, max_len)
        self.texts = Reservoir(learn.texts, learn.seed)
        self.steps = 0  # updates so far
        self.loss = math.nan  # of the last update
        self.step_seconds = 0.0  # of an update, measured when it was compiled
        self._shape = parts(learn, target.config.vocab_size, placement.shards)
        self._tx = optimizer(rate_of(learn.rate))
        trained, kept = split(drafter)
        self._kept, self._dtypes = kept, jax.tree.map(lambda x: x.dtype, trained)
        self._scale = 1.0  # of the learning rate
        self.masters: Any = jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)  # copies, since updates take them along
        whole = placement.sharding(WHOLE)
        self._shardings: Any = None  # of masters, moments and the rest
        if whole is not None:
            shapes = jax.eval_shape(self._tx.init, self.masters)
            of_masters = jax.tree.map(lambda x: x.sharding, self.masters)
            with jax.numpy_dtype_promotion("standard"):
                of_moments = optax.tree.map_params(self._tx, lambda _, to: to, shapes, of_masters, transform_non_params=lambda _: whole)
            self._shardings = of_masters, of_moments, whole
        self._begin = jax.jit(self._tx.init, out_shardings=None if self._shardings is None else self._shardings[1])
        self.moments: Any = self._begin(self.masters)

        def loss(drafter: Any, target: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            return distil_loss(unspread(placement.spread(drafter)), target, batch, key, objective)

        self._update: Any = updater(loss, self._tx, self._rounded, seed=learn.seed, accumulate=self._shape[0], shardings=self._shardings)
        self._candidate: Any = jax.jit(self._rounded, out_shardings=None if whole is None else jax.tree.map(lambda x: x.sharding, drafter))
        self.compiled: Any = None  # the update, once `compile` has been called

    @property
    def lost(self) -> bool:
        """Whether an update that failed or was interrupted has taken the master weights along; see `begin_at`."""
        return any(x.is_deleted() for x in jax.tree.leaves((self.masters, self.moments)))

    @property
    def ready(self) -> bool:
        """Whether there are texts enough for an update."""
        return len(self.texts) >= min(LEAST * self.learn.batch, self.learn.texts)

    def compile(self) -> None:
        """Compiles the update, once, and times it, by updates that change nothing."""
        if self.compiled is None:
            nothing = self._arguments(self._empty(), 0.0)[2:]
            update = compiled(self._update, self.masters, self.moments, *nothing)
            kept = jax.tree.map(jnp.copy, self.moments)
            try:
                for _ in range(2):  # the first run takes longer
                    started = time.perf_counter()
                    self.masters, self.moments, _ = jax.block_until_ready(update(self.masters, self.moments, *nothing))
                    self.step_seconds = time.perf_counter() - started
            finally:
                self.moments = kept
            jax.block_until_ready(self.candidate())
            self.compiled = update

    def add(self, ids: np.ndarray, given: int) -> None:
        """Takes in a text. ids: [n] int32. given: how many of them are its prompt."""
        if len(ids) >= given + 2:  # the first token that is drafted is the second one that was written
            self.texts.add(ids, given)

    def step(self) -> None:
        """One update, whose end it waits for. Raises FloatingPointError if its loss or gradient is not finite; then the master weights are
        of no use any more."""
        self.compile()
        count, size = self._shape
        batch = self.texts.batch(self.steps, count * size, self.length)
        shaped = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), batch)
        # With the weights, as an interrupt may end the wait for what comes of them.
        (self.masters, self.moments, metrics), self.steps = self.compiled(*self._arguments(shaped, self._scale)), self.steps + 1
        found = jax.device_get(metrics)
        self.loss = float(found["loss"])
        for name in ("loss", "gradient"):
            if not math.isfinite(found[name]):
                raise FloatingPointError(f"the {name} of update {self.steps} is {found[name]}")

    def candidate(self) -> Any:
        """The newest weights as the drafter has them, as `Placement.place` lays them out."""
        return compiled(self._candidate, self.masters, self._kept)(self.masters, self._kept)

    def begin_at(self, drafter: Any) -> None:
        """Gives up the newest weights for a drafter's, and learns from there."""
        trained, self._kept = split(drafter)
        self.masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)
        self.moments = self._begin(self.masters)

    def go_back(self, drafter: Any) -> None:
        """The same, in steps of half the size from then on."""
        self.begin_at(drafter)
        self._scale /= 2

    @property
    def state(self) -> tuple[Any, Any, np.ndarray]:
        """What a killed run needs to resume: masters, moments and (updates, scale of the learning rate)."""
        return self.masters, self.moments, np.asarray([self.steps, self._scale])

    @state.setter
    def state(self, state: tuple[Any, Any, Any]) -> None:
        self.masters, self.moments, (steps, scale) = state
        self.steps, self._scale = int(steps), float(scale)

    @property
    def target(self) -> Any:
        """The target, as the LLM computes with it."""
        return self._target

    @target.setter
    def target(self, target: Any) -> None:
        self._target = unspread(target)

    def close(self) -> None:
        """Gives the devices' memory back."""
        self._target = self.masters = self.moments = self._kept = self.compiled = self._update = self._candidate = None

    def _rounded(self, masters: Any, kept: Any) -> Any:
        return join(jax.tree.map(lambda x, dtype: x.astype(dtype), masters, self._dtypes), kept)

    def _empty(self) -> Batch:
        count, size = self._shape
        zeros = functools.partial(np.zeros, dtype=np.int32)
        return Batch(zeros((count, size, self.length)), zeros((count, size)), zeros((count, size)))

    def _arguments(self, batch: Batch, scale: float) -> tuple[Any, ...]:
        batch = jax.device_put(batch, self._placement.sharding(PartitionSpec(None, DATA)))
        whole = self._placement.sharding(WHOLE)
        step, scale = jax.device_put((np.int32(self.steps), np.float32(scale)), whole)
        return self.masters, self.moments, self._kept, self._target, batch, step, scale
