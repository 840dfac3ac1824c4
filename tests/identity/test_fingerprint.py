# SPDX-License-Identifier: Apache-2.0
"""Fingerprints cover exactly the facts that K/V depend on."""

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import blake3
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from vllm_metal.identity import facts
from vllm_metal.identity.fingerprint import Fingerprint
from vllm_metal.kv_transfer.disk import layout

WEIGHTS = {"target": "0123"}
FULL = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32, sliding_window=128
)
GROUPS = (("model.layers.0", "model.layers.2"), FULL), (("model.layers.1",), WINDOW)


def pool(groups=GROUPS, num_blocks=10):
    made = [KVCacheGroupSpec(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=made)


def model():
    from vllm_metal.engine.models.embedded import embedded_model_path

    return str(embedded_model_path(dequantize=True))


def configure(**options):
    args = {"model": model(), "max_model_len": 64} | options
    return EngineArgs(**args).create_engine_config()


@pytest.fixture(scope="module")
def config():
    return configure()


def of(config, groups=GROUPS, weights=WEIGHTS, computed_by="scatter"):
    return Fingerprint.of(config, pool(groups), weights, computed_by)


@pytest.fixture(scope="module")
def here(config):
    return of(config)


def changed(config, **values):
    """Copies a configuration with changes by dotted names."""
    found = copy.deepcopy(config)
    for name, value in values.items():
        *owners, last = name.split("__")
        owner = found
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return found


def test_the_digest_is_of_the_facts_as_json(here):
    assert json.loads(json.dumps(here.facts)) == here.facts  # a manifest gives them back
    unnamed = {key: value for key, value in here.facts.items() if key != "model"}
    text = json.dumps(unnamed, sort_keys=True, separators=(",", ":"))
    assert here.digest == blake3.blake3(text.encode()).hexdigest()[:32]
    assert layout.FINGERPRINT.fullmatch(here.digest) and len(here.digest) == 32


def test_a_model_is_the_same_in_another_folder(config, here):
    moved = of(changed(config, model_config__model="/x/y/other"))
    assert moved.digest == here.digest
    assert moved.facts["model"] == "y/other"


def test_the_facts_of_a_known_model(here):
    facts = dict(here.facts)
    assert facts.pop("model").endswith("/SmolLM2-135M-Instruct")
    assert len(facts.pop("hf_config")) == 32
    assert facts.pop("rope")["rope_parameters"]["rope_theta"] == 100000
    expected = {
        *("vllm_metal", "device", "pool", "mlx", "mlx-lm", "mlx-vlm", "transformers", "vllm"),
        *("weights", "quantization"),
        *("dtype", "kv_cache_dtype", "draft", "block_size", "groups", "hash_algorithm"),
        "hash_seed",
    }
    assert facts.keys() == expected
    assert (facts["dtype"], facts["kv_cache_dtype"], facts["draft"]) == ("float32", "float32", None)
    assert facts["groups"][1]["spec"]["sliding_window"] == 128
    assert facts["groups"][1]["layers"] == ["model.layers.1"]


#: Changes of the configuration, and their names in the line.
CONFIGURED = {
    "dtype": (
        {"model_config__dtype": torch.float16},
        "dtype float32, now float16; kv_cache_dtype float32, now float16",
    ),
    "kv_cache_dtype": (
        {"cache_config__cache_dtype": "fp8"},
        "kv_cache_dtype float32, now fp8_per_token_head",
    ),
    "block_size": ({"cache_config__block_size": 32}, "block_size 16, now 32"),
    "hash_algorithm": (
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        "hash_algorithm sha256, now sha256_cbor",
    ),
    "quantization": (
        {"model_config__hf_config__quantization": {"bits": 4, "group_size": 64}},
        "quantization changed",
    ),
    "hf_config": ({"model_config__hf_config__rms_norm_eps": 1e-3}, "hf_config changed"),
}


@pytest.mark.parametrize("fact", CONFIGURED)
def test_a_changed_setting_is_another_fingerprint(config, here, fact):
    values, line = CONFIGURED[fact]
    found = of(changed(config, **values))
    assert_differs(here, found, line)


def assert_differs(before, now, line):
    assert now.digest != before.digest
    told = now.why_unused([before.facts])
    prefix = "the prefix cache holds nothing for this set-up: "
    assert re.fullmatch(prefix + line, told), told


@pytest.mark.parametrize("overrides", [{"rope_theta": 5000.0}, {"partial_rotary_factor": 0.5}])
def test_a_rope_override_is_another_fingerprint(here, overrides):
    parameters = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5} | overrides}
    assert_differs(here, of(configure(hf_overrides=parameters)), "rope changed")


