"""Fields of a config.json, read one by one. An error is a ValueError that names the field, what was found and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.checks import integer, number

FLOATS = ("bfloat16", "float16", "float32", "float64")  # dtypes of weights

T = TypeVar("T")


def require(config: Mapping[str, Any], field: str) -> Any:
    """The value of a field. Raises ValueError where it is missing or null."""
    if config.get(field) is None:
        raise ValueError(f"config.json lacks {field!r}")
    return config[field]


def whole(config: Mapping[str, Any], field: str) -> int:
    """The value of a field that counts something. Raises ValueError where it is missing or no whole number of at least 1."""
    return checked(integer, field, require(config, field), 1)


def experts_of(config: Mapping[str, Any], experts: str, top_k: str) -> tuple[int, int]:
    """The values of two fields: how many experts a layer has, and how many of them a row chooses. Raises ValueError as `whole` does, and
    where those are more."""
    count, chosen = whole(config, experts), whole(config, top_k)
    if chosen > count:
        raise ValueError(f"{top_k} is {chosen}, expected 1 .. {count}, which {experts} is")
    return count, chosen


def whole_or(config: Mapping[str, Any], field: str, default: int) -> int:
    """The same of a field that a config may lack, or have as null or 0: then it is the default."""
    value = config.get(field)
    return default if value is None else checked(integer, field, value, 0) or default


def positive(config: Mapping[str, Any], field: str, default: T) -> float | T:
    """The value of a field that is a number above 0, or the default where it is missing or null. Raises ValueError for another one."""
    value = config.get(field)
    return default if value is None else checked(number, field, value, 0, above=True)


def flag(config: Mapping[str, Any], field: str, default: bool = False) -> bool:
    """The value of a field that is true or false, or the default where it is missing or null. Raises ValueError for another one."""
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json has {field}={value!r}; expected true or false")
    return default if value is None else value


def checked(check: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """What a function of `checks` makes of its arguments, whose TypeError becomes a ValueError: the file is wrong, not the caller."""
    try:
        return check(*arguments, **settings)
    except TypeError as error:
        raise ValueError(f"config.json has a wrong value: {error}") from error


def section(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The value of a field that holds more fields. Raises ValueError where it is missing or no object."""
    value = require(config, field)
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json has {field}={value!r}; expected an object")
    return value


def part(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The same of a field that a config may lack, or have as null: then it holds none."""
    return {} if config.get(field) is None else section(config, field)


def expect(config: Mapping[str, Any], field: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError for another value than those that are implemented. A config that lacks the field means the first of them."""
    value = config.get(field, allowed[0])
    if value not in allowed:
        raise ValueError(f"config.json has {field}={value!r}; implemented: {', '.join(map(repr, allowed))}")


def float_name(*configs: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint's float weights, as the first config that has one names it, "bfloat16" if none does. Raises ValueError."""
    given = next((value for config in configs for name in ("dtype", "torch_dtype") if (value := config.get(name))), FLOATS[0])
    name = str(given).removeprefix("torch.")  # as PyTorch writes its own
    if name not in FLOATS:
        raise ValueError(f"config.json has dtype={given!r}; expected {', '.join(map(repr, FLOATS))}")
    return name


def indices(config: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """The value of a field that lists indices, of at least -1, which stands before the first; none where it is missing or null. Raises
    ValueError for another one."""
    given = config.get(field)
    if given is not None and (isinstance(given, str) or not isinstance(given, Sequence)):
        raise ValueError(f"config.json has {field}={given!r}; expected a list of whole numbers")
    return tuple(checked(integer, field, i, -1) for i in given or ())
