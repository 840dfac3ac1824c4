# SPDX-License-Identifier: Apache-2.0
"""Runs mlx-lm alone, to compare an engine's tokens with its logits, or to measure its speed.

python -m vllm_metal.cli.doctor.children.mlx_lm_alone MODEL judge PROMPT TOKENS
python -m ... MODEL time DTYPE NUM_PROMPT NUM_ANSWER

PROMPT and TOKENS are JSON lists of token ids; DTYPE is that of the engine to compare with.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_metal.device import blas
from vllm_metal.device.child import send_message
from vllm_metal.settings import envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    asked = parser.add_subparsers(required=True)
    judge = asked.add_parser("judge")
    judge.add_argument("prompt", type=json.loads)
    judge.add_argument("tokens", type=json.loads)
    judge.set_defaults(run=_judge)
    time = asked.add_parser("time")
    time.add_argument("dtype")
    time.add_argument("num_prompt", type=int)
    time.add_argument("num_answer", type=int)
    time.set_defaults(run=_time)
    args = parser.parse_args()
    send_message(stage="starting")
    kind = envs.requested_device() or "metal"
    if kind == "cpu":
        blas.load()
    from vllm_metal.device import mlx_device

    mlx_device.select(kind)
    args.run(args)


def _judge(args: argparse.Namespace) -> None:
    import mlx.core as mx
    from mlx_lm.utils import hf_repo_to_path

    from vllm_metal.engine.models.loader import dense_model
    from vllm_metal.engine.weights import folders

    send_message(stage="loading the model")
    folder = Path(folders.folder_of(args.model))
    model = dense_model(folder if folder.is_dir() else hf_repo_to_path(args.model))
    send_message(stage="answering")
    before = [*args.prompt, *args.tokens[:-1]]
    logits = model(mx.array([before]))[0, -len(args.tokens) :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(args.tokens)[:, None], axis=-1)[:, 0]
    best = logits.max(axis=-1)
    send_message(
        behind=(best - chosen).tolist(),
        spread=(best - logits.mean(axis=-1)).tolist(),
        choices=logits.argmax(axis=-1).tolist(),
    )


def _time(args: argparse.Namespace) -> None:
    import mlx.core as mx
    from mlx_lm import stream_generate

    send_message(stage="loading the model")
    dtype = getattr(mx, args.dtype)
    model, tokenizer = _load(args.model, dtype)
    model.set_dtype(dtype)
    tokenizer.eos_token_ids = []  # answers always have the requested length
    prompt = [5 + index * 7 % 50 for index in range(args.num_prompt)]
    send_message(stage="answering")
    for _ in range(2):  # the first is a warm-up
        *_, last = stream_generate(model, tokenizer, prompt, args.num_answer)
    send_message(
        prefill=last.prompt_tps,
        # mlx-lm's time starts at the first token, but its count includes that token.
        decode=last.generation_tps * (last.generation_tokens - 1) / last.generation_tokens,
        num_answer=last.generation_tokens,
        parameters=used_parameters(model),
    )


def used_parameters(model: Any) -> int:
    """Returns the parameters that a token uses, counting only the experts it is routed to."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.utils import get_total_parameters

    total = float(get_total_parameters(model))
    used = getattr(getattr(model, "args", None), "num_experts_per_tok", None)
    for module in model.modules():
        if used and isinstance(module, QuantizedSwitchLinear | SwitchLinear):
            weights = module.weight.size * (32 // module.bits if hasattr(module, "bits") else 1)
            total -= weights * (1 - used / module.num_experts)
    return round(total)


def _load(name: str, dtype: Any) -> tuple[Any, Any]:
    """Loads mlx-lm's model and tokenizer; a GGUF model gets the engine's weights."""
    from mlx_lm import load
    from mlx_lm.utils import load_tokenizer

    from vllm_metal.engine.models.loader import lazy_model
    from vllm_metal.engine.weights import folders
    from vllm_metal.identity.model_files import is_gguf

    folder = Path(folders.folder_of(name))
    if not is_gguf(folder):
        model, tokenizer = load(name)[:2]
        return model, tokenizer
    return lazy_model(folder, dtype), load_tokenizer(folder)


if __name__ == "__main__":
    main()
