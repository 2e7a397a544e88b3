"""Programs: weights, one state of all slots, and what is compiled to work on them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from tqdm.auto import tqdm

from jaxspec.decode.state import DecodeState
from jaxspec.drafters.base import Drafter
from jaxspec.engine import cuda_graphs, kernels_ahead
from jaxspec.engine.admission import init_state
from jaxspec.engine.device_clock import Times
from jaxspec.engine.kept_programs import by_address, kept_programs
from jaxspec.engine.program_kinds import Program
from jaxspec.engine.settings import Settings
from jaxspec.interrupts import begun, undisturbed
from jaxspec.model.target import TargetModel
from jaxspec.sampling.automata import Automata
from jaxspec.sharding.placement import Placement
from jaxspec.sharding.specs import WHOLE
from jaxspec.structured.vocabulary import Vocabulary

SHARED_BY_NCCL = "ncclGetPeerDevicePointer"  # what gives XLA's kernels another GPU's memory


def bare(state: DecodeState) -> DecodeState:
    """A state without the arrays that hold what was computed. There are many, and each costs a call a microsecond or two."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=()), drafter=None, logprobs=None)


def flat(function: Callable[..., Any], models: Any, form: Any) -> Callable[..., Any]:
    """A function (target, drafter, automata, state, *args) -> (state, more) with flat lists of arrays in place of the trees: (weights,
    automata, leaves, *args) -> (leaves, more). To hand over trees of as many arrays takes longer.

    models: the structure of (target, drafter). form: that of the state.
    """

    def flat_call(weights: Any, automata: Any, leaves: Any, *args: Any) -> Any:
        state, more = function(*models.unflatten(weights), automata, form.unflatten(leaves), *args)
        return form.flatten_up_to(state), more

    return flat_call


def flat_bare(function: Callable[..., Any], form: Any) -> Callable[..., Any]:
    """The same of a function (bare state, *args) -> (bare state, more). form: the structure of a bare state."""

    def flat_call(leaves: Any, *args: Any) -> Any:
        state, more = function(form.unflatten(leaves), *args)
        return form.flatten_up_to(state), more

    return flat_call


def refuse(*_: Any) -> NoReturn:
    """Stands for a program whose LLM was closed."""
    raise RuntimeError("the LLM is closed")


