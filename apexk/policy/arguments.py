"""Checks of policies' own arguments. They come from text, `name(key=value)`, so that each may be any JSON value or a word."""

from __future__ import annotations


def require_number(policy: str, what: str, value: object, low: float, high: float, wanted: str = "a number") -> None:
    """Raises ValueError unless `value` is a number from `low` to `high`; NaN is none."""
    if type(value) not in (int, float) or not low <= value <= high:
        span = f"from {low:g} to {high:g}" if high < float("inf") else f">= {low:g}"
        raise ValueError(f"{policy}: {what} is {value!r}; wanted {wanted} {span}")


def require_bool(policy: str, what: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{policy}: {what} is {value!r}; wanted true or false")
