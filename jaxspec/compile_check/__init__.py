"""Compiles kernels and steps for GPUs that need not be there. A door: it may import all else."""
