# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md's recipes name every file that their examples needed."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from recipes import covers, mentioning, named, recipes
from upstream import archive

from vllm_metal.vllm_patches import releases

ROOT = Path(__file__).parents[1]
RECIPES = recipes((ROOT / "CONTRIBUTING.md").read_text())
#: What mentions examples, and no recipe needs: why.
NEVER_NEEDED = {
    "CONTRIBUTING.md": "the recipes",
    "requirements/linux.txt": "`make lock` writes it",
    "requirements/macos.txt": "likewise",
    "benchmarks/": "they measure what is there",
    "tests/benchmarks/": "likewise",
    "docs/vllm-settings.md": "`python -m vllm_settings.page` writes it",
    "vllm_metal/vllm_patches/touched.json": "`python -m upstream.touched` writes it",
    "tests/vllm_settings/": "rows of all that a vLLM release has, whether served or not",
    "tests/recipes.py": "the recipes' test",
    "tests/test_contributing.py": "likewise",
}


@dataclass(frozen=True)
class Example:
    """What is there already, of which a recipe tells how to make another one."""

    pattern: str  # a regular expression that finds it in files and in their names
    not_needed: dict[str, str] = field(default_factory=dict)  # files that mention it: why


_TESTED, _VERSION = re.escape(releases.TESTED_VLLM), re.escape(archive.VERSION)
EXAMPLES = {
    "a sampling parameter": Example(
        r"\bmin_p\b",
        {
            "docs/compatibility.md": "vLLM's refusal of this very parameter",
            "docs/speculation.md": "likewise",
            "vllm_metal/sample/custom.py": "vLLM's own processor for it, which is not used",
            "tests/vllm_patches/": "likewise",
            "tests/e2e/test_serve_speculation.py": "a server, with one parameter of many",
        },
    ),
    "a proposer": Example(
        r"""\bspec_decode[./](test_)?suffix\b|\bSuffix|["'`]suffix["'`]|\bsuffix_decoding|arctic_""",
        {
            "docs/compatibility.md": "that vLLM wants a package for it",
            "tests/vllm_patches/": "likewise",
            "tests/spec_decode/test_registry.py": "a few rows of several",
            "tests/e2e/tenants.py": "a server whose tenants must not share past outputs",
            "docs/monitoring.md": "what to do where few drafts are accepted",
            "docs/pipeline-parallel.md": "which methods are served by layers",
        },
    ),
    "a kind of layer": Example(
        r"sliding_window|SlidingWindow|RotatingKVCache",
        {
            "tests/e2e/test_kernels_like_mlx.py": "the kernels, over one kind of several",
            "tests/e2e/conftest.py": "models that tests share",
            "tests/models/": "likewise",
            "tests/vision/checkpoints.py": "likewise",
            "tests/lora/toys.py": "likewise",
            "tests/kv_cache/recurrent.py": "another kind of layer",
            "tests/kv_transfer/": "groups of vLLM's, whatever their layers",
            "tests/spec_decode/": "targets and drafts that have such layers",
            "vllm_metal/mlx_patches/families/": "families that have such layers",
            "tests/upstream/touched/": "names of vLLM's that the syntax does not show",
            "vllm_metal/models/": "likewise",
            "tests/encoders/": "windows of encoders, which keep nothing",
            "vllm_metal/encoders/": "likewise",
            "vllm_metal/memory/needs.py": "vLLM's specs of groups, whatever the layers",
        },
    ),
    "a kernel": Example(
        r"\bkv_gather\b",
        {
            "tests/metal_interpreter/": "kernels of ours that the interpreter is tried with",
            "metal_kernels/paged_attention/reference.py": "calls it",
            "vllm_metal/kv_cache/": "likewise",
            "tests/metal_kernels/paged_attention/": "tests of what calls it",
            "tests/kv_cache/": "likewise",
        },
    ),
    "a store of K/V": Example(
        r"\bDisk(Config|Store|View)\b|\bprefix_cache_dir\b",
        {
            "docs/production.md": "a server whose tenants' prompts are kept",
            "tests/e2e/": "engines that have the store on, to test something else",
            "tests/commands/test_cache.py": "a command of this store alone",
            "tests/commands/test_tenants.py": "a command that removes a tenant's pages from it",
            "tests/platform/test_refusals.py": "one setting of several",
            "vllm_metal/commands/": "messages that name the setting",
            "vllm_metal/platform/refusals.py": "likewise",
            "vllm_metal/kv_transfer/config.py": "likewise",
        },
    ),
    "a metric": Example(
        r"failed_steps|request_timeouts|\bfigures\.timeouts\b",
        {
            "tests/e2e/": "what fails, or takes too long, is counted",
        },
    ),
    "a patch of MLX or mlx-lm": Example(r"\btraced_layers\b|\bTransposedWeights\b"),
    "a vLLM release": Example(
        rf'\bvLLM {_TESTED}\b|["`]{_TESTED}["`]|(?<![\d.]){_VERSION}(?![\d.])',
    ),
}