def test_rope_of_a_part_of_the_configuration_counts(config):
    """In vision-language checkpoints, the text model is a part."""
    hf_config = SimpleNamespace(to_dict=lambda: {"text_config": {"rope_theta": theta, "n": 1}})
    part = changed(config, model_config__hf_config=hf_config)
    theta = 1.0
    before = of(part)
    theta = 2.0
    assert before.facts["rope"] == {"text_config.rope_theta": 1.0}
    assert_differs(before, of(part), "rope changed")


def test_longrope_counts_by_the_longest_text(config):
    scaling = {"short_factor": [1.0], "original_max_position_embeddings": 128}
    part = SimpleNamespace(to_dict=lambda: {"rope_parameters": scaling})
    lengths = [
        of(changed(config, model_config__hf_config=part, model_config__max_model_len=length))
        for length in (64, 128, 129)
    ]
    assert lengths[0].digest == lengths[1].digest
    assert_differs(lengths[1], lengths[2], "rope changed")


def test_other_sources_are_another_fingerprint(monkeypatch, config, here):
    monkeypatch.setattr(facts, "sources", lambda _: "0" * 32)
    assert_differs(here, of(config), "vllm_metal changed")


def test_other_packages_are_another_fingerprint(monkeypatch, config, here):
    monkeypatch.setattr(facts, "version", lambda package: f"0 {package}")
    packages = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "vllm")
    told = "; ".join(f"{package} .*, now 0 {package}" for package in packages)
    assert_differs(here, of(config), told)


def test_the_environment_counts(monkeypatch, config):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = of(config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert_differs(before, of(config), "hash_seed changed")
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setenv("VLLM_METAL_DEVICE", "metal")
    assert_differs(before, of(config), "device cpu, now metal")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"weights": {"target": "0124"}}, "weights of the target changed"),
        ({"weights": WEIGHTS | {"draft": "9"}}, "weights of the draft changed"),
        ({"computed_by": "kernels"}, "pool scatter, now kernels"),
        *(
            ({"groups": groups}, "groups changed")
            for groups in (
                GROUPS[:1],
                GROUPS[::-1],
                ((("model.layers.2", "model.layers.0"), FULL), GROUPS[1]),
                ((("model.layers.0", "model.layers.3"), FULL), GROUPS[1]),
                ((GROUPS[0][0], replace(FULL, num_kv_heads=6)), GROUPS[1]),
                ((GROUPS[0][0], replace(FULL, head_size=32)), GROUPS[1]),
                ((GROUPS[0][0], replace(FULL, dtype=torch.float16)), GROUPS[1]),
                (
                    (
                        GROUPS[0][0],
                        replace(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
                    ),
                    GROUPS[1],
                ),
                (GROUPS[0], (GROUPS[1][0], replace(WINDOW, sliding_window=64))),
                (GROUPS[0], (GROUPS[1][0], FULL)),
            )
        ),
    ],
)
def test_what_the_pool_holds_counts(config, here, values, line):
    assert_differs(here, of(config, **values), line)


