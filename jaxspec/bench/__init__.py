"""Measures a step on this machine, beside the time that reading its weights and cache takes. A door: it may import all else."""
