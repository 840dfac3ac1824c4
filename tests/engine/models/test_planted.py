# SPDX-License-Identifier: Apache-2.0
"""Changed configurations compute the same as in transformers, or are rejected.

Each change of `mutations` is made in each family's small model. transformers' forward of the
changed model is the reference; its folder is read and computed as a server would.
"""

import re
import shutil
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from engine.config_json.test_published_config import NOT_READ, TOLERANCE, ours
from engine.models.changed import TOKENS, of_text, toy
from engine.models.published import FAMILIES
from engine.models.test_sensitivity import SEEN

from vllm_metal.identity.model_files import ModelLoadError

pytestmark = pytest.mark.usefixtures("unfused")

EQUAL, NAMED = "equal", "rejected by name"
NO_MODEL = "no model of transformers'"  # its class cannot be built so, or not run
NOTHING = "without effect"  # in both
ARRAYS = "refused by its arrays"  # which are not those of a module of such a configuration
DIFFERENT, UNNAMED = "different", "rejected, but not by name"
OTHERWISE = "transformers' class is not what was published"
ALLOWED = {EQUAL, NAMED, NO_MODEL, NOTHING, ARRAYS, OTHERWISE}
#: Keys that end as `OTHERWISE`. transformers' PhiMoE turns long texts by the factors of short ones;
#: Microsoft's code, vLLM's and mlx-lm's do not.
KNOWN = {("phimoe", "rope_parameters.original_max_position_embeddings=8")}
#: The same for omitted keys. transformers' DBRX takes no base from attn_config, and its Nemotron-H
#: bounds steps by time_step_min; the published codes do otherwise.
KNOWN_OMISSIONS = {
    ("dbrx", "rope_parameters absent"),
    ("dbrx", "rope_parameters=None"),
    ("nemotron_h", "time_step_min absent"),
    ("nemotron_h", "time_step_min=0.001"),
}
_OF_ARRAYS = re.compile(
    r"Missing \d+ parameters|Received \d+ parameters not in model|Expected shape"
    r"|divisible by num_heads"
)
READ = [name for name in FAMILIES if name not in NOT_READ]
LEAST = 19  # changes a family, without those that are no models


@pytest.fixture(scope="module")
def outcomes():
    """Outcome of each change; counted at the end."""
    found = {}
    yield found
    counted = Counter(found.values())
    for outcome, count in counted.most_common():
        print(f"\n{count:6} {outcome}", end="")
    print(f"\n{len(found):6} changes of {len({name for name, _ in found})} families")


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = toy(name, tmp_path_factory.mktemp("toy") / "published")
        return made[name]

    return get


@dataclass(frozen=True)
class Outcome:
    """The outcome of a change."""

    kind: str
    why: str = ""
    moved: float = 0.0  # how far transformers' own log-probabilities moved


def outcome(original, change, folder, omitted=False):
    """Makes a change in both implementations."""
    try:
        model = original.changed(change)
        expected = of_text(model)
    except Exception as error:
        return Outcome(NO_MODEL, str(error))
    if not np.isfinite(expected).all():
        return Outcome(NO_MODEL, "not finite")
    same = expected.shape == original.expected.shape
    moved = float(np.abs(expected - original.expected).max()) if same else float("inf")
    folder = original.write(model, folder, change if omitted else None)
    try:
        found = ours(folder, TOKENS)
    except ModelLoadError as error:
        if names(str(error), change) or (omitted and names_one_of(original.words, str(error))):
            return Outcome(NAMED, str(error), moved)
        kind = ARRAYS if _OF_ARRAYS.search(str(error)) else UNNAMED
        return Outcome(kind, str(error), moved)
    except Exception as error:
        kind = UNNAMED if omitted else DIFFERENT
        return Outcome(kind, f"{type(error).__name__}: {error}", moved)
    finally:
        shutil.rmtree(folder)
    if found.shape != expected.shape or not np.abs(found - expected).max() <= TOLERANCE:
        # The reference's own rounding may be as large.
        exact = of_text(in_float64(model))
        if found.shape != exact.shape or not np.abs(found - exact).max() <= TOLERANCE:
            known = (original.name, change.name) in KNOWN | KNOWN_OMISSIONS
            why = f"by {np.abs(found - exact).max():.2g}"
            return Outcome(OTHERWISE if known else DIFFERENT, why, moved)
    return Outcome(EQUAL if moved > TOLERANCE else NOTHING, "", moved)


def in_float64(model):
    """Converts the model; experts run one at a time: torch groups them in 32 bits at most."""
    model.set_experts_implementation("eager")
    return model.double()


