"""Compiles kernels and steps for GPUs that this machine need not have. The package may import what lies below the engine."""
