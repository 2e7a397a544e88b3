"""Batch generation on Ray Data: many prompts, on replicas that Ray starts, feeds and restarts."""

from __future__ import annotations

import os
from typing import Any

from jaxspec.checks import expanded, integer, number, path
from jaxspec.engine.params import MAX_SEED, SamplingParams
from jaxspec.generator import Generator, check_columns, check_params

MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MEMORY_FRACTION = 0.9  # of a GPU, for the replicas on it together
CALLS = 2  # batches that a replica works on at a time: rows of the next one run while the last ones of a batch do


def generate(
    dataset: Any,
    target: Any,
    drafter: Any = None,
    *,
    sampling_params: SamplingParams | None = None,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    id_column: str | None = None,
    seed: int = 0,
    replicas: int | tuple[int, int] = 1,
    gpus_per_replica: float | None = None,
    cpus_per_replica: float = 0,
    batch_size: int = 256,
    checkpoint_path: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Any:
    """A ray.data.Dataset with the rows of `dataset` and the columns that `Generator` adds. As with all of Ray Data, nothing runs before the
    result is read or written. A replica that dies is started again, and its batches are served again, with the same texts.

    target, drafter, sampling_params, prompt_column, messages_column, id_column, seed and settings: of `Generator`. Paths must be there on
    every machine.

    replicas: actors, each with the model; (least, most) lets Ray choose as it goes. gpus_per_replica: 1 by default, 0 in a cluster without
    GPUs. With several, a replica splits its weights over them (`tensor`, unless settings say otherwise); with a part of one, as many
    replicas share a GPU and its memory. cpus_per_replica: CPUs that Ray counts as taken. With the default of 0, replicas never take those
    that reading, filtering and writing wait for; a job without GPUs on several machines needs more, to be spread over them.

    batch_size: rows of a batch; take several times the slots of a replica, which works on two batches at a time. checkpoint_path: a
    folder that all machines see, in which Ray notes the ids of rows that were written; a job that is run again leaves these rows out. It
    needs id_column and a dataset that Ray reads from files and writes to files. cache_dir: folder for compiled programs; a folder that
    all machines see is filled once. By default JAXSPEC_CACHE_DIR of each machine. It is not the `cache_dir` of `load`, where models are
    kept: here that is where HF_HOME of each machine says.

    Raises ImportError without Ray, and ValueError or TypeError for settings that make no sense. What `load` raises ends the job when the
    first replica starts.
    """
    data = _library().data
    check_params(sampling_params)
    check_columns(prompt_column, messages_column, id_column, settings.get("output_prefix", ""))
    integer("seed", seed, 0, MAX_SEED - 1)
    if settings.get("mesh") is not None:
        raise ValueError("mesh names devices of this process, which replicas do not have; expected gpus_per_replica, or tensor")
    if isinstance(replicas, tuple) and len(replicas) != 2:
        raise ValueError(f"replicas is {replicas}, expected a number, or the least and the most")
    for count in replicas if isinstance(replicas, tuple) else (replicas,):
        integer("replicas", count, 1)
    integer("batch_size", batch_size, 1)
    number("cpus_per_replica", cpus_per_replica, 0)
    if gpus_per_replica is None:
        gpus_per_replica = 1 if _has_gpus() else 0
    if (gpus := number("gpus_per_replica", gpus_per_replica, 0)) > 1 and gpus != int(gpus):
        raise ValueError(f"gpus_per_replica is {gpus_per_replica}, expected a part of one, or a number of whole ones")
    if gpus_per_replica > 1 and "tensor" not in settings:
        settings["tensor"] = int(gpus_per_replica)
    if cache_dir is not None:
        cache_dir = os.fspath(expanded(path("cache_dir", cache_dir, "a folder")))
    if checkpoint_path is not None:
        if id_column is None:
            raise ValueError("checkpoint_path is given and id_column is not; expected the column by which rows are known again")
        checkpoint_path = os.fspath(path("checkpoint_path", checkpoint_path, "a folder"))
        if "://" not in checkpoint_path:  # Ray wants a whole path
            checkpoint_path = os.path.abspath(expanded(checkpoint_path))
        # With a context of its own: what else is made of the caller's dataset has nothing to do with this checkpoint.
        dataset = type(dataset).copy(dataset, _deep_copy=True)
        dataset.context.checkpoint_config = data.checkpoint.CheckpointConfig(id_column, checkpoint_path, delete_checkpoint_on_success=False)
    arguments = {
        "target": target,
        "drafter": drafter,
        "sampling_params": sampling_params,
        "prompt_column": prompt_column,
        "messages_column": messages_column,
        "id_column": id_column,
        "seed": seed,
        **settings,
    }
    pool = {"size": replicas} if isinstance(replicas, int) else {"min_size": replicas[0], "max_size": replicas[1]}
    resources = {"num_cpus": cpus_per_replica} | ({"num_gpus": gpus_per_replica} if gpus_per_replica else {})
    # Blocks of one batch each keep all replicas busy, whatever the files' sizes, and little is lost with a replica.
    return dataset.repartition(target_num_rows_per_block=batch_size).map_batches(
        Replica,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(**pool, max_concurrent_calls_per_actor=CALLS, enable_true_multi_threading=True),
        fn_constructor_kwargs={"gpus": gpus_per_replica, "cache_dir": cache_dir, "arguments": arguments},
        **resources,
    )


class Replica:
    """What an actor runs: a Generator on the devices that Ray gave it."""

    def __init__(self, gpus: float, cache_dir: str | None, arguments: dict[str, Any]):
        # JAX reads these when it first looks for devices, which loading does.
        if not any(name in os.environ for name in MEMORY_VARIABLES):
            os.environ[MEMORY_VARIABLES[0]] = str(MEMORY_FRACTION * min(gpus or 1, 1))
        if cache_dir is not None:
            os.environ["JAXSPEC_CACHE_DIR"] = cache_dir
        self._generator = Generator(**arguments)

    def __call__(self, batch: Any) -> Any:
        return self._generator(batch)


def _has_gpus() -> bool:
    ray = _library()
    if not ray.is_initialized():
        ray.init()
    return ray.cluster_resources().get("GPU", 0) > 0


def _library() -> Any:
    """Ray with ray.data imported. Raises ImportError that names the package."""
    try:
        import ray
        import ray.data
        import ray.data.checkpoint
    except ImportError as error:
        raise ImportError(f'jaxspec.ray needs the package ray[data] ({error}): pip install "ray[data]"') from error
    return ray
