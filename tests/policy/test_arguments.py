"""Policies' own arguments, which come from text: whatever JSON value or word is given, a policy is made or a ValueError says why not."""

import inspect
import sys

import pytest

from apexk import policy as room

VALUES = ["[]", "{}", "null", "true", "1", "-1", "0.5", "NaN", "-Infinity", "word", '"word"', ""]


def own(name):
    parameters = inspect.signature(room.registry.POLICIES[name].__init__).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in ("self", "options")}


def made(name, key, value):
    """What `name(key=value)` makes; None where it is refused."""
    try:
        return room.get(f"{name}({key}={value})")
    except ValueError as error:
        assert key in str(error), "says what is wrong"
        return None


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in room.names() for key in own(name)])
def test_any_value_is_taken_or_refused(name, key):
    default = own(name)[key]
    for value in VALUES:
        found = made(name, key, value)
        assert found is None or value not in ("[]", "{}", "NaN", "-Infinity", "word"), f"{key}={value} was taken"
        if isinstance(default, bool):
            assert (found is not None) == (value == "true")


class Scopes(room.Policy):
    name = source = "scopes"
    speculates = fetches = waits_in_flight = False


@pytest.mark.parametrize("scopes", ["global", (), None, 3, [["global"]], ("layer", "model")], ids=str)
def test_pool_scopes_that_are_none(monkeypatch, scopes):
    monkeypatch.setattr(Scopes, "pool_scopes", scopes)
    monkeypatch.setitem(sys.modules, "scopes_of_a_test", sys.modules[__name__])
    with pytest.raises(ValueError, match="wanted some of"):
        room.get("scopes_of_a_test:Scopes")
