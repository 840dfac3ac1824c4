# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal fit`: estimates, asks memory/advice.py for advice, and prints both."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_metal.platform import metal_platform  # first: it loads a BLAS before anything imports MLX

# isort: split
from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.commands.fit import encoder, engine, ranks, report
from vllm_metal.commands.fit.estimate import Estimate, Model, estimate
from vllm_metal.commands.fit.known import KNOWN, KnownModel
from vllm_metal.commands.fit.machine import Machine
from vllm_metal.commands.fit.report import Answer
from vllm_metal.commands.fit.source import folder
from vllm_metal.encoders.served import of_content
from vllm_metal.kv_cache import formats
from vllm_metal.memory import advice, budget
from vllm_metal.models.weight_files import ModelLoadError

#: The quantised cache that is compared with the asked one; int8 takes the same bytes.
_QUANTISED = "fp8"
_NAMED_CHANGES = 4
#: Lengths that are tried with known models; a long chat needs the least of them.
_CONTEXTS = (8192, 16384, 32768)


def run(args: Namespace) -> int:
    """Prints the answer and returns the exit status: 0 if the requests fit, 1 if not.

    Without a model, the answer is that of the largest known one that fits.

    Args:
        args: of `vllm_metal.commands.cli`; None where an option was not given.

    Raises:
        ValueError: the model is not found, or the engine would refuse it or these options.
    """
    answer = _answered(args)
    if isinstance(answer, encoder.Answer):
        content, text = answer.content(), answer.text()
    else:
        content, text = report.as_json(answer), report.as_text(answer)
    print(json.dumps(content, indent=1) if args.json else text)
    return 0 if answer.fits else 1


def find(args: Namespace) -> Answer:
    """The answer that `run` prints for a model that generates; args and errors are those of `run`.

    Raises:
        ValueError: the model is an encoder.
    """
    answer = _answered(args)
    if isinstance(answer, encoder.Answer):
        raise ValueError(f"{answer.model} is an encoder ({answer.architecture}): it writes no text")
    return answer


def _answered(args: Namespace) -> Answer | encoder.Answer:
    machine = Machine.this() if args.memory is None else Machine.mac(args.memory)
    if (engines := args.data_parallel_size_local or 1) > 1:
        machine = machine.part(engines)
    try:
        if args.model is None:
            return _largest_known(args, machine)
        with folder(args.model) as path:
            served = of_content(json.loads((path / "config.json").read_text()))
            if served is not None:
                return encoder.find(args, path, served, machine)
            if args.tensor_parallel_size is None:
                return _answer(args, path, machine)
            with ranks.alone(args.tensor_parallel_size) as ring:
                return _answer(args, path, machine, ring)
    except (ModelLoadError, NotImplementedError, ImportError) as error:
        raise ValueError(str(error)) from error


def question(model: str | None, context: int | None) -> Namespace:
    """Arguments of `run` for one request on this machine, with a server's defaults.

    Args:
        model: a folder, or a name on the hub; None: the largest known one that fits.
        context: tokens of the longest request; None: what fits.
    """
    unset = (
        "memory",
        "requests",
        "data_parallel_size_local",
        "dtype",
        "runner",
        "max_num_seqs",
        "num_speculative_tokens",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "block_size",
        "max_loras",
        "max_cpu_loras",
        "max_lora_rank",
        "language_model_only",
        "tensor_parallel_size",
    )
    asked = {"model": model, "context": context, "kv_cache_dtype": "auto"}
    return Namespace(**dict.fromkeys(unset), **asked)


def _largest_known(args: Namespace, machine: Machine) -> Answer:
    """The answer for the largest known model that fits, or for the smallest of all.

    The context is that of --context, or the longest of `_CONTEXTS` that fits.
    """
    least, *longer = (args.context,) if args.context else _CONTEXTS
    for known in KNOWN:
        with known.folder() as path:
            weights = (path / "model.safetensors").stat().st_size
            if known is not KNOWN[-1] and weights > machine.total - machine.in_use:
                continue  # the estimate of a step takes seconds

            def answer(context: int, known: KnownModel = known, path: Path = path) -> Answer:
                asked = vars(args) | {"model": known.name, "context": context}
                return _answer(Namespace(**asked), path, machine)

            found = answer(least)
            if found.fits:
                better = (answer(context) for context in reversed(longer))
                return next((one for one in better if one.fits), found)
    return found