class Programs:
    """Weights, one state of all slots, and the compiled programs that work on them.

    Programs are compiled ahead of their first use, so that nothing compiles without the engine's knowledge.

    settings: those of one data shard, see `Settings.of_shard`. slots: of the state, those for snapshots among them. times: learns when
    the device has something to do.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, settings: Settings, *, slots: int, placement: Placement, times: Times):
        self.settings, self.slots = settings, slots
        self._target: Any = target  # this and the next: None once they are closed
        self._drafter: Any = drafter
        self._weights, self._models = jax.tree.flatten((target, drafter))
        self._leaves: Any = None  # of the state
        self.compiled: dict[Program, Callable[..., Any]] = {}
        self.automata: Any = None  # those of structured texts; None until there are any
        self._times, self._whole = times, placement.sharding(WHOLE)
        # By shapes alone, since it outlives weights that others take the place of.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (target, drafter))
        self._layout: Any = placement.layout(drafter, functools.partial(init_state, *shapes, slots=slots, **settings.state_sizes))
        self._last: Any = None  # what the newest call returns
        self.begin()
        self.devices = placement.devices if placement.size > 1 else tuple(self._leaves[0].devices())
        self._gaps = cuda_graphs.keep_apart(self.devices)
        # Whether a call of a loop returns before its rounds are over.
        self.loops_return = cuda_graphs.loops_return(self.devices) and (len(self.devices) == 1 or self.state.mail is not None)
        told = (
            dataclasses.replace(settings, seed=0, progress=False),
            slots,
            placement.axes,
            *_signature((self._weights, self.state)),
            self._models,
        )
        self._kept = kept_programs(target, drafter, self.devices, told)

    @property
    def target(self) -> Any:
        """The target whose weights the next call takes. What replaces it must be like it in all but the numbers; None gives it up, and its
        memory, until there is one again."""
        return self._target

    @target.setter
    def target(self, target: TargetModel | None) -> None:
        self._weights = self._flat(target, self._drafter)
        self._target = target

    @property
    def drafter(self) -> Any:
        """The drafter whose weights the next call takes. What replaces it must be like it in all but the numbers."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        if drafter is self._drafter:
            return
        self._weights = self._flat(self._target, drafter)
        self._drafter = drafter

    def _flat(self, target: Any, drafter: Any) -> list[Any]:
        return [] if target is None else self._models.flatten_up_to((target, drafter))

    @property
    def state(self) -> Any:
        """The state of all slots; None once a call that failed has taken it along, until `begin`."""
        return None if self._leaves is None else self._form.unflatten(self._leaves)

    @state.setter
    def state(self, state: DecodeState | None) -> None:
        if state is None:
            self._leaves = None
            return
        self._leaves, self._form = jax.tree.flatten(state)
        numbered = self._form.unflatten(range(len(self._leaves)))
        self._bare, self._bare_form = jax.tree.flatten(bare(numbered))  # which of the leaves a bare state has

    def begin(self) -> None:
        """Makes an empty state. Raises RuntimeError once this is closed."""
        if self._layout is None:
            refuse()
        with self._explained():
            self.state = jax.block_until_ready(self._layout.empty())

    def give_back(self) -> None:
        """Gives back the memory of the state and of automata, until these begin anew."""
        arrays = jax.tree.leaves((self.state, self.automata))
        self.automata = self.state = self._last = None  # first, so that no interrupt leaves a state without some of its arrays
        for array in arrays:
            array.delete()

    def begin_automata(self, vocabulary: Vocabulary, blocks: int, rows: int) -> None:
        """Makes an empty pool of automata."""
        thought = vocabulary.opening, vocabulary.closing
        with self._explained():
            made = Automata.empty(vocabulary.data, vocabulary.length, thought, blocks=blocks, rows=rows)
            self.automata = jax.block_until_ready(made if self._whole is None else jax.device_put(made, self._whole))

    def change_automata(self, program: Program, *args: Any) -> None:
        """Replaces the pool of automata by what a program makes of it."""
        compiled = self.ready(program)
        automata, self.automata = self.automata, None
        with self._explained():
            self.automata = compiled(automata, *args)

    def close(self) -> None:
        """Gives up the weights, the state and all programs, which stay in the count of those that were compiled."""
        self.give_back()
        self._layout = self.target = self._drafter = None
        self.compiled = dict.fromkeys(self.compiled, refuse)

    def compile(self, programs: Iterable[Program]) -> Iterator[str]:
        """Compiles those that are missing, as many at a time as there are cores, and gives a line about each that is ready, starting
        with those that were ready before. XLA compiles without Python's lock; tracing and lowering hold it."""
        missing = list[Program]()
        for program in programs:
            if program in self.compiled:
                yield str(program)
            else:
                missing.append(program)
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        with self._times.compiling(), self._explained():
            try:
                pending = {begun(pool, self._compiler(program, pool)): program for program in missing}
                for done in concurrent.futures.as_completed(pending):
                    program = pending[done]
                    self.compiled[program] = done.result()
                    yield str(program)
            finally:  # an interrupt does not wait for the compiler, which ends what it has begun
                pool.shutdown(wait=False, cancel_futures=True)

    def at_hand(self, program: Program) -> bool:
        """Whether it need not be compiled: it is ready, or was kept."""
        if program in self.compiled:
            return True
        path = self._path(program)
        return path is not None and path.exists()

    def make_ready(self, programs: Sequence[Program]) -> None:
        """Compiles those that are missing, at a time. A line of progress says so."""
        missing = [program for program in programs if program not in self.compiled]
        if missing:
            names = ", ".join(map(str, missing))
            with tqdm(desc=f"Compiling {names}", bar_format="{desc}", leave=False, disable=not self.settings.progress):
                for _ in self.compile(missing):
                    pass

    def ready(self, program: Program) -> Callable[..., Any]:
        """The program, compiled."""
        self.make_ready([program])
        return self.compiled[program]

    def run(self, program: Program, *args: Any) -> Any:
        """Replaces the state by what a program makes of it, and returns what else the program gives. A program that fails takes the state
        along."""
        compiled = self.ready(program)
        leaves, self._leaves = self._leaves, None
        # Before the call: the device begins while the host still hands over arguments. A loop on a GPU may ask the host before each round
        # whether to go on, and then the call returns after its last round only.
        self._times.handed(going=not all(x.is_ready() for x in jax.tree.leaves(self._last)))
        with self._explained():
            if program.takes_bare_state:
                changed, found = compiled([leaves[i] for i in self._bare], *args)
                for i, leaf in zip(self._bare, changed, strict=True):
                    leaves[i] = leaf
                self._leaves = leaves
            else:
                self._leaves, found = compiled(self._weights, self.automata if program.structured else None, leaves, *args)
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        self._last = found
        return found

    def fetch(self, found: Any) -> Any:
        """Waits for what calls return: a tree of arrays, as the host has them."""
        try:
            with self._explained():
                return jax.device_get(found)
        except Exception:
            self.state = None  # what a failed program gives can never be read
            raise
        finally:
            self._times.waited()

    def wait(self) -> None:
        """Waits until the device has nothing left to do."""
        jax.block_until_ready(self._last)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says what to lower where a device runs out of memory, and what to set where XLA's kernels cannot sum over devices."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            if SHARED_BY_NCCL in reason:
                flag = "XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels="
                raise RuntimeError(
                    f"XLA's kernels cannot sum over these GPUs; with {flag} in the environment NCCL does: {reason}"
                ) from error
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            lower = ", ".join(f"{name} ({getattr(self.settings, name)})" for name in ("max_slots", "max_len", "kv_pages"))
            raise MemoryError(f"the device ran out of memory; lower {lower} or memory_fraction: {reason}") from error

    def _compiler(self, program: Program, pool: concurrent.futures.Executor) -> Callable[[], Any]:
        """Returns what makes a program ready: reads it where it was kept, or compiles it, for which it is lowered now. pool: compiles its
        kernels beside it."""
        kept, path = self._kept, self._path(program)
        if kept is None or path is None:
            return self._lowered(program, pool)
        if path.exists():
            return lambda: kept.read(path) or self._lowered(program, pool)()
        compile = self._lowered(program, pool)

        def compile_and_keep() -> Any:
            compiled = compile()
            kept.keep(path, compiled)
            return compiled

        return compile_and_keep

    def _path(self, program: Program) -> Path | None:
        """Where the program is kept, or will be; None if it never is."""
        name = repr(program)
        if program.structured or program.of_automata:
            name = f"{name} {_signature(self.automata)}"
        return None if self._kept is None or by_address(name) else self._kept.path(name)

    def _lowered(self, program: Program, pool: concurrent.futures.Executor) -> Callable[[], Any]:
        """Lowers a program, begins to compile its kernels, and returns what compiles it."""
        lowered = self._lower(program)
        for compile_kernel in kernels_ahead.compilers(lowered, self.devices):
            begun(pool, compile_kernel)
        compile = functools.partial(cuda_graphs.compiled, lowered, self.devices) if program.loops else lowered.compile
        return functools.partial(undisturbed, compile)

    def _lower(self, program: Program) -> Any:
        """The lowered program. What it replaces is given away: the automata, the leaves of a bare state or those of the state."""
        function, args = program.to_lower(self.settings, self.slots, self.target)
        if program.of_automata:
            return jax.jit(function, donate_argnums=0, out_shardings=self._whole).lower(self.automata, *args)
        whole = self._layout.on(function, WHOLE)
        if program.takes_bare_state:
            return jax.jit(flat_bare(whole, self._bare_form), donate_argnums=0).lower([self._leaves[i] for i in self._bare], *args)
        automata = self.automata if program.structured else None
        return jax.jit(flat(whole, self._models, self._form), donate_argnums=2).lower(self._weights, automata, self._leaves, *args)


def _signature(tree: Any) -> tuple[Any, ...]:
    """All of a tree of arrays but their numbers."""
    leaves, form = jax.tree.flatten(tree)
    return form, [(x.shape, x.dtype, x.weak_type, getattr(x.sharding, "spec", None)) for x in leaves]
