"""Batch jobs: prompts from a JSONL file and results to another, as they come, so that a job that was killed resumes. A door: it may import
all else."""

from jaxspec.batch.job import BatchResult, run_batch

__all__ = ["BatchResult", "run_batch"]
