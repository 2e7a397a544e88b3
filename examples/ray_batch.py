"""Completes the prompts in a folder or bucket of parquet files and writes them, with their texts, to another:
`python examples/ray_batch.py PROMPTS ANSWERS --target pocket --drafter pocket-mtp --replicas 2`.

The files need a column of prompts or of messages, and one of ids. A job that was killed is run again by the same command, and serves only
rows that were not written. It needs the extra `ray`.
"""

from __future__ import annotations

import argparse

import ray

import jaxspec
import jaxspec.ray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="folder or bucket of parquet files, such as s3://bucket/prompts/")
    parser.add_argument("answers", help="folder or bucket to write parquet files to")
    parser.add_argument("--target", default="pocket", help="hub id, folder or bundled name (default: pocket)")
    parser.add_argument("--drafter", help="hub id, folder or bundled name (default: none)")
    parser.add_argument("--messages-column", help="the column of conversations, in place of a column named prompt")
    parser.add_argument("--id-column", default="id", help="the column of ids (default: id)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most new tokens of a row (default: 256)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the checkpoint's)")
    parser.add_argument("--seed", type=int, default=0, help="of the job, from which each row has its own (default: 0)")
    parser.add_argument("--replicas", type=int, default=1, help="processes with the model (default: 1)")
    parser.add_argument("--gpus-per-replica", type=float, help="GPUs of each (default: 1, without GPUs 0)")
    parser.add_argument("--checkpoint", help="folder or bucket for the ids of rows that were written (default: ANSWERS.done)")
    parser.add_argument("--cache-dir", help="folder for compiled programs that all machines see")
    args = parser.parse_args()
    answers = jaxspec.ray.generate(
        ray.data.read_parquet(args.prompts, file_extensions=["parquet"]),
        args.target,
        args.drafter,
        sampling_params=jaxspec.SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature),
        messages_column=args.messages_column,
        id_column=args.id_column,
        seed=args.seed,
        replicas=args.replicas,
        gpus_per_replica=args.gpus_per_replica,
        checkpoint_path=args.checkpoint or args.answers.rstrip("/") + ".done",
        cache_dir=args.cache_dir,
    )
    answers.write_parquet(args.answers)


if __name__ == "__main__":
    main()
