# SPDX-License-Identifier: Apache-2.0
"""Reads the plugin's own settings, the keys of --additional-config, and has their defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm.logger import init_logger

from vllm_metal.settings import envs, values

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

OPTION = "--additional-config"
#: Keys under which vLLM passes on options of its own, for attention that this plugin does not
#: serve: --gdn-prefill-backend, --kda-prefill-backend, --kda-decode-backend.
VLLM_KEYS = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")
#: Milliseconds that a step beside streams may take on the CPU device: there each chunk copies the
#: context before it, and so short a chunk as fits into 60 ms spends most of its time on that.
_CPU_STEP_MS = 200.0
_METAL_STEP_MS = 60.0  # 16 tokens a second and stream: as fast as people read

#: The shortest parts of contexts that can be asked for, and what their lengths are a multiple of:
#: the kernels walk contexts in strips of up to 16 keys.
LEAST_SPLIT = 256
_SPLIT_STEP = 16


def _default_max_step_ms() -> float:
    return _CPU_STEP_MS if envs.requested_device() == "cpu" else _METAL_STEP_MS


def _milliseconds(value: Any) -> float | None:
    """A time, or None for no bound. 0 is refused, as it could be taken for either."""
    return None if value is None else values.positive(value, "milliseconds, or null for no bound")


def _fixed_splits(value: Any) -> int | None:
    """Keys of a part of a context, or None for what fits each step."""
    wanted = f"a multiple of {_SPLIT_STEP} from {LEAST_SPLIT} on, or null for what fits each step"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and value >= LEAST_SPLIT and value % _SPLIT_STEP == 0):
        return value
    raise ValueError(f"must be {wanted}, not {value!r}")


#: What can be taken out of system messages; serving/prefix_misses/normalize.py says how.
NORMALIZED = ("billing_header", "token_countdown", "times", "uuids")


def _names(value: Any) -> tuple[str, ...]:
    """Names of NORMALIZED, in its order."""
    if not isinstance(value, list) or not set(map(str, value)) <= set(NORMALIZED):
        raise ValueError(f"must be a list of {', '.join(NORMALIZED)}, not {value!r}")
    return tuple(name for name in NORMALIZED if name in value)


def _duration_or_never(value: Any) -> float:
    """Seconds; infinity for "never"."""
    if value == "never":
        return math.inf
    try:
        return values.duration(value)
    except ValueError as error:
        raise ValueError(f'{error}; "never" is possible, too') from error


_READERS: Mapping[str, values.Reader] = {
    "fixed_draft_length": values.flag,
    "fixed_splits": _fixed_splits,
    "max_step_ms": _milliseconds,
    "wire_memory": values.flag,
    "keep_awake": values.flag,
    "dense_check": values.flag,
    "explain_prefix_misses": values.flag,
    "normalize_prompts": _names,
    "choose_parsers": values.flag,
    "idle_sleep": values.duration,
    "idle_sleep_weights": _duration_or_never,
    "prefix_cache_dir": values.path,
    "prefix_cache_bytes": values.size,
    "prefix_cache_daily_writes": values.daily_size,
    "prefix_cache_salt_key": values.path,
}
#: Keys by their names of before, which are accepted with a warning.
RENAMED = {"normalise_prompts": "normalize_prompts"}
#: Keys that say something of the cache on disk.
PREFIX_CACHE_KEYS = tuple(key for key in _READERS if key.startswith("prefix_cache"))


@dataclass(frozen=True)
class AdditionalConfig:
    """A field for each key, under the names users give."""

    #: Always draft num_speculative_tokens tokens, whatever verifying them costs.
    fixed_draft_length: bool = False
    #: Keys of each part that attention cuts contexts into; None: what fits each step.
    fixed_splits: int | None = None
    #: Milliseconds that a step may take where it delays streams; None: any time.
    max_step_ms: float | None = field(default_factory=_default_max_step_ms)
    #: Keep weights and KV pool from being moved out of the GPU's reach after a pause; None: weights
    #: alone, where they are large (memory/wiring.py).
    wire_memory: bool | None = None
    #: Keep a Mac awake while there are requests.
    keep_awake: bool = True
    #: Refuse a model whose own dense forward computes something else than the engine does.
    dense_check: bool = True
    #: Say of each request why it was not found in the prefix cache, if one like it came before.
    explain_prefix_misses: bool = True
    #: What is taken out of system messages before templating, as it changes with each request.
    normalize_prompts: tuple[str, ...] = ()
    #: Choose the parsers of tool calls and thoughts by the model's files, where no flag says them.
    #: `vllm serve` reads it before there is an engine: serving/parsers/serve.py.
    choose_parsers: bool = True
    #: Seconds without a request after which the KV pool's memory is given back; None: it stays.
    idle_sleep: float | None = None
    #: Likewise the weights', from the same moment on; None: twice as many seconds as the pool's.
    idle_sleep_weights: float | None = None
    #: Folder of the prefix cache on disk; None: there is none, or --kv-transfer-config names it.
    prefix_cache_dir: Path | None = None
    #: Most bytes of that folder; None: the default, which depends on the free space.
    prefix_cache_bytes: int | None = None
    #: Most bytes written in a calendar day; None: the default.
    prefix_cache_daily_writes: int | Literal["unlimited"] | None = None
    #: File of the secret that `cache_salt`s are derived from; None: no request with a salt is kept.
    prefix_cache_salt_key: Path | None = None

    @staticmethod
    def of(vllm_config: VllmConfig) -> AdditionalConfig:
        """What the user gave, defaults elsewhere.

        Raises:
            ValueError: it is no JSON object, has a key that nobody reads, a value of another type
                than the key's, or a key that needs prefix_cache_dir without it.
        """
        given = vllm_config.additional_config
        if given is None:
            return AdditionalConfig()
        if not isinstance(given, dict):
            raise ValueError(
                f"{OPTION} must be a JSON object with keys of {values.known(_READERS)}, not a "
                f"{type(given).__name__}"
            )
        ours = {key: value for key, value in given.items() if key not in VLLM_KEYS}
        for old in RENAMED.keys() & ours.keys():
            if RENAMED[old] in ours:
                raise ValueError(f"{OPTION} has {old!r} and {RENAMED[old]!r}: leave out the first")
            logger.warning_once(
                "%s: %r was renamed to %r; use the new name", OPTION, old, RENAMED[old]
            )
            ours[RENAMED[old]] = ours.pop(old)
        found = AdditionalConfig(**values.read(ours, _READERS, OPTION))
        alone = [key for key in PREFIX_CACHE_KEYS if key in given]
        if alone and found.prefix_cache_dir is None:
            raise ValueError(
                f"{OPTION} {alone[0]!r} needs 'prefix_cache_dir', the folder of the cache on disk"
            )
        found._check_idle_sleep()
        return found

    def _check_idle_sleep(self) -> None:
        pool, weights = self.idle_sleep, self.idle_sleep_weights
        if weights is not None and (pool is None or weights < pool):
            raise ValueError(
                f"{OPTION} 'idle_sleep_weights' needs 'idle_sleep', and may be no shorter: the KV "
                "pool is given back first"
            )
