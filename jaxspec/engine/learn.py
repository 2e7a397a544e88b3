"""Learning while an LLM works: between calls of the loop, its drafter learns from the texts that were just written.

Nothing of a text depends on the drafter with the rule "coupled", so weights may change at any time. The newest weights are taken only if
a trial on live traffic finds that they are accepted at least as much as those in use. K and V that a drafter keeps of its own (DFlash,
EAGLE-3, a draft model) stay as older weights computed them until their sequences end; this may cost a little acceptance. In trials of such
drafters only those sequences count that one of both has served alone.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxspec import checkpoint
from jaxspec.checkpoint.files import WEIGHTS_FILE, refuse_to_replace
from jaxspec.checks import expanded
from jaxspec.drafters.registry import abstract_drafter, load_drafter, save_trained
from jaxspec.engine.accounts import Accounts
from jaxspec.engine.device_lock import DeviceLock
from jaxspec.engine.drafting import Drafting
from jaxspec.engine.memory import learning_bytes, memory_limit, memory_used, size
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.shards import Shards
from jaxspec.engine.stats import LearningStats
from jaxspec.engine.trials import Comparison, Trial
from jaxspec.learning import checkpoints
from jaxspec.learning.pace import Pace
from jaxspec.learning.settings import Learn, learnable, objective_of
from jaxspec.sharding.placement import Placement

if TYPE_CHECKING:
    from jaxspec.learning.learner import Learner
    from jaxspec.model.target import TargetConfig

CURRENT, CANDIDATE = "current", "candidate"
STATE = "learning"  # folder of the state from which a killed run resumes
CLEAR = 2.0  # standard errors by which weights on trial are worse for sure
LOST = 3  # trials in a row that have to find so, the last one no less than the one before, for learning to go back
TOGETHER = 4  # updates in a row where several data shards have to wait for each other first
RECENT = 1000.0  # rounds after which one counts half, in the acceptance length of today


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a drafter comes from. weights: as `Placement.place` lays them out. folder: of its checkpoint, and config: of its target as that
    one's checkpoint has it; None if there is no checkpoint."""

    weights: Any
    folder: Path | None = None
    config: TargetConfig | None = None


