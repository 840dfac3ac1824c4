# SPDX-License-Identifier: Apache-2.0
"""Reports how far the tokens that an engine chose are behind mlx-lm's own choice.

    python -m vllm_metal.commands.doctor.children.reference MODEL PROMPT TOKENS

PROMPT and TOKENS are JSON lists of token ids.
"""

import argparse
import json
from pathlib import Path

from vllm_metal.commands.doctor.messages import say
from vllm_metal.device import blas
from vllm_metal.settings import envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompt", type=json.loads)
    parser.add_argument("tokens", type=json.loads)
    args = parser.parse_args()
    say(stage="starting")
    kind = envs.requested_device() or "metal"
    if kind == "cpu":
        blas.load()
    import mlx.core as mx
    from huggingface_hub import snapshot_download

    from vllm_metal.device import mlx_device
    from vllm_metal.models.loader import dense_model

    mlx_device.select(kind)
    say(stage="loading the model")
    folder = Path(args.model)
    if not folder.is_dir():
        folder = Path(snapshot_download(args.model, local_files_only=True))
    model = dense_model(folder)
    say(stage="answering")
    before = [*args.prompt, *args.tokens[:-1]]
    logits = model(mx.array([before]))[0, -len(args.tokens) :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(args.tokens)[:, None], axis=-1)[:, 0]
    best = logits.max(axis=-1)
    say(
        behind=(best - chosen).tolist(),
        spread=(best - logits.mean(axis=-1)).tolist(),
        choices=logits.argmax(axis=-1).tolist(),
    )


if __name__ == "__main__":
    main()
