# SPDX-License-Identifier: Apache-2.0
"""Allows speculative methods and options that vLLM rejects, or ties to a package or a device."""

# Remove when a platform can declare how its worker drafts and what it verifies, and medusa and
# mlp_speculator are served no more. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.settings.architectures import DROPPED_HEADS

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

#: Further keys for config.json of the dropped heads that are being read.
_KEYS: ContextVar[dict[str, Any] | None] = ContextVar("keys", default=None)


def allow_lookup_methods() -> None:
    """Makes vLLM accept `ngram` and `suffix` as this plugin serves them.

    vLLM supports async scheduling with `ngram_gpu` but not with `ngram`, which are the same here.
    For `suffix` it requires the package arctic-inference, which this plugin does not use. Call this
    in the process that reads the options; for the engine's see `schedule_ahead_with_ngram`.
    """
    import vllm.config.speculative as speculative
    import vllm.config.vllm as config

    config.NgramGPUTypes = Literal["ngram", "ngram_gpu"]
    speculative.has_arctic_inference = lambda: True


def keep_dropped_heads() -> None:
    """Makes vLLM accept the methods `medusa` and `mlp_speculator`, which it has dropped.

    Until vLLM would compare the vocabularies, the method is passed off as a draft model. The heads'
    own arrays show which tokens they can draft.
    """
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "create_speculative_config", _as_draft_model)
    replace(SpeculativeConfig, "compose_draft_hf_overrides", _of_heads)
    replace(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", _named_again)


def _as_draft_model(
    create: Callable[..., Any], self: EngineArgs, *args: Any, **options: Any
) -> SpeculativeConfig | None:
    given = dict(self.speculative_config or {})
    method = self.spec_method or given.get("method")
    if method not in DROPPED_HEADS:
        return create(self, *args, **options)
    if self.spec_method is not None:
        self.spec_method = "draft_model"
    else:
        self.speculative_config = given | {"method": "draft_model"}
    # Medusa's authors publish heads without these keys.
    token = _KEYS.set({"model_type": method, "architectures": [DROPPED_HEADS[method]]})
    try:
        return create(self, *args, **options)
    finally:
        _KEYS.reset(token)


def _of_heads(compose: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return _KEYS.get() or compose(*args, **options)


def _named_again(check: Callable[..., None], self: SpeculativeConfig) -> None:
    draft = self.draft_model_config
    kind = None if draft is None else draft.hf_config.model_type
    if self.method == "draft_model" and kind in DROPPED_HEADS:
        self.method = kind
    check(self)


def schedule_ahead_with_ngram(speculative_config: SpeculativeConfig | None) -> None:
    """Turns `ngram` into `ngram_gpu` in the configuration for the engine's process.

    That process checks again, with vLLM's own list, whether the method allows async scheduling.
    """
    if speculative_config is not None and speculative_config.method == "ngram":
        speculative_config.method = "ngram_gpu"


def allow_min_p_and_logit_bias() -> None:
    """Allows `min_p` and `logit_bias` in requests with speculation.

    vLLM rejects both (`SamplingParams._validate_spec_decode`), because its logits processors for
    them skip the rows of drafts. Our sampler applies every transform of a request to each of its
    rows (`engine.sample`), so tokens follow the same distribution with and without drafts.
    Everything else that vLLM rejects there stays rejected.

    vLLM checks requests where it has an `InputProcessor`: in the process that calls `LLM`, and in
    each API server. Each of these first makes a configuration, which calls this function.
    """
    from vllm import SamplingParams

    replace(SamplingParams, "_validate_spec_decode", _without_min_p_and_logit_bias)


def _without_min_p_and_logit_bias(
    refuse: Callable[..., None], self: SamplingParams, speculative_config: SpeculativeConfig | None
) -> None:
    others = copy(self)
    others.min_p, others.logit_bias = 0.0, None
    refuse(others, speculative_config)


def allow_no_drafts() -> None:
    """Allows 0 drafts in an engine that only writes a drafter's K/V for other engines.

    vLLM divides by the number of a DSpark block's tokens to limit requests. Called in every process
    that makes or unpacks a configuration.
    """
    # Remove when vLLM takes `num_speculative_tokens` 0 with dspark; read against 0.33.0.
    from vllm.config import VllmConfig

    replace(VllmConfig, "_set_max_num_scheduled_tokens", _where_any_are_drafted)


def _where_any_are_drafted(limit: Callable[[VllmConfig], None], self: VllmConfig) -> None:
    speculation = self.speculative_config
    if speculation is None or speculation.num_speculative_tokens:
        limit(self)
    elif self.scheduler_config.max_num_scheduled_tokens is None:
        batched = self.scheduler_config.max_num_batched_tokens
        self.scheduler_config.max_num_scheduled_tokens = batched
