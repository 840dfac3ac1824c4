# SPDX-License-Identifier: Apache-2.0
"""Changed configurations: ours computes what transformers' class does, or refuses them by name.

Each change of `mutations` is made in each family's small model. transformers' forward of the
changed model is the reference; its folder is read and computed as a server would.
"""

import re
import shutil
from collections import Counter

import numpy as np
import pytest
from models.changed import TOKENS, of_text, toy
from models.published import FAMILIES
from models.test_published_config import NOT_READ, TOLERANCE, ours

from vllm_metal.models.weight_files import ModelLoadError

pytestmark = pytest.mark.usefixtures("unfused")

EQUAL, NAMED = "equal", "refused by name"
NO_MODEL = "no model of transformers'"  # its class cannot be built so, or not run
NOTHING = "without effect"  # in both
ARRAYS = "refused by its arrays"  # which are not those of a module of such a configuration
DIFFERENT, UNNAMED = "different", "refused, but not by name"
OTHERWISE = "transformers' class is not what was published"
ALLOWED = {EQUAL, NAMED, NO_MODEL, NOTHING, ARRAYS, OTHERWISE}
#: What ends as `OTHERWISE`. transformers' PhiMoE turns long texts by the factors of short ones;
#: Microsoft's code, vLLM's and mlx-lm's do not.
KNOWN = {("phimoe", "rope_parameters.original_max_position_embeddings=8")}
_OF_ARRAYS = re.compile(
    r"Missing \d+ parameters|Received \d+ parameters not in model|Expected shape"
    r"|divisible by num_heads"
)
READ = [name for name in FAMILIES if name not in NOT_READ]
LEAST = 20  # changes a family, without those that are no models


@pytest.fixture(scope="module")
def outcomes():
    """How each change ended; counted at the end."""
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


def outcome(original, change, folder):
    """The outcome, and what says more of it."""
    try:
        model = original.changed(change)
        expected = of_text(model)
    except Exception as error:
        return NO_MODEL, str(error)
    if not np.isfinite(expected).all():
        return NO_MODEL, "not finite"
    folder = original.write(model, folder)
    try:
        found = ours(folder, TOKENS)
    except ModelLoadError as error:
        if names(str(error), change):
            return NAMED, str(error)
        return (ARRAYS if _OF_ARRAYS.search(str(error)) else UNNAMED), str(error)
    except Exception as error:
        return DIFFERENT, f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    if found.shape != expected.shape or not np.abs(found - expected).max() <= TOLERANCE:
        # The reference's own rounding may be as large.
        exact = of_text(in_float64(model))
        if found.shape != exact.shape or not np.abs(found - exact).max() <= TOLERANCE:
            known = (original.name, change.name) in KNOWN
            return OTHERWISE if known else DIFFERENT, f"by {np.abs(found - exact).max():.2g}"
    same = expected.shape == original.expected.shape
    moved = not same or np.abs(expected - original.expected).max() > TOLERANCE
    return (EQUAL if moved else NOTHING), ""


def in_float64(model):
    """The same model; experts one after another, since torch groups them in 32 bits at most."""
    model.set_experts_implementation("eager")
    return model.double()


def names(message, change):
    """Whether an error says which key it is about."""
    # A key that follows from the changed one is named as well: both cannot be as they are.
    words = [*change.key.split("."), *change.keys]
    if "rope" in change.key:
        words += ["rope of type", "rope_scaling", "rope_parameters"]
    return any(word in message for word in words)


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
    outcomes[name, change], why = outcome(original, one, tmp_path / "changed")
    assert outcomes[name, change] == expected, why


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_no_change_computes_something_else(name, toys, outcomes, tmp_path):
    original, wrong = toys(name), {}
    for change in original.changes():
        found, why = outcome(original, change, tmp_path / "changed")
        outcomes[name, change.name] = found
        if found not in ALLOWED:
            wrong[change.name] = f"{found}: {why}"
    counted = Counter(found for (family, _), found in outcomes.items() if family == name)
    assert all(outcomes[of, change] == OTHERWISE for of, change in KNOWN if of == name)
    assert counted[EQUAL] + counted[NAMED] >= LEAST, counted
    assert not wrong, "\n".join(f"{change}: {why}" for change, why in wrong.items())