class Learning:
    """A drafter that learns while its LLM works: what `LLM.learn` returns. As a context it ends with it. The learnt drafter stays in use.

    `stats` says what came of it, `save` writes the drafter now.
    """

    def __init__(self, learner: Learner, origin: Origin, shards: Shards, accounts: Accounts, placement: Placement, lock: Any):
        self._learner, self._shards, self._accounts = learner, shards, accounts
        self._placement, self._lock = placement, lock
        # An update sums over all devices. Where calls do not, the LLM's lock is none of the devices'.
        self._sums = lock if placement.summing_devices else DeviceLock(placement.devices if placement.size > 1 else ())
        self.origin = origin  # of the weights in use, which are its own
        self._candidate: Any = None  # those on trial
        self._trial: Comparison | None = None
        self._out = None if learner.learn.out is None else expanded(learner.learn.out)
        self._offered = 0  # updates when weights were last on trial
        self._every = learner.learn.every  # updates between trials
        self._losses: list[float] = []  # by how much the weights of the last trials in a row were worse for sure
        self._fruitless = 0  # trials in a row that gained nothing
        self._tried = self._taken = 0
        self._ended: str | None = None  # why it ended
        self._saved = 0.0  # when `out` was last written, by the pace's clock
        self._start, self._recent = np.zeros(2), np.zeros(2)  # rounds and accepted drafts: before any weights changed, and lately
        self._seen = sum((drafting.watched for drafting in self._drafting), np.zeros(2))  # the same, since the LLM was loaded
        self._together = TOGETHER if len(shards.runners) > 1 else 1
        self._pace = Pace(learner.learn.share, lambda: accounts.seconds)
        if self._out is not None:
            self._begin_at(self._out)
        for drafting in self._drafting:
            drafting.watching = True

    def __enter__(self) -> Learning:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Learning({self.stats})"

    @property
    def going(self) -> bool:
        """Whether it still learns."""
        return self._ended is None

    @property
    def stats(self) -> LearningStats:
        return LearningStats(
            share=self._learner.learn.share,
            spent=self._pace.share,
            seconds=self._pace.spent,
            updates=self._learner.steps,
            loss=self._learner.loss,
            tried=self._tried,
            taken=self._taken,
            start=_length(self._start),
            now=_length(self._recent),
            ended=self._ended,
        )

    def follow(self, target: Any) -> None:
        """Learns from other weights of the target from now on, which are like those before; None while there are none."""
        if self._learner.masters is not None:  # else it is closed, and would hold them for nothing
            self._learner.target = target

    def compile(self) -> None:
        """Compiles what learning runs, if that is not done yet."""
        if self._learner.compiled is None:
            with self._accounts.compiling():
                self._learner.compile()
            self._pace.expected = self._learner.step_seconds

    def add(self, request: Request) -> None:
        """Takes in a request that has ended."""
        if self.going and request.refusal is None and not request.inserts:  # training reads tokens alone
            self._learner.add(request.tokens, len(request.prompt))

    def between(self) -> None:
        """What there is to do between two calls of the loop. The caller holds the LLM's lock."""
        if not self.going:
            return
        self._mend()
        self._look()
        self._take_verdict()
        if self.going and self._learner.ready:
            self.compile()
            if self._pace.due(self._together):
                self._work()
        if self.going and self._trial is None and self._learner.steps - self._offered >= self._every:
            self._offer()
        if self._out is not None and (not self.going or self._pace.passed - self._saved >= self._learner.learn.save_seconds):
            try:
                self.save()
            except Exception as error:  # of the disk, or of what writes checkpoints; the texts that are under way need neither
                self._saved = self._pace.passed
                failed = f"the drafter that learns could not be written to {self._out}; learning.save() tries again: {error}"
                warnings.warn(failed, RuntimeWarning, stacklevel=2)

    def save(self) -> None:
        """Writes the drafter in use to `out`, and the state from which learning resumes. A file is replaced when all of it is written.
        Raises ValueError where there is no `out`."""
        if self._out is None:
            raise ValueError("out is None, so that there is nowhere to write the drafter to")
        with self._lock():
            self._shards.take(None)
            self._take_verdict()
            self._save(self._out)

    def _save(self, out: Path) -> None:
        begun = time.perf_counter()
        assert self.origin.folder is not None
        config, generation = checkpoint.read_config(self.origin.folder), checkpoint.read_generation_config(self.origin.folder)
        save_trained(out, self.origin.weights, config, generation)
        if self._learner.masters is not None:
            self._mend()
            checkpoints.save(out / STATE, self._learner.steps, *self._learner.state)
        self._pace.cost(time.perf_counter() - begun)
        self._saved = self._pace.passed

    def close(self) -> None:
        """Ends learning, and writes the drafter a last time if there is an `out`; if that fails, it raises why once learning has ended. A
        second call does nothing."""
        with self._lock():
            self._shards.take(None)
            if self._learner.masters is None:
                return
            failed = None
            try:
                self._take_verdict()
                if self._out is not None:
                    self.save()
            except Exception as error:
                failed = error
            self._end("closed")
            self._learner.close()
            if failed is not None:
                raise failed

    @property
    def _runners(self) -> Sequence[Runner]:
        return self._shards.runners

    @property
    def _drafting(self) -> list[Drafting]:
        return [runner.drafting for runner in self._runners]

    def _look(self) -> None:
        """Takes in the rounds of the weights in use since the last time."""
        before, self._seen = self._seen, sum((drafting.watched for drafting in self._drafting), np.zeros(2))
        new = self._seen - before
        if not self._taken:
            self._start += new
        self._recent = self._recent * 0.5 ** (new[0] / RECENT) + new

    def _mend(self) -> None:
        """Learns on from the weights in use, if an interrupt has ended an update half-way. Gives up a trial that it has kept from beginning
        on all data shards."""
        if self._learner.lost:
            self._learner.begin_at(self.origin.weights)
        if self._trial is not None and any(drafting.trial is None for drafting in self._drafting) and self._trial.verdict is None:
            for drafting in self._drafting:
                drafting.use(drafting.drafter)
            self._trial = self._candidate = None

    def _work(self) -> None:
        """Updates, while nothing else computes."""
        begun = time.perf_counter()
        self._shards.take(None)
        self._take_verdict()
        if not self.going:
            return
        for runner in self._runners:
            runner.programs.wait()
        if len(self._runners) == 1:  # it waited for what would have been computed anyhow
            begun = time.perf_counter()
        try:
            with self._sums():
                for _ in range(self._together):
                    self._learner.step()
        except FloatingPointError as error:
            warnings.warn(f"the drafter learns no more: {error}; the weights in use stay", RuntimeWarning, stacklevel=2)
            self._learner.begin_at(self.origin.weights)  # what a run that resumes takes
            self._end(str(error))
        self._pace.took(time.perf_counter() - begun, self._together)

    def _offer(self) -> None:
        """Puts the newest weights on trial."""
        self._shards.take(None)
        candidate, trial = self._learner.candidate(), Comparison(CANDIDATE, CURRENT, challenge=True)
        parts = [
            Trial({CANDIDATE: weights, CURRENT: drafting.drafter}, trial, apart=drafting.owns_kv)
            for drafting, weights in zip(self._drafting, self._of_shards(candidate), strict=True)
        ]
        self._candidate, self._trial = candidate, trial  # first: if an interrupt comes before all shards run it, `_mend` gives it up
        self._offered, self._tried = self._learner.steps, self._tried + 1
        for drafting, part in zip(self._drafting, parts, strict=True):
            drafting.begin_trial(part)

    def _take_verdict(self) -> None:
        """Takes in the verdict of a trial, if there is one. Where it fell, a data shard has the better weights already."""
        if self._trial is not None and self._trial.verdict is not None:
            self._settle(self._trial)

    def _settle(self, trial: Comparison) -> None:
        """Takes in the verdict of a trial, whose better weights are used from now on.

        A drafter that fits gets worse before it gets better, as steps that teach it anything first lead away from where its training ended.
        So weights that lost are learnt on, with twice as many updates until the next trial. Only if they stay worse, learning goes back.
        """
        self._shards.take(None)
        for drafting in self._drafting:
            drafting.settle()
        won = trial.verdict == CANDIDATE
        if won:
            self.origin = dataclasses.replace(self.origin, weights=self._candidate)
        self._candidate = self._trial = None  # an interrupt before leaves all to the next time
        findings, self._taken = trial.findings, self._taken + won
        gained = -findings.gain > findings.error
        self._fruitless, self._every = (0, self._every) if gained else (self._fruitless + 1, 2 * self._every)
        self._losses = [*self._losses, findings.gain] if findings.gain > CLEAR * findings.error else []
        if len(self._losses) >= LOST and self._losses[-1] >= self._losses[-2]:
            self._go_back()
        if self._fruitless >= self._learner.learn.patience:
            self._end(f"{self._fruitless} comparisons in a row gained nothing")

    def _go_back(self) -> None:
        """Gives up the newest weights for those in use, and learns from there in steps of half the size."""
        begun = time.perf_counter()
        self._learner.go_back(self.origin.weights)
        jax.block_until_ready(self._learner.masters)
        self._pace.cost(time.perf_counter() - begun)
        self._offered, self._every, self._losses = self._learner.steps, self._learner.learn.every, []

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._trial = self._candidate = None
        for drafting in self._drafting:
            drafting.watching = False
            if drafting.drafter is not None:  # unless the LLM is closed
                drafting.use(drafting.drafter)

    def _of_shards(self, weights: Any) -> list[Any]:
        """Weights as each data shard computes with them, of weights as `Placement.place` lays them out."""
        return [drafter for (_, drafter), _ in self._placement.split(((), self._placement.spread(weights)))]

    def _begin_at(self, out: Path) -> None:
        """Goes on from what `out` holds, if that was asked for: from the drafter, and from the state if there is one. Raises ValueError for
        another drafter, or a state that cannot be read."""
        if not _goes_on(self._learner.learn, out):
            return
        assert self.origin.config is not None
        dtype = self._runners[0].target.dtype
        weights = load_drafter(out, self.origin.config, dtype, place=self._placement.place, progress=False)
        _check_same(out, weights, self.origin.weights)
        self._learner.begin_at(weights)
        if checkpoints.steps_of(out / STATE):
            _, self._learner.state = checkpoints.restore(out / STATE, *self._learner.state)
        self._offered = self._learner.steps
        self.origin = dataclasses.replace(self.origin, weights=weights)
        for drafting, part in zip(self._drafting, self._of_shards(weights), strict=True):
            drafting.use(part)  # last: where something cannot be read, all stays as it was