def _answer(
    args: Namespace, path: Path, machine: Machine, ring: ranks.OneOf | None = None
) -> Answer:
    content = json.loads((path / "config.json").read_text())
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"config.json of {args.model} names no model_type")
    dtype = engine.dtype_of(content, machine.kind, args.dtype or "auto")
    _check(args, formats.offered(args.kv_cache_dtype, dtype))
    rows = args.max_num_batched_tokens or metal_platform.MAX_NUM_BATCHED_TOKENS[machine.kind]
    requests = args.max_num_seqs or args.requests or min(metal_platform.MAX_NUM_SEQS, rows)
    if requests > rows:
        raise ValueError(f"{requests} requests at once need --max-num-batched-tokens {requests}")
    runner = args.runner or "generate"
    if runner == "pooling" and args.num_speculative_tokens:
        raise ValueError("--num-speculative-tokens with --runner pooling: nothing is sampled")
    pools, text_only = runner == "pooling", bool(args.language_model_only)
    model = Model.read(path, content["model_type"], dtype, pools, text_only, ring)
    estimates = {}
    for cache_dtype in dict.fromkeys((args.kv_cache_dtype, _QUANTISED)):
        config = engine.config(
            model_type=model.model_type,
            dtype=dtype,
            cache_dtype=cache_dtype,
            max_model_len=_context(args, content),
            fitted=args.context is None,
            max_num_seqs=requests,
            max_num_batched_tokens=rows,
            gpu_memory_utilization=args.gpu_memory_utilization,
            block_size=args.block_size or BLOCK_SIZES[0],
            block_size_asked=args.block_size is not None,
            num_drafts=args.num_speculative_tokens or 0,
            runner_type=runner,
            adapters=engine.adapters(args.max_loras, args.max_cpu_loras, args.max_lora_rank),
        )
        estimates[cache_dtype] = estimate(model, config, machine)
        if estimates[cache_dtype].quantised is None:
            break  # what was asked for is quantised already
    length = _length(estimates[args.kv_cache_dtype], args.requests or 1)
    estimates = {name: estimate.of_length(length) for name, estimate in estimates.items()}
    return _judged(args, model, machine, estimates)


def _length(asked: Estimate, requests: int) -> int:
    """Tokens of the longest request: as asked for, else as the engine takes it, what fits."""
    if not asked.settings.fitted:
        return asked.settings.max_model_len
    longest = budget.longest(asked.measured, asked.settings, asked.request(requests))
    return max(longest, asked.settings.least_context)


def _check(args: Namespace, cache_offered: bool) -> None:
    if not cache_offered:
        raise ValueError(
            f"--kv-cache-dtype {args.kv_cache_dtype} is not supported: choose one of "
            f"{', '.join(formats.OFFERED)}"
        )
    if args.block_size not in (None, *BLOCK_SIZES):
        raise ValueError(
            f"--block-size {args.block_size} is not supported: choose one of {BLOCK_SIZES}"
        )


def _context(args: Namespace, content: dict[str, Any]) -> int:
    """Tokens of the longest request."""
    most, asked = engine.longest_text(content), args.context
    if (length := asked or most) is None:
        raise ValueError(
            "config.json does not say how long a text may be: give --context, such as 32k"
        )
    if most is not None and length > most:
        raise ValueError(
            f"--context {asked} is longer than the {most} tokens that the model is made for"
        )
    return int(length)


def _judged(
    args: Namespace, model: Model, machine: Machine, estimates: dict[str, Estimate]
) -> Answer:
    wanted = args.requests or 1
    found = {
        cache_dtype: budget.fits(e.measured, e.settings, e.request(wanted))
        for cache_dtype, e in estimates.items()
    }
    command = partial(_command, args, estimates[args.kv_cache_dtype])
    return Answer(
        model=args.model,
        model_type=model.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        machine=machine,
        estimates=estimates,
        asked=args.kv_cache_dtype,
        wanted=wanted,
        fits=found[args.kv_cache_dtype],
        changes=_changes(estimates[args.kv_cache_dtype], wanted),
        commands=tuple(command(cache_dtype) for cache_dtype, fits in found.items() if fits),
    )


def _changes(found: Estimate, wanted: int) -> tuple[str, ...]:
    """Advice on what would make the requests fit; empty if they do."""
    request = found.request(wanted)
    if budget.fits(found.measured, found.settings, request):
        return ()
    fewer = [f"--requests {found.requests} or less"] if found.requests else []
    changes = islice(advice.changes(found.measured, found.settings, request), _NAMED_CHANGES)
    return (*fewer, *(change.advice for change in changes))


def _command(args: Namespace, found: Estimate, cache_dtype: str) -> str:
    """The command that serves the model with the settings of the estimate."""
    drafts = {}
    if args.num_speculative_tokens:
        drafts = {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens}
    options = {
        "runner": args.runner,
        "data-parallel-size": args.data_parallel_size_local,
        "max-model-len": found.settings.max_model_len,
        "max-num-seqs": found.settings.max_num_seqs,
        "max-num-batched-tokens": args.max_num_batched_tokens,
        "kv-cache-dtype": None if cache_dtype == "auto" else cache_dtype,
        "gpu-memory-utilization": args.gpu_memory_utilization,
        "block-size": args.block_size,
        "dtype": args.dtype,
        "tensor-parallel-size": args.tensor_parallel_size,
        "speculative-config": drafts and json.dumps(drafts),
    }
    text = ["--language-model-only"] if args.language_model_only else []
    return report.serve_command(args.model, options, text)
