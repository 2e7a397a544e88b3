"""What a command tells JAX by variables of the environment, before JAX starts."""

import logging
import os

from jaxspec.checks import number

MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # either, and not both


def prepare() -> None:
    """Sets what the user has not set."""
    # What JAX says about the devices it looked for in vain is no news to a command's user.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    # Of a GPU's memory, JAX takes three quarters unless it is told; a command has the device for itself.
    if not any(name in os.environ for name in MEMORY_VARIABLES):
        os.environ[MEMORY_VARIABLES[0]] = "0.9"


def memory_share() -> float:
    """The share of a device's memory that JAX takes, after `prepare`."""
    name = next(name for name in MEMORY_VARIABLES if name in os.environ)
    try:
        return number(name, float(os.environ[name]), 0, 1, above=True)
    except ValueError as error:
        raise ValueError(f"{name} is {os.environ[name]!r} in the environment, expected more than 0 and at most 1, such as 0.9") from error
