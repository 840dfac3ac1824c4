# SPDX-License-Identifier: Apache-2.0
"""Ids of stored responses."""

import random

from vllm_metal.serving import response_ids

SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"


def test_an_id_belongs_to_its_tenant_alone():
    made = {name: response_ids.make(SECRET, name) for name in ("a", "b", "a\0", "")}
    for name in made:
        for owner, response_id in made.items():
            assert response_ids.belongs(SECRET, name, response_id) == (name == owner)
        assert not response_ids.belongs(OTHER, name, made[name])
    assert response_ids.make(SECRET, "a") != made["a"]


def test_nothing_else_is_an_id():
    made = response_ids.make(SECRET, "a")
    rng = random.Random(1)
    for place in range(len(made)):
        changed = made[:place] + rng.choice("ghi") + made[place + 1 :]
        assert not response_ids.belongs(SECRET, "a", changed)
    for wrong in ("", "resp_", made[:-1], made + "0", made.upper(), "é" * 69, f" {made}", made[5:]):
        assert not response_ids.belongs(SECRET, "a", wrong)
