# SPDX-License-Identifier: Apache-2.0
"""Parses the plugin's own settings, the keys of --additional-config, and defines their defaults."""

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
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

OPTION = "--additional-config"
#: Keys that vLLM itself adds for attention backends that this plugin does not use:
#: --gdn-prefill-backend, --kda-prefill-backend, --kda-decode-backend.
VLLM_KEYS = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")
#: Default of max_step_ms on the CPU device. Each chunk there copies the context before it, which
#: would take most of the time of a chunk short enough for 60 ms.
_CPU_STEP_MS = 200.0
_METAL_STEP_MS = 60.0  # 16 tokens/s per stream, about reading speed

#: Minimum of fixed_splits, and the step of its values: the kernels walk contexts in strips of up to
#: 16 keys.
MIN_SPLIT = 256
_SPLIT_STEP = 16


def _default_max_step_ms() -> float:
    return _CPU_STEP_MS if envs.requested_device() == "cpu" else _METAL_STEP_MS


def _milliseconds(value: Any) -> float | None:
    # 0 is rejected: it could mean either no bound or no time.
    return None if value is None else values.positive(value, "milliseconds, or null for no bound")


def _fixed_splits(value: Any) -> int | None:
    wanted = f"a multiple of {_SPLIT_STEP} from {MIN_SPLIT} on, or null for what fits each step"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and value >= MIN_SPLIT and value % _SPLIT_STEP == 0):
        return value
    raise ValueError(f"must be {wanted}, not {value!r}")


def _draft_bits(value: Any) -> int | None:
    """Reads the bits of a drafter's weights; None: as in its files."""
    if value in (None, 4, 8) and not isinstance(value, bool):
        return value
    raise ValueError(f"must be 4, 8, or null for the checkpoint's own, not {value!r}")


def embedding_tables(value: Any) -> str:
    """Checks a value of `embedding_tables`; raises ValueError if it is none of the three."""
    if value in ("auto", "memory", "disk"):
        return str(value)
    raise ValueError(f'must be "auto", "memory" or "disk", not {value!r}')


def _drafts(value: Any) -> str:
    if value in ("auto", "off"):
        return str(value)
    raise ValueError(f'must be "off", or "auto" to use an MTP layer or assistant, not {value!r}')


#: Parts that can be removed from system messages; see serving/prefix_misses/normalize.py.
NORMALIZED = ("billing_header", "token_countdown", "times", "uuids")


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not set(map(str, value)) <= set(NORMALIZED):
        raise ValueError(f"must be a list of {', '.join(NORMALIZED)}, not {value!r}")
    return tuple(name for name in NORMALIZED if name in value)


def _duration_or_never(value: Any) -> float:
    if value == "never":
        return math.inf
    try:
        return values.duration(value)
    except ValueError as error:
        raise ValueError(f'{error}; or write "never"') from error


_READERS: Mapping[str, values.Reader] = {
    "fixed_draft_length": values.flag,
    "drafts": _drafts,
    "prompt_lookup": values.flag,
    "fixed_splits": _fixed_splits,
    "draft_quantization": _draft_bits,
    "max_step_ms": _milliseconds,
    "embedding_tables": embedding_tables,
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
#: Maps deprecated key names, accepted with a warning, to current ones.
DEPRECATED_KEYS = {"normalise_prompts": "normalize_prompts"}
#: Keys that configure the cache on disk.
PREFIX_CACHE_KEYS = tuple(key for key in _READERS if key.startswith("prefix_cache"))


@dataclass(frozen=True)
class AdditionalConfig:
    """Values of --additional-config, one field per key, named as users type it."""

    #: Whether an MTP layer or assistant drafts without --speculative-config: "auto", or "off".
    drafts: str = "auto"
    #: Always draft num_speculative_tokens tokens, regardless of the cost of verifying them.
    fixed_draft_length: bool = False
    #: Verify a copy of a request's own text instead of a draft network's tokens, while it repeats
    #: that text; None: depends on the method (engine/spec_decode/registry.py).
    prompt_lookup: bool | None = None
    #: Keys per part when attention splits contexts; None: chosen for each step.
    fixed_splits: int | None = None
    #: Bits that a block drafter's linear layers are quantized to when loaded; None: those of its
    #: files.
    draft_quantization: int | None = None
    #: Time limit in milliseconds of a step that delays streams; None: no limit.
    max_step_ms: float | None = field(default_factory=_default_max_step_ms)
    #: Where tables of per-layer embeddings are: "memory", "disk", or "auto": on disk if the weights
    #: would take more than half of the memory (engine/weights/disk_tables.py).
    embedding_tables: str = "auto"
    #: Wire weights and KV pool, so that macOS does not move them out of the GPU's reach after a
    #: pause; None: only weights, if they are large (engine/memory/wiring.py).
    wire_memory: bool | None = None
    #: Keep a Mac awake while there are requests.
    keep_awake: bool = True
    #: Reject a model if its own dense forward and the engine's paged forward disagree.
    dense_check: bool = True
    #: Explain why a request missed the prefix cache although a similar one came before.
    explain_prefix_misses: bool = True
    #: Parts removed from system messages before templating because they change with each request.
    normalize_prompts: tuple[str, ...] = ()
    #: Choose the tool-call and reasoning parsers by the model's files, unless flags name them.
    #: `vllm serve` reads it before there is an engine: serving/parsers/serve.py.
    choose_parsers: bool = True
    #: Idle seconds before the KV pool's memory is freed; None: never.
    idle_sleep: float | None = None
    #: The same for the weights, counted from the same moment; None: twice `idle_sleep`.
    idle_sleep_weights: float | None = None
    #: Folder of the prefix cache on disk; None: no such cache, or --kv-transfer-config names it.
    prefix_cache_dir: Path | None = None
    #: Maximum bytes of that folder; None: the default, which depends on the free space.
    prefix_cache_bytes: int | None = None
    #: Maximum bytes written per calendar day; None: the default.
    prefix_cache_daily_writes: int | Literal["unlimited"] | None = None
    #: File with the secret that `cache_salt`s are derived from; None: requests with a salt are not
    #: cached on disk.
    prefix_cache_salt_key: Path | None = None

    @staticmethod
    def of(vllm_config: VllmConfig | EngineArgs) -> AdditionalConfig:
        """Returns the user's settings, with defaults for keys that are not set.

        Raises ValueError for anything but a JSON object, an unknown key, a value of the wrong type,
        or a key that needs prefix_cache_dir without it.
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
        for old in DEPRECATED_KEYS.keys() & ours.keys():
            if DEPRECATED_KEYS[old] in ours:
                raise ValueError(
                    f"{OPTION} has {old!r} and {DEPRECATED_KEYS[old]!r}: leave out the first"
                )
            logger.warning_once(
                "%s: %r was renamed to %r; use the new name", OPTION, old, DEPRECATED_KEYS[old]
            )
            ours[DEPRECATED_KEYS[old]] = ours.pop(old)
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
                "pool is freed first"
            )
