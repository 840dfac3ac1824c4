# SPDX-License-Identifier: Apache-2.0
"""Decides whether our kernels or MLX's operations serve a model, by the checks its layers name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from vllm.logger import init_logger

from metal_kernels import kernel
from metal_kernels.paged_attention import Splits, Tiles
from metal_kernels.paged_attention.fused import is_plain
from metal_kernels.paged_attention.splits import DEFAULT
from metal_kernels.selfcheck import CHOICES, WAYS, Case, Check, Outcome, checks, usable
from vllm_metal.device import selfcheck
from vllm_metal.device.tuned import UNTUNED, Choices, Loaded
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVBackend
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import host_of_states
from vllm_metal.patches.mlx_patches import library_kernels
from vllm_metal.settings import envs, extras, log_files

if TYPE_CHECKING:
    from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer

logger = init_logger(__name__)

_ADVICE = "`vllm-metal doctor --again` checks anew and writes a report to attach to a bug report"
#: What each choice of the self-check is for.
_ROWS = {"decode_way": "decode", "prefill_way": "prompts", "recurrence_way": "long prompts"}


def kv_backend(
    device: envs.Device,
    layers: Sequence[StatefulLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
    splits: Splits = DEFAULT,
    tuned: Loaded = UNTUNED,
) -> KVBackend:
    """What VLLM_METAL_KERNELS asks for; with `auto`, what is right and quickest on this machine.

    Args:
        device: to serve on.
        layers: all that the pool is for.
        dtype: of their queries.
        pool_dtype: of the pool's elements.
        block_size: tokens of a block.
        splits: how the kernels cut contexts. Where their lengths are fixed nothing else is chosen.
        tuned: what this machine's tuner chose for a GPU, among what is right.

    Raises:
        ValueError: the kernels were asked for, by name or by fixed splits, and cannot serve the
            model or machine.
    """
    if device == "metal":
        _check_library_kernels(layers)
        if tuned.complaint is not None:
            logger.warning("%s", tuned.complaint)
    choices = tuned.choices if device == "metal" else UNTUNED.choices
    fixed = splits.fixed is not None
    chosen = _chosen(device, layers, dtype, pool_dtype, block_size, fixed, choices)
    if not isinstance(chosen, KernelBackend):
        return chosen
    found = {"part_cost": choices.part_cost, "slots": choices.slots}
    known = {name: value for name, value in found.items() if value is not None}
    return replace(chosen, splits=replace(splits, **known))


def _chosen(
    device: envs.Device,
    layers: Sequence[StatefulLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
    fixed: bool,
    tuned: Choices,
) -> KVBackend:
    """Returns the same, whose contexts are cut by default."""
    wanted = envs.kernels()
    if wanted == "mlx" or (wanted == "auto" and device == "cpu"):
        return SCATTER
    if wanted == "metal" and device == "cpu":
        raise ValueError("VLLM_METAL_KERNELS=metal needs a Metal device; on a CPU: mlx, interpret")
    if wanted == "interpret" and device == "metal":
        raise ValueError("VLLM_METAL_KERNELS=interpret needs VLLM_METAL_DEVICE=cpu")
    reasons = {layer.unsupported(dtype, block_size) for layer in layers} - {None}
    if wanted == "interpret":
        try:
            kernel.use(kernel.named(extras.INTERPRETER))
        except RuntimeError as error:
            raise ValueError(
                f"VLLM_METAL_KERNELS=interpret: {error}; install it by "
                f"{extras.install_advice('interpreter')}"
            ) from error
    elif not reasons:
        kernel.use(mx.fast.metal_kernel)
        cases = needed_cases(layers, dtype, pool_dtype, block_size)
        if wanted == "metal" or fixed:  # nothing is to be chosen
            cases = [
                replace(case, kernels=tuple(k for k in case.kernels if k not in CHOICES))
                for case in cases
            ]
        logger.info("Checking the Metal kernels; results are kept for later starts")
        found = selfcheck.results(cases, tell=_tell)
        chosen = _of_what_works(cases, found, tuned)
        of_kernels = [outcome for outcome in found if outcome.kernel not in CHOICES]
        failed = selfcheck.describe_failures(of_kernels)
        if chosen is not None:
            if failed:
                logger.warning(
                    "Some Metal kernels are not used: %s. %s", "; ".join(failed), _ADVICE
                )
            for line in _described_choices(found, tuned):
                logger.info("%s", line)
            return chosen
        reasons = {f"they fail their self-check: {'; '.join(failed)}. {_ADVICE}"}
    if not reasons:
        return KERNELS
    reason = "; ".join(sorted(str(reason) for reason in reasons))
    if wanted != "auto":
        raise ValueError(f"VLLM_METAL_KERNELS={wanted}: {reason}")
    if fixed:
        raise ValueError(f"--additional-config fixed_splits needs the Metal kernels: {reason}")
    logger.warning("Attention uses MLX's own operations instead of Metal kernels: %s", reason)
    return SCATTER


def _tell(line: str) -> None:
    """A first start takes most of a minute here, and a server's terminal has warnings alone."""
    logger.info("Kernels: %s", line)
    if log_files.current() is not None:
        print(f"vllm-metal: {line}", flush=True)