def test_drafts_of_a_network_count_and_lookups_do_not(config, here):
    def drafting(tokens=2, **options):
        speculation = {"method": "draft_model", "model": model(), "num_speculative_tokens": tokens}
        return configure(speculative_config=speculation | options)

    lookup = configure(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert of(lookup) == here
    draft = drafting()
    found = of(draft)
    assert_differs(here, found, "draft changed")
    assert of(drafting(tokens=4)) == found
    weighed = [of(draft, weights=WEIGHTS | {"draft": digest}) for digest in "12"]
    assert_differs(*weighed, "weights of the draft changed")
    renamed = changed(draft, speculative_config__draft_model_config__model="a/b")
    assert of(renamed).digest == found.digest  # its weights are what counts
    other = changed(draft, speculative_config__method="eagle")
    assert_differs(found, of(other), "the draft's method draft_model, now eagle")
    rope = {"rope_theta": 5.0}
    other = copy.deepcopy(draft)
    other.speculative_config.draft_model_config.hf_config.rope_parameters = rope
    assert_differs(found, of(other), "the draft's rope changed")


def test_how_much_is_computed_at_once_does_not_count(here, tmp_path):
    other = configure(
        max_model_len=128,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        seed=5,
        gpu_memory_utilization=0.5,
        served_model_name="x",
        async_scheduling=False,
    )
    other.cache_config.cache_dtype = "float32"  # the model's own, by name
    longer = replace(WINDOW, extra_retained_tokens=7)
    groups = (GROUPS[0], (GROUPS[1][0], longer))
    assert Fingerprint.of(other, pool(groups, num_blocks=99), WEIGHTS, "scatter") == here
    moved = tmp_path.joinpath(*Path(model()).parts[-2:])
    moved.parent.mkdir(parents=True)
    moved.symlink_to(model())
    assert of(configure(model=str(moved))) == here


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/name", "org/name"),
        ("/home/me/models/name/", "models/name"),
        ("/name", "name"),
        ("name", "name"),
        ("/c/hub/models--org--na-me/snapshots/0123abc", "org/na-me"),
    ],
)
def test_a_model_s_name_has_no_path_of_this_machine(config, given, name):
    facts = of(changed(config, model_config__model=given)).facts
    assert facts["model"] == name and "/home/me" not in json.dumps(facts)
    assert str(Path(model()).parents[1]) not in json.dumps(of(config).facts)


@pytest.mark.more
def test_another_process_finds_the_same(here):
    """Sets have another order there, and objects other addresses."""
    program = "import json; from test_fingerprint import *; print('FOUND', of(configure()).digest)"
    tests = str(Path(__file__).parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)]),
        "VLLM_METAL_DEVICE": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert f"FOUND {here.digest}\n" in done.stdout, done.stdout + done.stderr


def test_facts_of_any_type_are_stable(config):
    @dataclasses.dataclass
    class Part:
        a: object

    def found(*values):
        given = {"x": values, "y": {3: Part(object())}}
        hf_config = SimpleNamespace(to_dict=lambda: given)
        return of(changed(config, model_config__hf_config=hf_config)).digest

    assert found({"b", "a", "c"}, object()) == found({"c", "b", "a"}, object())
    assert found({"b", "a"}) != found({"a"})
    assert found(float("nan")) == found(float("nan"))


def test_no_line_where_there_is_nothing_to_explain(here):
    assert here.why_unused([]) is None
    assert here.why_unused([{}, None, 7]) is None
    assert here.why_unused([{"model": "x"}, here.facts]) is None


def test_the_closest_folder_of_the_model_is_compared(config, here):
    far = of(changed(config, cache_config__cache_dtype="fp8", cache_config__block_size=32))
    near = of(changed(config, cache_config__cache_dtype="int8"))
    foreign = here.facts | {"model": "another/one"}
    told = here.why_unused([far.facts, foreign, near.facts])
    assert told.endswith(": kv_cache_dtype int8_per_token_head, now float32"), told
    assert here.why_unused([foreign]).endswith(f"model another/one, now {here.facts['model']}")


@pytest.mark.parametrize("facts", [{"model": 5}, {"weights": 7}, {"draft": []}, {"unknown": [1]}])
def test_manifests_of_other_versions_are_compared_all_the_same(here, facts):
    told = here.why_unused([facts])
    assert told.startswith("the prefix cache holds nothing") and "\n" not in told