def _goes_on(learn: Learn, out: Path) -> bool:
    """Whether learning is to go on from what a folder holds, and that holds anything."""
    return learn.resume and (bool(checkpoints.steps_of(out / STATE)) or (out / WEIGHTS_FILE).exists())


def _check_same(out: Path, weights: Any, given: Any) -> None:
    """Raises ValueError if the drafter in a folder is another than the one that was given. Both: weights, or both abstract."""
    if jax.tree.structure(weights) != jax.tree.structure(given) or _shapes(weights) != _shapes(given):
        there, wanted = type(weights).__name__, type(given).__name__
        found = f"another drafter that learnt, {there}" if there != wanted else f"a {there} that learnt, of another size or config"
        raise ValueError(f"{out} holds {found} than the {wanted} that was given; give that one to go on, or move the folder away")


def _shapes(weights: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(weights)]


def check(learn: Learn, drafter: Any, rule: str, num_draft_tokens: int) -> None:
    """Raises ValueError where learning would change texts, or where there is nothing to learn, and ValueError or TypeError for an objective
    that makes no sense."""
    learnable(drafter)
    if readings := getattr(drafter, "readings", ()):
        raise ValueError(
            f"the drafter's config.json leaves open {' or '.join(readings)}; expected the one that it was trained with: generate with it, "
            "and llm.stats says which accepts more"
        )
    if rule != "coupled":
        raise ValueError(f"the acceptance rule is {rule!r}, with which texts depend on the drafter; only with 'coupled' may it learn")
    if num_draft_tokens == 0:
        raise ValueError("num_draft_tokens is 0, so that no draft would be accepted however much the drafter learns; expected at least 1")
    if jax.process_count() > 1:
        raise ValueError(f"there are {jax.process_count()} processes; a drafter learns in one process only")
    objective_of(learn, drafter, num_draft_tokens)


