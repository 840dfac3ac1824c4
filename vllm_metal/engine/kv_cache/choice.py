# SPDX-License-Identifier: Apache-2.0
"""Chooses between our Metal kernels and MLX's operations, from the kernels' self-checks."""

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
from metal_kernels.selfcheck import BACKENDS, CHOICES, Case, Check, Outcome, checks, usable
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
#: For log lines: what each choice of the self-check serves.
_LABELS = {"decode_way": "decode", "prefill_way": "prompts", "recurrence_way": "long prompts"}


def kv_backend(
    device: envs.Device,
    layers: Sequence[StatefulLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
    splits: Splits = DEFAULT,
    tuned: Loaded = UNTUNED,
) -> KVBackend:
    """Returns the backend that VLLM_METAL_KERNELS names; for `auto`, the fastest correct one.

    Args:
        layers: all layers of the pool.
        dtype: dtype of the queries.
        pool_dtype: dtype of the pool's elements.
        block_size: tokens per block.
        splits: how the kernels split contexts. With fixed splits, only the kernels may serve.
        tuned: the tuner's choices for this machine's GPU.

    Raises:
        ValueError: VLLM_METAL_KERNELS or fixed splits require the kernels, and they cannot serve
            this model or machine.
    """
    if device == "metal":
        _check_library_kernels(layers)
        if tuned.complaint is not None:
            logger.warning("%s", tuned.complaint)
    choices = tuned.choices if device == "metal" else UNTUNED.choices
    fixed = splits.fixed is not None
    chosen = _choose(device, layers, dtype, pool_dtype, block_size, fixed, choices)
    if not isinstance(chosen, KernelBackend):
        return chosen
    found = {"part_cost": choices.part_cost, "slots": choices.slots}
    known = {name: value for name, value in found.items() if value is not None}
    return replace(chosen, splits=replace(splits, **known))


def _choose(
    device: envs.Device,
    layers: Sequence[StatefulLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
    fixed: bool,
    tuned: Choices,
) -> KVBackend:
    wanted = envs.kernels()
    kernel.use(mx.fast.metal_kernel)  # an earlier engine of this process may have interpreted them
    if wanted == "mlx" or (wanted == "auto" and device == "cpu"):
        return SCATTER
    if wanted == "metal" and device == "cpu":
        raise ValueError("VLLM_METAL_KERNELS=metal needs a Metal device: choose mlx or interpret")
    if wanted == "interpret" and device == "metal":
        raise ValueError("VLLM_METAL_KERNELS=interpret needs VLLM_METAL_DEVICE=cpu")
    reasons = {layer.unsupported(dtype, block_size) for layer in layers} - {None}
    if wanted == "interpret":
        try:
            kernel.use(kernel.named(extras.INTERPRETER))
        except RuntimeError as error:
            raise ValueError(
                f"VLLM_METAL_KERNELS=interpret: {error}; run: "
                f"{extras.install_advice('interpreter')}"
            ) from error
    elif not reasons:
        cases = needed_cases(layers, dtype, pool_dtype, block_size)
        if wanted == "metal" or fixed:  # the kernels are chosen, so nothing is timed
            cases = [
                replace(case, kernels=tuple(k for k in case.kernels if k not in CHOICES))
                for case in cases
            ]
        logger.info("Checking the Metal kernels; results are cached for later starts")
        found = selfcheck.results(cases, tell=_report_progress)
        chosen = _backend_from(cases, found, tuned)
        of_kernels = [outcome for outcome in found if outcome.kernel not in CHOICES]
        failed = selfcheck.describe_failures(of_kernels)
        if chosen is not None:
            if failed:
                logger.warning(
                    "Some Metal kernels are not used: %s. %s", "; ".join(failed), _ADVICE
                )
            for line in _describe_choices(found, tuned):
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


def _report_progress(line: str) -> None:
    """Reports progress: a first start takes most of a minute, and servers print only warnings."""
    logger.info("Kernels: %s", line)
    if log_files.current() is not None:
        print(f"vllm-metal: {line}", flush=True)


def needed_cases(
    layers: Sequence[StatefulLayer], dtype: mx.Dtype, pool_dtype: mx.Dtype, block_size: int
) -> list[Case]:
    """Returns the distinct self-check cases of the layers; see `kv_backend` for the arguments."""
    host = host_of_states(layers, block_size, pool_dtype)
    found: dict[Case, dict[str, None]] = {}  # kernels to check, by case
    for layer in layers:
        for case in layer.cases(dtype, pool_dtype, block_size, host):
            found.setdefault(replace(case, kernels=()), {}).update(dict.fromkeys(case.kernels))
    return [replace(subject, kernels=tuple(names)) for subject, names in found.items()]


def _check_library_kernels(layers: Sequence[StatefulLayer]) -> None:
    """Checks mlx-lm's own kernels that the model launches, and replaces wrong ones."""
    calls = dict.fromkeys(call for layer in layers for call in layer.library_calls)
    if not calls:
        return
    logger.info("Checking mlx-lm's Metal kernels; results are cached for later starts")
    for verdict in library_kernels.replace_wrong(calls):
        logger.warning(
            "MLX's operations are used instead of mlx-lm's kernel %s: %s",
            verdict.call.name,
            verdict.detail,
        )


def _backend_from(
    cases: Sequence[Case], found: Sequence[Outcome], tuned: Choices
) -> KernelBackend | None:
    """Returns a KernelBackend that uses only kernels that passed, as the tuner chose.

    If a kernel failed:
        - decode or prefill tiles: the other tiles serve both;
        - `reduce`: contexts are not split;
        - `kv_blocks`, `rotation`: MLX's operations copy blocks or apply RoPE;
        - `graph`: the model's Python builds every forward;
        - `kv_gather`: MLX's attention is not used, and latents are not expanded to K and V;
        - `convolution`, `recurrence`: MLX's operations compute recurrent states.

    Returns:
        None if `kv_write`, `kv_states`, or all attention tiles of some layer failed, or
        `kv_gather` of a model with sparse attention.
    """
    passed = {(outcome.case, outcome.kernel) for outcome in found if outcome.ok}

    def works(kernel: str) -> bool:
        wanted = (case for case in cases if Check(kernel) in checks(case))
        return all((case, kernel) in passed for case in wanted)

    attending = [case for case in cases if "decode" in case.kernels]
    tiles = {
        AttentionKind(case.shape, case.window, extent=case.extent): _tuned_tiles(
            case, usable(case, found), tuned
        )
        for case in attending
    }
    if not works("kv_write") or not works("kv_states"):
        return None
    if not works("kv_gather") and any(map(_is_of_index, cases)):
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


def _is_of_index(case: Case) -> bool:
    """Whether a layer's keys are written and gathered, but no kernel attends to them."""
    return "kv_gather" in case.kernels and "decode" not in case.kernels


def _tuned_tiles(case: Case, tiles: Tiles, tuned: Choices) -> Tiles:
    """Applies the tuner's limits: largest decode tile (if one passed), least shared-prefix gain."""
    kind = str(case)
    most = tuned.decode_rows.get(kind)
    sizes = tuple(rows for rows in tiles.decode if most is None or rows <= most)
    least = tuned.shared.get(kind, tiles.shared)
    return replace(tiles, decode=sizes or tiles.decode, shared=least)


def _long_prompt(found: Sequence[Outcome], tuned: Choices) -> int | None:
    """Returns the fewest tokens for which MLX's chunked recurrence is faster for all layers."""
    rows = [_fewest_rows(outcome, tuned) for outcome in found if outcome.kernel == "recurrence_way"]
    known = [count for count in rows if count is not None]
    return max(known) if known and len(known) == len(rows) else None


def _fewest_rows(outcome: Outcome, tuned: Choices) -> int | None:
    """Returns the fewest tokens for MLX's recurrence: by the tuner, else by the self-check."""
    kind = str(outcome.case)
    known = outcome.ok and kind in tuned.long_prompt
    return tuned.long_prompt[kind] if known else outcome.fewest_rows


def _faster_by_mlx(found: Sequence[Outcome], tuned: Choices) -> dict[AttentionKind, ByMLX]:
    """Maps a kind of layer to the requests for which MLX's attention is faster."""
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
    """Maps a context length to the fewest prompt tokens for which MLX's attention is faster.

    From the tuner, which timed several contexts, else from the self-check, for any context.
    """
    chosen = tuned.prompt_rows.get(str(outcome.case)) if outcome.ok else None
    if chosen is not None:
        return {int(context): rows for context, rows in chosen.items()}
    return {} if outcome.fewest_rows is None else {1: outcome.fewest_rows}


def _describe_choices(found: Sequence[Outcome], tuned: Choices) -> Iterator[str]:
    for outcome in found:
        if outcome.kernel not in CHOICES:
            continue
        rows, case = _LABELS[outcome.kernel], outcome.case
        if not outcome.ok:
            yield f"{rows} ({case}) by our kernels: no times, {outcome.detail}"
        elif outcome.times:
            ours, others = (outcome.times[backend] for backend in BACKENDS)
            times = ", ".join(
                f"{call}: {ours[call] * 1e6:.0f} and {others[call] * 1e6:.0f} µs" for call in ours
            )
            serves = _describe_choice(outcome, tuned)
            near = "".join(
                f"; {call}: {shares['copy']:.2f} of a copy's speed"
                for call, shares in outcome.shares.items()
            )
            yield f"{rows} ({case}) by {serves}; our kernels' time and MLX's for {times}{near}"


def _describe_choice(outcome: Outcome, tuned: Choices) -> str:
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
