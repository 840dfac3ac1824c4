# SPDX-License-Identifier: Apache-2.0
"""The probe passes on the pinned vLLM, and names whatever is taken away or changed."""

import importlib
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import get_args, get_origin

import pytest

from vllm_metal.vllm_patches import probe as probing
from vllm_metal.vllm_patches import releases
from vllm_metal.vllm_patches.probe import probe
from vllm_metal.vllm_patches.touched import GPU_WORKER, TOUCHED

OF_TESTED = [entry for entry in TOUCHED if releases.TESTED_VLLM in entry.releases]


def attributes(entry):
    return [*entry.fields.split(), *entry.calls, *entry.methods]


def names(entry):
    """All that an entry stands for: the name itself, and what is relied on of it."""
    own = [] if entry.name.endswith(":") else [entry.name]
    return [*own, *(f"{entry.name}.{attribute}" for attribute in attributes(entry))]


def without(owner, attribute):
    """A stand-in for an object, with all of its attributes but one."""
    kept = (name for name in dir(owner) if name != attribute)
    return SimpleNamespace(**{name: getattr(owner, name) for name in kept})


def take_from_module(patch, module, name):
    """As if the module had never had the name, nor a `__getattr__` that gives it."""
    patch.delitem(vars(module), name, raising=False)
    if given := vars(module).get("__getattr__"):

        def others(asked):
            if asked == name:
                raise AttributeError(asked)
            return given(asked)

        patch.setitem(vars(module), "__getattr__", others)


class TakenFromClass:
    """As if a class had never had an attribute: neither itself, nor set by its methods."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name
        self.undo = []

    def __enter__(self):
        for base in self.owner.__mro__[:-1]:  # not object
            annotations = vars(base).get("__annotations__", {})
            if self.name in annotations:
                self.undo.append((annotations.__setitem__, self.name, annotations.pop(self.name)))
            if self.name in vars(base):
                # Past the metaclass: enums refuse it.
                self.undo.append((self._set, base, vars(base)[self.name]))
                type.__delattr__(base, self.name)
            for function in vars(base).values():
                if isinstance(function, FunctionType) and self.name in function.__code__.co_names:
                    self._rename(function)
        return self

    def __exit__(self, *_):
        for restore, name, value in reversed(self.undo):
            restore(name, value)

    def _set(self, base, value):
        type.__setattr__(base, self.name, value)

    def _rename(self, function):
        code = function.__code__
        others = tuple("renamed" if name == self.name else name for name in code.co_names)
        self.undo.append((function.__setattr__, "__code__", code))
        function.__code__ = code.replace(co_names=others)


def missed(entry, attribute=None):
    """Names that the probe finds wrong once the entry's name, or an attribute of it, is away."""
    module_name, _, name = entry.name.partition(":")
    module = importlib.import_module(module_name)
    with pytest.MonkeyPatch.context() as patch:
        if attribute is None:
            take_from_module(patch, module, name)
            return [finding.name for finding in probe([entry])]
        owner = getattr(module, name) if name else module
        if isinstance(owner, ModuleType):
            take_from_module(patch, owner, attribute)
        elif isinstance(owner, Mapping):
            patch.delitem(owner, attribute)
        elif get_args(owner):  # a Literal
            left = tuple(value for value in get_args(owner) if value != attribute)
            patch.setattr(module, name, get_origin(owner)[left])
        elif isinstance(owner, type):
            with TakenFromClass(owner, attribute):
                return [finding.name for finding in probe([entry])]
        else:
            patch.setattr(module, name, without(owner, attribute))
        return [finding.name for finding in probe([entry])]


def test_the_pinned_vllm_has_all_that_is_touched():
    assert probe() == []


def test_whatever_is_taken_away_is_named():
    for entry in OF_TESTED:
        if not entry.name.endswith(":"):
            assert missed(entry) == [entry.name]
        for attribute in attributes(entry):
            assert missed(entry, attribute) == [f"{entry.name}.{attribute}"]
    assert probe() == []  # all is back


@pytest.mark.parametrize(
    "entry", [e for e in OF_TESTED if e.calls or e.methods], ids=lambda e: e.name
)
def test_a_method_with_other_parameters_is_named(entry):
    module_name, _, name = entry.name.partition(":")
    module = importlib.import_module(module_name)

    def changed(self, something, *, more):
        raise AssertionError("never called")

    for method in (*entry.calls, *entry.methods):
        owner = getattr(module, name)
        with pytest.MonkeyPatch.context() as patch:
            stand_in = SimpleNamespace(**{n: getattr(owner, n) for n in dir(owner)})
            if isinstance(owner, type):
                stand_in = type(
                    "Changed", (), {n: getattr(owner, n, None) for n in attributes(entry)}
                )
            setattr(stand_in, method, changed)
            patch.setattr(module, name, stand_in)
            found = probe([entry])
        assert f"{entry.name}.{method}" in [finding.name for finding in found], method


@pytest.mark.parametrize(
    "entry",
    [e for e in OF_TESTED if e.called is not None or e.replaced is not None],
    ids=lambda e: e.name,
)
def test_a_function_with_other_parameters_is_named(monkeypatch, entry):
    module_name, _, name = entry.name.partition(":")

    def changed(first, *, something):
        raise AssertionError("never called")

    monkeypatch.setattr(importlib.import_module(module_name), name, changed)
    (finding, *_) = probe([entry])
    assert finding.name == entry.name and "any more" in finding.problem


def test_a_module_that_is_gone_or_broken_is_named(monkeypatch):
    entry = next(entry for entry in TOUCHED if entry.name == "vllm.exceptions:VLLMValidationError")
    monkeypatch.setitem(sys.modules, "vllm.exceptions", None)
    (finding,) = probe([entry])
    assert finding.name == entry.name and "cannot be imported" in finding.problem
    assert finding.by == "sample/validate.py" and finding.by in str(finding)


def test_a_release_is_measured_by_its_own_entries(monkeypatch):
    """What 0.33 has beyond 0.32, asked of 0.32: the changes that were found in its source."""
    monkeypatch.setattr(releases, "installed_vllm", lambda: "0.33.0")
    missing = {finding.name.partition(":")[2] for finding in probe()}
    assert missing == {
        "AsyncModelRunnerOutput.get_kv_connector_output",
        "SchedulerOutput.skip_drafts",
        "Worker.profile",
        "WorkerBase.set_kv_cache_layout",
        "get_kv_cache_config_from_groups",
        "get_kv_cache_groups",
    }
    monkeypatch.setattr(releases, "installed_vllm", lambda: "0.99.0")  # read by nobody
    assert {finding.name.partition(":")[2] for finding in probe()} == missing


def test_the_quick_probe_leaves_out_what_is_slow_to_import():
    worker = [entry for entry in OF_TESTED if entry.name.startswith(GPU_WORKER)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, GPU_WORKER, None)
        assert {finding.name for finding in probe()} == {entry.name for entry in worker}
        assert probe(quick=True) == []


def test_the_command_prints_what_is_missing_and_exits_with_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["probe"])
    assert probing.main() == 0
    monkeypatch.setitem(sys.modules, "vllm.exceptions", None)
    assert probing.main() == 1
    assert "vllm.exceptions:VLLMValidationError cannot be imported" in capsys.readouterr().out