def check_out(learn: Learn, folder: Path | None) -> None:
    """Raises ValueError, FileExistsError or NotADirectoryError for an `out` that cannot be written. folder: the drafter's."""
    if learn.out is None:
        return
    out = expanded(learn.out)
    if folder is None:
        raise ValueError(f"out is {str(out)!r}, but the drafter comes from no checkpoint, whose config.json would be written there")
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; expected a folder, or nothing")
    if not learn.resume:
        if checkpoints.steps_of(out / STATE):
            raise FileExistsError(f"{out} holds a drafter that learnt before; give resume=True to go on from it, or another folder")
        refuse_to_replace(out)


def check_left(learn: Learn, drafter: Any, config: TargetConfig, dtype: Any) -> None:
    """Raises ValueError or FileNotFoundError where learning is to go on from what `out` holds, and its config.json is damaged or another
    drafter's. drafter: abstract."""
    if learn.out is not None and _goes_on(learn, out := expanded(learn.out)):
        _check_same(out, abstract_drafter(out, config, dtype), drafter)


def check_room(target: Any, drafter: Any, learn: Learn, num_draft_tokens: int, max_len: int, placement: Placement) -> None:
    """Raises MemoryError where a device says that it lacks the room to learn."""
    device = jax.local_devices()[0]
    limit, used = memory_limit(device), memory_used(device)
    kept, work = learning_bytes(target.config, drafter, learn, num_draft_tokens, max_len, placement)
    if limit is not None and used + kept + work > limit:
        raise MemoryError(
            f"learning takes {size(kept)}, and {size(work)} for an update; of the device's {size(limit)}, {size(limit - used)} are free. "
            "`load` with `learn` plans slots beside it; fewer anchors or a smaller batch take less"
        )


def learner_of(target: Any, drafter: Any, learn: Learn, **more: Any) -> Learner:
    """See `Learner`, which needs optax. Raises ImportError where that is missing."""
    try:
        from jaxspec.learning.learner import Learner
    except ImportError as error:
        raise ImportError(f"a drafter learns with optax, which cannot be imported ({error}): pip install optax") from error
    return Learner(target, drafter, learn, **more)


def _length(sums: np.ndarray) -> float | None:
    """Tokens a step, None where no round was seen."""
    rounds, accepted = sums.tolist()
    return 1 + accepted / rounds if rounds else None
