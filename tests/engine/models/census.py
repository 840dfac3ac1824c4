# SPDX-License-Identifier: Apache-2.0
"""Counts the text models of mlx-lm and mlx-vlm, each once, and the supported ones.

`python -m engine.models.census` from tests/ runs all of them. A model is supported if it can be
built (mlx-vlm's: loaded from a folder, with all checks), and 32 tokens of its paged forward equal
its dense forward's, once after a prompt in chunks, and once after a hit of two blocks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.models import doubles, matrix, of_mlx_vlm
from engine.models.folders import NOT_TEXT, SAME_TEXT, SAME_TEXT_OF_MLX_LM, WITHOUT_ROW
from engine.models.recurrent import draw, write_model
from engine.models.test_executor import BLOCK, executor, new_request, of_states
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

NUM_TOKENS = 32
PROMPT = 45
#: Ends of the prompt's chunks; the second is the end of the hit, for layers that keep states.
CHUNKS = (7, 2 * BLOCK, 33, PROMPT)


@dataclass(frozen=True)
class Counted:
    """A text model, and why it is not supported."""

    name: str
    library: str
    refused: str = ""


def folders() -> list[str]:
    """Returns mlx-vlm's model folders, without importing any."""
    import mlx_lm

    root = Path(mlx_lm.__path__[0]).parent / "mlx_vlm" / "models"
    return sorted(path.parent.name for path in root.glob("*/__init__.py"))


def of_mlx_lm_alone() -> list[str]:
    """Returns modules of mlx-lm, each text model once."""
    return [name for name in matrix.modules() if name not in SAME_TEXT_OF_MLX_LM]


def of_mlx_vlm_alone() -> list[str]:
    """Returns folders with a text model that neither mlx-lm nor another folder has."""
    modules = set(matrix.modules())
    return [
        name
        for name in folders()
        if name not in modules and name not in NOT_TEXT and name not in SAME_TEXT
    ]


def counted() -> Iterator[Counted]:
    """Runs every text model."""
    for name in of_mlx_lm_alone():
        yield Counted(name, "mlx-lm", _refusal(lambda n=name: _built(n)))
    for name in of_mlx_vlm_alone():
        yield Counted(name, "mlx-vlm", WITHOUT_ROW.get(name) or _refusal_of_mlx_vlm(name))


def _built(module: str) -> Any:
    mx.random.seed(7)
    model = matrix.small_model(module)
    draw(model)
    model.eval()
    return model


def _refusal_of_mlx_vlm(folder: str) -> str:
    model_type = next(name for name, row in MLX_VLM_MODELS.items() if row.folder == folder)

    def read() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            written = write_model(of_mlx_vlm.FAMILIES[model_type], Path(folder), drawn=True)
            model = lazy_model(Path(written), mx.float32)
            mx.eval(model.parameters())
            return model

    return _refusal(read)


def _refusal(make: Any) -> str:
    """Returns why a model is not supported; empty if it is."""
    try:
        model = make()
        text = _generated(model)
        run = executor(model, "it", num_blocks=12)
    except Exception as error:
        return " ".join(str(error).removeprefix("model_type 'it'").split())[:160]
    blocks = [5, 3, 9, 2, 7, 4]
    # The first request writes all blocks, the second reads its first two.
    for start, ends in ((0, CHUNKS), (2 * BLOCK, (PROMPT,))):
        if not np.array_equal(_paged(run, text, blocks, start, ends), text[PROMPT:]):
            return "gives other tokens than the dense forward"
    return ""


def _generated(model: Any) -> list[int]:
    """Returns a prompt and its greedy continuation by the library's own forward and cache."""
    vocab = model(mx.array([[1]])).shape[-1]
    text = np.random.default_rng(3).integers(3, vocab, PROMPT).tolist()
    cache, given = make_prompt_cache(model), text
    for _ in range(NUM_TOKENS):
        logits = model(mx.array([given]), cache=cache)[0, -1]
        given = [int(mx.argmax(logits))]
        text = text + given
    return text


def _paged(run: Any, text: list[int], blocks: list[int], start: int, ends: Any) -> np.ndarray:
    """Returns the most likely tokens at each position from the prompt's end on, paged."""
    requests = Requests(1, 128, BlockTables(1, 1, 9))
    requests.add_request(new_request("0", text, blocks))
    found: list[int] = []
    done = start
    for end in (*ends, *range(PROMPT + 1, len(text))):
        requests.num_computed_tokens_np[requests["0"].req_idx] = done
        batch = prepare(requests, {"0": end - done}, mx.zeros(1, mx.int32))
        ((_, logits),) = of_states(run, batch, requests.block_tables)
        if end >= PROMPT:
            found.append(int(np.argmax(np.array(logits, np.float32)[-1])))
        done = end
    return np.array(found)


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        doubles.install(patch)
        rows = list(counted())
    for row in rows:
        print(f"{row.library:8s} {row.name:24s} {row.refused or 'served'}", flush=True)
    for library in ("mlx-lm", "mlx-vlm"):
        of_it = [row for row in rows if row.library == library]
        print(f"{library}: {sum(not row.refused for row in of_it)} of {len(of_it)} served")
    served = sum(not row.refused for row in rows)
    print(f"both: {served} of {len(rows)} served = {served / len(rows):.1%}")


if __name__ == "__main__":
    sys.exit(main())
