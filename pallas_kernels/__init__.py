"""GPU kernels for paged attention and sampling, each beside the pure-XLA reference that defines it. Imports nothing from jaxspec."""