def recipe(name):
    if name not in RECIPES:
        pytest.skip(f"CONTRIBUTING.md has no section `### Recipe: {name}` yet")
    return RECIPES[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_names_every_file_that_its_example_is_in(name):
    names, _ = named(recipe(name), ROOT)
    for_all, _ = named(RECIPES[""], ROOT)
    known = names | for_all | NEVER_NEEDED.keys() | EXAMPLES[name].not_needed.keys()
    found = mentioning(EXAMPLES[name].pattern, ROOT)
    unnamed = sorted(file for file in found if not covers(known, file))
    assert unnamed == [], f"name them in the recipe, or make the change need them no more: {name}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_recipe_names_exists(name):
    assert named(recipe(name), ROOT)[1] == set()


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_left_out_does_mention_the_example(name):
    recipe(name)
    found = mentioning(EXAMPLES[name].pattern, ROOT)
    assert len(found) > 5
    for left_out in EXAMPLES[name].not_needed:
        assert any(covers({left_out}, file) for file in found), left_out


def test_every_recipe_has_an_example():
    if not RECIPES:
        pytest.skip("CONTRIBUTING.md has no section `## Recipes` yet")
    assert RECIPES.keys() - {""} == EXAMPLES.keys()


PAGE = """\
# Contributing
## Recipes

New modules get a line in `docs/structure.md`.

### Recipe: a dish

1. Write `vllm_metal/dish/soup.py`, `salad.py` beside it, and run
   `make lock`.
2. Its test is in `tests/dish/`; `SOUP` and `salad.py` are names, `README.md` is at the top.

### Something else

1. `vllm_metal/other.py`

## Afterwards

### Recipe: not one
"""


@pytest.fixture
def kitchen(tmp_path):
    for name in (
        "CONTRIBUTING.md",
        "README.md",
        "docs/structure.md",
        "vllm_metal/dish/soup.py",
        "vllm_metal/dish/salad.py",
        "vllm_metal/other.py",
        "tests/dish/test_soup.py",
        "tests/dish/soup.bin",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("soup" if "soup" in name else "nothing")
    return tmp_path


def test_recipes_are_found_by_their_headings():
    found = recipes(PAGE)
    assert found.keys() == {"", "a dish"}
    assert "docs/structure.md" in found[""] and "make lock" in found["a dish"]
    assert recipes("# Contributing\n## Tests\n") == {}


def test_names_without_a_folder_lie_beside_the_one_before(kitchen):
    names, missing = named(recipes(PAGE)["a dish"], kitchen)
    assert names == {
        "vllm_metal/dish/soup.py",
        "vllm_metal/dish/salad.py",
        "tests/dish/",
        "README.md",
    }
    assert missing == {"salad.py"}  # of the second point, beside no tests/dish/


def test_files_are_found_by_text_and_by_name(kitchen):
    assert mentioning("soup", kitchen) == {"vllm_metal/dish/soup.py", "tests/dish/test_soup.py"}
    (kitchen / "docs/structure.md").write_text("a soup, too")
    assert "docs/structure.md" in mentioning("soup", kitchen)


def test_a_folder_covers_its_files():
    assert covers({"tests/dish/"}, "tests/dish/test_soup.py")
    assert not covers({"tests/dish"}, "tests/dish/test_soup.py")
    assert not covers({"tests/dish/"}, "tests/dishes/test_soup.py")