def names(message, change):
    """Returns whether an error names the changed key."""
    # A key that follows from the changed one is named as well: both cannot be as they are.
    words = [*change.key.split("."), *change.keys]
    if "rope" in change.key:
        words += ["rope_type", "rope_scaling", "rope_parameters"]
    if "rope" in change.key or change.key == "head_dim":
        words.append("rotary_dim")  # a share of head_dim
    return any(word in message for word in words)


def names_one_of(keys, message):
    """Returns whether an error names a key to set, possibly one implied by the omitted key."""
    return any(re.search(rf"\b{re.escape(key)}\b", message) for key in keys)


#: One or two of each kind, all quick.
SAMPLE = [
    ("llama", "hidden_act=gelu", NAMED),
    ("llama", "rms_norm_eps=0.3", EQUAL),
    ("llama", "rope_parameters.rope_type=yarn", EQUAL),
    ("phi", "rope_parameters.rope_type=dynamic", NAMED),
    ("llama", "attention_bias=False", EQUAL),
    ("qwen3_moe", "norm_topk_prob=False", EQUAL),
    ("qwen3_moe", "mlp_only_layers=[2]", EQUAL),
    ("gemma2", "attn_logit_softcapping=0.7", EQUAL),
    ("gemma2", "sliding_window=5", EQUAL),
    ("gemma2", "sliding_window=None", NO_MODEL),
    ("granite", "residual_multiplier=0.42", EQUAL),
    ("granite", "attention_dropout=0.3", NOTHING),
]


@pytest.mark.parametrize(("name", "change", "expected"), SAMPLE)
def test_a_change_of_a_configuration(name, change, expected, toys, outcomes, tmp_path):
    original = toys(name)
    (one,) = [each for each in original.changes() if each.name == change]
    found = outcome(original, one, tmp_path / "changed")
    outcomes[name, change] = found.kind
    assert found.kind == expected, found.why


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_no_change_computes_something_else(name, toys, outcomes, tmp_path):
    original, wrong = toys(name), {}
    for change in original.changes():
        found = outcome(original, change, tmp_path / "changed")
        outcomes[name, change.name] = found.kind
        if found.kind not in ALLOWED:
            wrong[change.name] = f"{found.kind}: {found.why}"
    counted = Counter(found for (family, _), found in outcomes.items() if family == name)
    assert all(outcomes[of, change] == OTHERWISE for of, change in KNOWN if of == name)
    assert counted[EQUAL] + counted[NAMED] >= LEAST, counted
    assert not wrong, "\n".join(f"{change}: {why}" for change, why in wrong.items())


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("granitemoehybrid", "position_embedding_type=None", EQUAL),
        ("granitemoehybrid", "position_embedding_type absent", EQUAL),
        ("granitemoehybrid", "layer_types=None", NAMED),
        ("granitemoehybrid", "logits_scaling absent", EQUAL),
        *(
            pytest.param(*case, marks=pytest.mark.more)
            for case in (
                ("mistral4", "rope_interleave=None", EQUAL),
                ("exaone4", "layer_types absent", EQUAL),
                ("ernie4_5_moe", "moe_layer_end_index absent", EQUAL),
                ("falcon_h1", "mamba_d_head absent", NOTHING),
                ("gpt_neox", "rope_parameters absent", NAMED),
                ("kimi_linear", "linear_head_dim absent", EQUAL),
                ("lfm2", "layer_types absent", NAMED),
                ("mamba2", "expand absent", NOTHING),
                ("mimo_v2_flash", "rms_norm_eps absent", NOTHING),
                ("mimo_v2_flash", "layer_types=None", NAMED),
            )
        ),
    ],
)
def test_a_key_left_out(name, change, expected, toys, tmp_path):
    original = toys(name)
    (one,) = [each for each in original.omissions() if each.name == change]
    found = outcome(original, one, tmp_path / "changed", omitted=True)
    assert found.kind == expected, found.why


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_no_key_left_out_computes_something_else(name, toys, tmp_path):
    original, wrong, counted, moved = toys(name), {}, Counter(), set()
    for change in original.omissions():
        found = outcome(original, change, tmp_path / "changed", omitted=True)
        counted[found.kind] += 1
        if found.moved >= SEEN:
            moved.add(change.key)
        if found.kind not in ALLOWED:
            wrong[change.name] = f"{found.kind}: {found.why}"
    print(f"\n{name}: {len(moved)} keys move transformers' model; {dict(counted)}")
    assert not wrong, "\n".join(f"{change}: {why}" for change, why in wrong.items())
