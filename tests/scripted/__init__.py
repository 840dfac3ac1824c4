# SPDX-License-Identifier: Apache-2.0
"""A model with scripted greedy output, for agent tests on a real engine.

    scripts = [Script((Turn(calls=(Call("read", {"path": "notes"}),)), Turn("It says hello.")))]
    model = scripted.checkpoint(folder, scripts)

Serve it in float32, with `--tool-call-parser hermes` and `--enable-auto-tool-choice`, and with
`--reasoning-parser deepseek_r1` if a turn has reasoning. A grammar (structured outputs, or a tool
choice that is not "auto") allows none of a script's tokens.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.numpy import save_file

from scripted import vocabulary
from scripted.script import Call, Script, Turn, check
from scripted.weights import CONFIG, MAX_RESULTS, MAX_SCRIPTS, weights
from vllm_metal.engine.models.embedded import embedded_model_path

__all__ = ["MAX_RESULTS", "MAX_SCRIPTS", "Call", "Script", "Turn", "checkpoint"]

_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def checkpoint(folder: Path, scripts: Sequence[Script]) -> Path:
    """Writes a model that says `scripts`; returns its folder.

    Args:
        folder: folder to create.
        scripts: one without a marker, and those of side requests, the first of which counts.

    Raises:
        ValueError: a script is impossible; the message has its name and the reason.
    """
    check(tuple(scripts), MAX_SCRIPTS, MAX_RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    reasons = any(turn.reasoning for script in scripts for turn in script.turns)
    known = vocabulary.write(folder, embedded_model_path(dequantize=True), scripts, reasons)
    unmarked = next(number for number, script in enumerate(scripts) if script.marker is None)
    save_file(weights(known, unmarked), folder / "model.safetensors", {"format": "mlx"})
    end = {"eos_token_id": known.end_of_turn, "bos_token_id": known.begin}
    _write(folder, "config.json", CONFIG | {"vocab_size": known.size} | end)
    _write(folder, "generation_config.json", end)
    names = {"eos_token": vocabulary.END_OF_TURN, "bos_token": vocabulary.BEGIN}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    longest = {"model_max_length": CONFIG["max_position_embeddings"]}
    _write(folder, "tokenizer_config.json", names | kind | longest)
    shutil.copy(_TEMPLATE, folder)
    return folder


def _write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content, indent=1))
