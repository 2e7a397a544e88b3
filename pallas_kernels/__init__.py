"""GPU kernels, each with the pure-XLA reference that defines it. The package imports nothing from jaxspec."""
