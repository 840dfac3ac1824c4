# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal fit`: finds the model and the machine, and prints whether the model fits."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from vllm_metal.platform import metal_platform  # noqa: F401  # first: it loads a BLAS before MLX

# isort: split
from vllm_metal.cli.fit import encoder, report
from vllm_metal.cli.fit.judge import FitRequest, judge
from vllm_metal.cli.fit.known import KNOWN, KnownModel
from vllm_metal.cli.fit.layout import Layout
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.cli.fit.report import FitResult
from vllm_metal.cli.fit.source import folder
from vllm_metal.engine.pooling.encoders.served import of_content
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.platform import model_folders

#: Context lengths to try with known models; a long chat needs at least the first.
_CONTEXTS = (8192, 16384, 32768)


def run(args: Namespace) -> int:
    """Prints the estimate and returns the exit status: 0 if the requests fit, 1 if not.

    Without a model, it is for the largest known one that fits. In `args`, options that are
    not given are None. Raises ValueError if the model is not found, or the engine would reject it
    or the options.
    """
    answer = _answer(args)
    if isinstance(answer, encoder.EncoderFitResult):
        content, text = answer.content(), answer.text()
    else:
        content, text = report.as_json(answer), report.as_text(answer)
    print(json.dumps(content, indent=1) if args.json else text)
    return 0 if answer.fits else 1


def find(args: Namespace) -> FitResult:
    """Returns what `run` prints for a model that generates; raises ValueError for an encoder."""
    answer = _answer(args)
    if isinstance(answer, encoder.EncoderFitResult):
        raise ValueError(
            f"{answer.model} is an encoder ({answer.architecture}), which generates no text: "
            "choose another model"
        )
    return answer


def options_for(model: str | None, context: int | None) -> Namespace:
    """Returns arguments of `run` for one request on this machine, with a server's defaults.

    Args:
        model: folder or hub name; None for the largest known model that fits.
        context: tokens of the longest request; None for as many as fit.
    """
    unset = (
        "memory",
        "requests",
        "data_parallel_size_local",
        "dtype",
        "runner",
        "max_num_seqs",
        "num_speculative_tokens",
        "draft_model",
        "draft_quantization",
        "embedding_tables",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "block_size",
        "max_loras",
        "max_cpu_loras",
        "max_lora_rank",
        "language_model_only",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "nnodes",
    )
    asked = {"model": model, "context": context, "kv_cache_dtype": "auto"}
    return Namespace(**dict.fromkeys(unset), **asked)


def _answer(args: Namespace) -> FitResult | encoder.EncoderFitResult:
    layout = Layout.of(args)
    machine = Machine.this() if args.memory is None else Machine.mac(args.memory)
    machine = layout.part(machine.part(args.data_parallel_size_local or 1))
    try:
        if args.model is None:
            return _largest_known(args, machine, layout)
        with folder(args.model) as path:
            content = model_folders.check(path)
            served = of_content(content)
            if served is None:
                return judge(FitRequest(args, path, content, machine, layout))
            if layout.num_ranks > 1:
                raise ValueError(
                    f"{args.model} is an encoder, which cannot be split across ranks: leave the "
                    "option out"
                )
            return encoder.find(args, path, served, machine)
    except (ModelLoadError, NotImplementedError, ImportError) as error:
        raise ValueError(str(error)) from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
        # From transformers and mlx-lm, which build the model from whatever the file says.
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"config.json of {args.model} does not describe a model that can be built ({problem})"
        ) from error


def _largest_known(args: Namespace, machine: Machine, layout: Layout) -> FitResult:
    """Returns the answer for the largest known model that fits, or for the smallest of all."""
    # --context, or else the longest of `_CONTEXTS` that fits.
    least, *longer = (args.context,) if args.context else _CONTEXTS
    for known in KNOWN:
        with known.folder() as path:
            weights = (path / "model.safetensors").stat().st_size
            free = (machine.total - machine.in_use) * layout.num_ranks
            if known is not KNOWN[-1] and weights > free:
                continue  # saves the estimate of a step, which takes seconds
            print(f"vllm-metal: trying {known.name}", file=sys.stderr, flush=True)

            def answer(context: int, known: KnownModel = known, path: Path = path) -> FitResult:
                asked = Namespace(**(vars(args) | {"model": known.name, "context": context}))
                return judge(FitRequest(asked, path, known.config, machine, layout))

            found = answer(least)
            if found.fits:
                better = (answer(context) for context in reversed(longer))
                return next((one for one in better if one.fits), found)
    return found
