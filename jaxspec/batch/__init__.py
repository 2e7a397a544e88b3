"""Batch jobs: requests from a JSON Lines file, results to another. A job that was killed resumes. The package may import all else but
the other doors."""

from jaxspec.batch.job import BatchResult, run_batch

__all__ = ["BatchResult", "run_batch"]
