"""GPUs by name: their memory, and whether kernels run on them, for plans on machines that have none of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from jaxspec.engine.memory import size
from pallas_kernels import device, dialect

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True)
class Card:
    """A device's memory, as it was asked for."""

    name: str
    memory: int  # bytes
    kernels: bool = True  # whether kernels run there: see `pallas_kernels.device`
    decimal: bool = False  # whether it is told in units of 1000
    hopper: bool = False  # whether it is a Hopper GPU

    @property
    def show(self) -> Callable[[int], str]:
        """Tells bytes in the units in which its memory was given."""
        return gigabytes if self.decimal else size


# Memory in GB, and compute capability, of NVIDIA's cards.
_CARDS = {
    "T4": (16, "7.5"),
    "V100": (32, "7.0"),
    "RTX 3090": (24, "8.6"),
    "A10": (24, "8.6"),
    "A10G": (24, "8.6"),
    "A40": (48, "8.6"),
    "RTX A6000": (48, "8.6"),
    "A100": (80, "8.0"),
    "A100 40GB": (40, "8.0"),
    "A100 80GB": (80, "8.0"),
    "L4": (24, "8.9"),
    "L40S": (48, "8.9"),
    "RTX 4090": (24, "8.9"),
    "RTX 5090": (32, "12.0"),
    "H100": (80, "9.0"),
    "H200": (141, "9.0"),
    "B200": (180, "10.0"),
}


def card_named(text: str) -> Card | None:
    """The card of a name, such as "L4" or "rtx4090", or None."""
    named = {_plain(name): name for name in _CARDS}.get(_plain(text))
    if named is None:
        return None
    gb, capability = _CARDS[named]
    kernels = float(capability) >= device.LEAST_CAPABILITY
    return Card(named, gb * 10**9, kernels, decimal=True, hopper=float(capability) == dialect.HOPPER)


def card_of(text: str) -> Card:
    """The card of a name, or a device with so much memory, such as "24GB" or "24GiB". Raises ValueError for any other text."""
    if named := card_named(text):
        return named
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", text, re.IGNORECASE)
    if not found:
        raise ValueError(
            f"{text!r} is not an amount of memory; expected a number and one of {', '.join(UNITS)}, such as 80GB, or a card: "
            f"{', '.join(_CARDS)}"
        )
    unit = next(unit for unit in UNITS if unit.lower() == found[2].lower())
    return Card(text, int(float(found[1]) * UNITS[unit]), decimal="i" not in unit)


def gigabytes(count: int) -> str:
    return f"{count / 10**9:.1f} GB" if count >= 10**9 else f"{count / 10**6:.1f} MB"


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|tesla", "", name.lower())
