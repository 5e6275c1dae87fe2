"""Modules with one of their orders taken away: what the ordering tests must notice."""

import ast
import sys
import types

import pytest


class Removal(ast.NodeTransformer):
    """Removes the `number`-th place that `_hit` is asked about; `removed` then says what it was."""

    def __init__(self, number):
        self.number, self.seen, self.removed = number, 0, None

    def _hit(self, what):
        self.seen += 1
        if self.seen - 1 == self.number:
            self.removed = what
        return self.seen - 1 == self.number


def sites(paths, removal):
    """(path, number) of every place that `removal` finds, as pytest parameters named by the file and what is removed."""
    found = []
    for path in paths:
        number = 0
        while True:
            visitor = removal(number)
            visitor.visit(ast.parse(path.read_text()))
            if visitor.removed is None:
                break
            found.append(pytest.param(path, number, id=f"{path.name}:{visitor.removed}"))
            number += 1
    return found


def reload_without(monkeypatch, package, paths, path, visitor):
    """Runs the modules at `paths`, in the order of their imports, as `package`'s, the one at `path` changed by `visitor`."""
    for source in paths:
        tree = ast.parse(source.read_text())
        if source == path:
            tree = ast.fix_missing_locations(visitor.visit(tree))
        module = types.ModuleType(f"{package}.{source.stem}")
        module.__package__, module.__file__ = package, str(source)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(tree, str(source), "exec"), vars(module))