def needed_cases(
    layers: Sequence[StatefulLayer], dtype: mx.Dtype, pool_dtype: mx.Dtype, block_size: int
) -> list[Case]:
    """What the layers ask of the kernels, each case once.

    Args:
        layers: all that the pool is for.
        dtype: of their queries.
        pool_dtype: of the pool's elements.
        block_size: tokens of a block.
    """
    host = host_of_states(layers, block_size, pool_dtype)
    found: dict[Case, dict[str, None]] = {}  # kernels by what they are checked for
    for layer in layers:
        for case in layer.cases(dtype, pool_dtype, block_size, host):
            found.setdefault(replace(case, kernels=()), {}).update(dict.fromkeys(case.kernels))
    return [replace(subject, kernels=tuple(names)) for subject, names in found.items()]


def _check_library_kernels(layers: Sequence[StatefulLayer]) -> None:
    """Has mlx-lm's own kernels checked, where the model launches any."""
    calls = dict.fromkeys(call for layer in layers for call in layer.library_calls)
    if not calls:
        return
    logger.info("Checking mlx-lm's Metal kernels; results are kept for later starts")
    for verdict in library_kernels.replace_wrong(calls):
        logger.warning(
            "mlx-lm's kernel %s is not used, MLX's operations take its place: %s",
            verdict.call.name,
            verdict.detail,
        )


def _of_what_works(
    cases: Sequence[Case], found: Sequence[Outcome], tuned: Choices
) -> KernelBackend | None:
    """A KernelBackend that uses only what passed its check, and of it what the tuner chose.

    Tiles stand in for each other: those of prefill for decode's, and the reverse. Without `reduce`
    contexts are not split, without `kv_blocks` MLX moves blocks, and without `graph` the model's
    Python builds each forward. Where the kernels are right and MLX's attention is right and faster,
    over what `kv_gather` reads, it serves the rows for which it is. Without that, no keys and
    values are built of latents. Without `rotation` MLX rotates, by operations of its own.

    Without `convolution` or `recurrence`, MLX's operations compute states, over what `kv_states`
    reads.

    Returns:
        None where the K/V of some layer cannot be written, or not attended to, or where states
        cannot be moved.
    """
    passed = {(outcome.case, outcome.kernel) for outcome in found if outcome.ok}

    def works(kernel: str) -> bool:
        wanted = (case for case in cases if Check(kernel) in checks(case))
        return all((case, kernel) in passed for case in wanted)

    attending = [case for case in cases if "kv_write" in case.kernels]
    tiles = {
        AttentionKind(case.shape, case.window): _tuned_tiles(case, usable(case, found), tuned)
        for case in attending
    }
    if not works("kv_write") or not works("kv_states"):
        return None
    if not all(sizes.decode or sizes.prefill for sizes in tiles.values()):
        return None
    every_size = all(
        sizes == Tiles.for_layer(kind.shape, kind.window) for kind, sizes in tiles.items()
    )
    return KernelBackend(
        tiles={} if every_size else tiles,
        by_mlx=_faster_by_mlx(found, tuned),
        moves_blocks=works("kv_blocks"),
        repeatable=works("graph"),
        computes_states=works("convolution") and works("recurrence"),
        long_prompt=_long_prompt(found, tuned),
        reads_contexts=works("kv_gather"),
        rotates=works("rotation"),
    )


