# SPDX-License-Identifier: Apache-2.0
"""Checks that random model folders are computed as their files and config.json say.

Traffic (`traffic.py`) is judged by the same loaded model, and cannot detect loading errors.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from engine.models.changed import toy
from engine.models.published import FAMILIES, make, write
from engine.models.test_planted import ALLOWED, READ, outcome
from engine.spec_decode.heads import TIE
from engine.spec_decode.image_drafts import CASES as IMAGE_DRAFTS
from engine.spec_decode.image_drafts import write as write_drafting
from engine.vision.drafting import (
    CLOSE,
    IMAGES,
    WORDS,
    answers,
    judge_of,
    noting,
    serving,
)
from engine.vision.toys import Prompt, Toy
from engine.weights.published_formats import FORMATS
from engine.weights.toys import SIZES, stored_as, write_stored
from safetensors.torch import load_file

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.layers import dense_rows

DTYPES = {mx.float32: None, mx.float16: 0, mx.bfloat16: 1}
TOWERS = ("gemma3", "gemma4", "llava", "mistral3", "qwen3_vl")
#: Limit relative to the change of logits if each weight is rounded once more: two float32
#: computations differ by up to 1.4 of it (120 seeds). It is about 5e-6, and up to 3e-4 for Gemma 4,
#: which does not divide scores by the root of the head size (with that division: 5e-6).
ROUNDINGS = 4
KEYS = 12  # per seed, because each model serves several


def weights_of_a_format(rng: np.random.Generator, folder: Path) -> str | None:
    """Packed weights, in any activation dtype, equal those in the file."""
    name = str(rng.choice(list(FORMATS)))
    form, dtype = FORMATS[name], list(DTYPES)[int(rng.integers(len(DTYPES)))]
    write(make(FAMILIES["llama"], **SIZES), folder)
    stored, dense = stored_as(name, load_file(folder / "model.safetensors"))
    write_stored(name, stored, folder)
    for path, module in lazy_model(folder, dtype).named_modules():
        if not hasattr(module, "bits"):
            continue
        expected = dense[f"{path}.weight"].numpy()
        error = np.array(dense_rows(module)) - expected
        allowed, place = form.error, DTYPES[dtype]
        if place is not None and module.scales.dtype != mx.uint8:  # else not in that dtype
            allowed += form.rounding[place]
        relative = float(np.sqrt(np.mean(error**2) / np.mean(expected**2)))
        if not relative <= allowed:
            return f"{name}, {dtype}: {path} is off by {relative:.2g} of {allowed:.2g}"
    return None


def keys_left_out(rng: np.random.Generator, folder: Path) -> str | None:
    """Keys that are absent, null or default mean the same as in transformers."""
    original = toy(str(rng.choice(READ)), folder / "published")
    changes = original.omissions()
    for index in rng.choice(len(changes), KEYS, replace=False).tolist():
        found = outcome(original, changes[index], folder / "changed", omitted=True)
        if found.kind not in ALLOWED:
            return f"{original.name}, {changes[index].name}: {found.kind}, {found.why}"
    return None


def images(rng: np.random.Generator, folder: Path) -> str | None:
    """Prompts with images in chunks give transformers' logits."""
    made = Toy(str(rng.choice(TOWERS)), folder)
    prompt = Prompt().say(*made.words(int(rng.integers(1, 9))))
    for count in range(int(rng.integers(1, 3))):
        shape = ((2, 5), (4, 2))[int(rng.integers(2))]
        prompt.show(made.picture(*shape), f"image {count}").say(
            *made.words(int(rng.integers(1, 9)))
        )
    served = made.served()
    ends = sorted({made.end(prompt, int(rng.integers(1, len(prompt.ids)))), len(prompt.ids)})
    new = [served.new("a", prompt.ids, prompt.features)]
    logits = [served.step({"a": ends[0]}, new)["a"]]
    logits += [served.step({"a": count})["a"] for count in np.diff(ends).tolist()]
    error = float(np.abs(np.concatenate(logits) - made.logits(prompt)).max())
    allowed = ROUNDINGS * made.rounding(prompt)
    if error <= allowed:
        return None
    return f"{made.name}: logits off by {error:.2g} of {allowed:.2g}, chunks to {ends}"


def drafts_beside_images(rng: np.random.Generator, folder: Path) -> str | None:
    """Tokens and drafts stay right for any prompt and any chunk boundaries."""
    case, chunk = str(rng.choice(list(IMAGE_DRAFTS))), int(rng.integers(28, 90))
    toy = write_drafting(folder, case, num_drafts=int(rng.integers(1, 4)))
    prompts = []
    for index in range(3):
        parts: list[str] = [chr(65 + index)]  # no two prompts share a prefix
        shown = [IMAGES[place] for place in rng.integers(0, len(IMAGES), index).tolist()]
        for _ in shown:
            parts += [WORDS[: int(rng.integers(0, 12))], toy.family.image]
        parts.append(WORDS * int(rng.integers(1, 4)))
        prompts.append(("".join(parts), shown))
    with serving(toy, False, max_num_batched_tokens=chunk) as llm:
        expected, _ = answers(llm, prompts)
    with noting() as noted, serving(toy, max_num_batched_tokens=chunk) as llm:
        noted.drafts, noted.rows = [], []
        if answers(llm, prompts)[0] != expected:
            return f"{case}: other tokens with drafts, chunks of {chunk}"
    gap, error = noted.check(judge_of(toy, prompts))
    if gap <= TIE and error <= CLOSE:
        return None
    return f"{case}: drafts off by {gap:.2g}, states by {error:.2g}, chunks of {chunk}"


_OF_FOLDERS = weights_of_a_format, keys_left_out, images
#: Run in turn; the last one starts two engines.
CASES: tuple[Callable[[np.random.Generator, Path], str | None], ...] = (
    *_OF_FOLDERS,
    *_OF_FOLDERS,
    *_OF_FOLDERS,
    drafts_beside_images,
)


def first_failure(first: int, count: int, totals: Counter[str]) -> str | None:
    """Returns the problem of the first failing seed, as a line with the seed."""
    mx.disable_compile()  # no graph recurs
    try:
        for seed in range(first, first + count):
            case = CASES[seed % len(CASES)]
            with tempfile.TemporaryDirectory() as folder:
                problem = case(np.random.default_rng(seed), Path(folder))
            totals[case.__name__] += 1
            if problem is not None:
                return f"{problem}\nmake fuzz FUZZ='--loading 1 --first {seed}'"
    finally:
        mx.enable_compile()
    return None


def summary(totals: Counter[str]) -> str:
    """Returns the number of runs of each case, as JSON."""
    return json.dumps(totals)
