# SPDX-License-Identifier: Apache-2.0
"""A function of vLLM is replaced once, despite decorators."""

import functools
import inspect
from types import SimpleNamespace

import pytest

from vllm_metal.patches.vllm_patches.replacing import replace


class Theirs:
    def double(self, number: int) -> int:
        """Doubles the number."""
        return 2 * number

    @classmethod
    def of_class(cls):
        return cls


def plus_one(original, self, number):
    return original(self, number) + 1


@pytest.fixture
def theirs():
    """A new class for each test."""
    return type("Fresh", (), dict(vars(Theirs)))


def test_the_original_is_wrapped_once(theirs):
    for _ in range(3):
        replace(theirs, "double", plus_one)
    assert theirs().double(4) == 9


def test_two_changes_of_one_function(theirs):
    def times_ten(original, self, number):
        return 10 * original(self, number)

    for _ in range(2):
        replace(theirs, "double", plus_one)
        replace(theirs, "double", times_ten)
    assert theirs().double(4) == 90


def test_the_last_of_several_closures_counts(theirs):
    """Two engines of a process may have different settings."""

    def start(settings):
        def scaled(original, self, number):
            return settings * original(self, number)

        replace(theirs, "double", scaled)

    start(10)
    replace(theirs, "double", plus_one)  # around it
    start(100)
    assert theirs().double(4) == 801


def test_the_replacement_looks_like_the_original(theirs):
    doc = theirs.double.__doc__
    replace(theirs, "double", plus_one)
    assert doc and theirs.double.__doc__ == doc
    assert list(inspect.signature(theirs.double).parameters) == ["self", "number"]


def test_a_decorator_of_theirs_does_not_pass_for_ours(theirs):
    """It sets `__wrapped__`, like functools.wraps."""
    plain = theirs.double
    theirs.double = functools.wraps(plain)(lambda self, number: plain(self, number) * 10)
    for _ in range(2):
        replace(theirs, "double", plus_one)
    assert theirs().double(4) == 81


def test_a_function_of_a_module(theirs):
    module = SimpleNamespace(double=lambda number: 2 * number)
    for _ in range(2):
        replace(module, "double", lambda original, number: original(number) + 1)
    assert module.double(4) == 9


def test_what_is_restored_can_be_replaced_again(theirs):
    plain = theirs.double
    replace(theirs, "double", plus_one)
    theirs.double = plain
    assert theirs().double(4) == 8
    replace(theirs, "double", plus_one)
    assert theirs().double(4) == 9


@pytest.mark.parametrize("name", ["of_class", "__doc__"])
def test_what_is_no_function_is_refused(theirs, name):
    with pytest.raises(TypeError, match=f"{name} of .* no function"):
        replace(theirs, name, plus_one)


def test_a_static_method_stays_one():
    owner = type("Owner", (), {"doubled": staticmethod(lambda number: 2 * number)})
    for _ in range(2):
        replace(owner, "doubled", lambda original, number: original(number) + 1)
    assert owner.doubled(4) == owner().doubled(4) == 9