def _tuned_tiles(case: Case, tiles: Tiles, tuned: Choices) -> Tiles:
    """Decode's tiles up to the largest that the tuner chose; all, where none of them is right.

    And what sharing a beginning must save.
    """
    kind = str(case)
    most = tuned.decode_rows.get(kind)
    sizes = tuple(rows for rows in tiles.decode if most is None or rows <= most)
    least = tuned.shared.get(kind, tiles.shared)
    return replace(tiles, decode=sizes or tiles.decode, shared=least)


def _long_prompt(found: Sequence[Outcome], tuned: Choices) -> int | None:
    """Rows from which on MLX's function in chunks is faster for each kind of recurrent layer."""
    rows = [_fewest_rows(outcome, tuned) for outcome in found if outcome.kernel == "recurrence_way"]
    known = [count for count in rows if count is not None]
    return max(known) if known and len(known) == len(rows) else None


def _fewest_rows(outcome: Outcome, tuned: Choices) -> int | None:
    """Rows of one kind, by the tuner, who timed more prompts, else by the self-check."""
    kind = str(outcome.case)
    known = outcome.ok and kind in tuned.long_prompt
    return tuned.long_prompt[kind] if known else outcome.fewest_rows


def _faster_by_mlx(found: Sequence[Outcome], tuned: Choices) -> dict[AttentionKind, ByMLX]:
    """Rows that MLX's attention serves faster over gathered contexts, by kind of layer."""
    faster: dict[AttentionKind, ByMLX] = {}
    for outcome in found:
        kind = AttentionKind(outcome.case.shape, outcome.case.window)
        before = faster.get(kind, ByMLX())
        if outcome.kernel == "decode_way" and outcome.fastest == "mlx":
            faster[kind] = replace(before, decodes=True)
        elif outcome.kernel == "prefill_way" and (rows := _prompt_rows(outcome, tuned)):
            case = outcome.case
            force_fused = tuned.force_fused.get(str(case))
            if is_plain(case.shape, case.dtype, case.softcap):
                force_fused = False
            faster[kind] = replace(before, prompts=rows, force_fused=force_fused)
    return {kind: rows for kind, rows in faster.items() if rows}


def _prompt_rows(outcome: Outcome, tuned: Choices) -> Mapping[int, int | None]:
    """Rows of a prompt from which on MLX attends faster, by contexts.

    By the tuner, who timed more of them, else by the self-check, for any context.
    """
    chosen = tuned.prompt_rows.get(str(outcome.case)) if outcome.ok else None
    if chosen is not None:
        return {int(context): rows for context, rows in chosen.items()}
    return {} if outcome.fewest_rows is None else {1: outcome.fewest_rows}


def _described_choices(found: Sequence[Outcome], tuned: Choices) -> Iterator[str]:
    """A line for each choice: what serves, and the times."""
    for outcome in found:
        if outcome.kernel not in CHOICES:
            continue
        rows, case = _ROWS[outcome.kernel], outcome.case
        if not outcome.ok:
            yield f"{rows} ({case}) by our kernels: no times, {outcome.detail}"
        elif outcome.times:
            ours, others = (outcome.times[way] for way in WAYS)
            times = ", ".join(
                f"{call}: {ours[call] * 1e6:.0f} and {others[call] * 1e6:.0f} µs" for call in ours
            )
            serves = _serves(outcome, tuned)
            near = "".join(
                f"; {call}: {shares['copy']:.2f} of a copy's speed"
                for call, shares in outcome.shares.items()
            )
            yield f"{rows} ({case}) by {serves}; our kernels' time and MLX's for {times}{near}"


def _serves(outcome: Outcome, tuned: Choices) -> str:
    """What serves after a choice, in words."""
    if outcome.kernel == "decode_way":
        return "MLX's attention" if outcome.fastest == "mlx" else "our kernels"
    if outcome.kernel == "recurrence_way":
        fewest = _fewest_rows(outcome, tuned)
        return "our kernels" if fewest is None else f"MLX from {fewest} rows on"
    counts = _prompt_rows(outcome, tuned)
    if len(counts) == 1:
        return f"MLX's attention from {next(iter(counts.values()))} rows on"
    known = [f"{rows} rows of {context}" for context, rows in counts.items() if rows is not None]
    return f"MLX's attention from {', '.join(known)} on" if known else "our kernels"
