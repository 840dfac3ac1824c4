# SPDX-License-Identifier: Apache-2.0
"""The probe passes on the pinned vLLM, and names whatever is taken away or changed."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, SimpleNamespace
from typing import get_args, get_origin

import pytest

from vllm_metal.vllm_patches import probe as probing
from vllm_metal.vllm_patches.probe import GPU_WORKER, Touched, probe, table

ENTRIES = list(table())


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
        # Not Python's own, which may not be changed.
        for base in (each for each in self.owner.__mro__ if each.__module__ != "builtins"):
            annotations = vars(base).get("__annotations__", {})
            if self.name in annotations:
                self.undo.append((annotations.__setitem__, self.name, annotations.pop(self.name)))
            if self.name in vars(base):
                # Past the metaclass: enums refuse it.
                self.undo.append((self._set, base, vars(base)[self.name]))
                type.__delattr__(base, self.name)
            for function in filter(
                lambda each: isinstance(each, FunctionType), vars(base).values()
            ):
                theirs = inspect.unwrap(function)  # where a test before this one had it replaced
                if self.name in theirs.__code__.co_names:
                    self._rename(theirs)
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


def missed(entry):
    """Names that the probe finds wrong once the entry's name is away."""
    module_name, _, path = entry.name.partition(":")
    module = importlib.import_module(module_name)
    name, _, attribute = path.partition(".")
    with pytest.MonkeyPatch.context() as patch:
        owner = getattr(module, name)
        if not attribute:
            take_from_module(patch, module, name)
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


@pytest.mark.slow
def test_whatever_is_taken_away_is_named():
    for entry in ENTRIES:
        if not entry.name.endswith(":"):
            assert missed(entry) == [entry.name]
    assert probe() == []  # all is back


@pytest.mark.more
def test_whatever_has_other_parameters_is_named(monkeypatch):
    def changed(first, *, something):
        raise AssertionError("never called")

    entries = [entry for entry in ENTRIES if entry.called or entry.takes is not None]
    assert len(entries) > 100
    monkeypatch.setattr(probing, "look_up", lambda _: changed)
    for entry in entries:
        (finding,) = probe([entry])
        assert finding.name == entry.name and "any more" in finding.problem, entry


@pytest.mark.more
def test_a_method_is_measured_without_self(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    (entry,) = (entry for entry in ENTRIES if entry.name.endswith(":Scheduler.schedule"))
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills=False: None)
    assert probe([entry]) == []
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills, hurry: None)
    (finding,) = probe([entry])
    assert (
        finding.problem == "takes (throttle_prefills, hurry) and not (throttle_prefills) any more"
    )


@pytest.mark.more
def test_arguments_are_bound_as_our_calls_give_them(monkeypatch):
    def call(_, request, *, urgent=False): ...

    monkeypatch.setattr("vllm.v1.request.Request.probed", call, raising=False)
    name = "vllm.v1.request:Request.probed"
    for arguments in ("request", "request urgent=", "urgent= ..."):
        assert probe([Touched(name, by=("a.py",), called=(arguments,))]) == []
    for arguments in ("", "req", "request late=", "request urgent"):
        (finding,) = probe([Touched(name, by=("a.py",), called=("request", arguments))])
        assert finding.name == name and str(finding).endswith("(used by a.py)")


@pytest.mark.more
def test_a_class_that_is_gone_is_named_without_its_attributes(monkeypatch):
    monkeypatch.delattr("vllm.v1.request.RequestStatus")
    entries = [entry for entry in ENTRIES if ":RequestStatus" in entry.name]
    assert len(entries) > 3
    assert [finding.name for finding in probe(entries)] == ["vllm.v1.request:RequestStatus"]


def test_a_module_that_is_gone_or_broken_is_named(monkeypatch):
    entry = next(entry for entry in ENTRIES if entry.name == "vllm.exceptions:VLLMValidationError")
    monkeypatch.setitem(sys.modules, "vllm.exceptions", None)
    (finding,) = probe([entry])
    assert finding.name == entry.name and "cannot be imported" in finding.problem
    assert "sample/validate.py" in finding.by and finding.by in str(finding)


@pytest.mark.more
def test_the_quick_probe_leaves_out_what_is_slow_to_import():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, GPU_WORKER, None)
        assert [finding.name for finding in probe()] == [f"{GPU_WORKER}:Worker"]
        assert probe(quick=True) == []


@pytest.mark.more
def test_the_command_prints_what_is_missing_and_exits_with_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["probe"])
    assert probing.main() == 0
    monkeypatch.setitem(sys.modules, "vllm.exceptions", None)
    assert probing.main() == 1
    assert "vllm.exceptions:VLLMValidationError cannot be imported" in capsys.readouterr().out
