# SPDX-License-Identifier: Apache-2.0
"""Sets defaults and choices of vLLM's engine arguments; their values are platform's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import rebuild_dataclass

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def set_batch_defaults(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Sets the defaults of --max-num-batched-tokens and --max-num-seqs.

    vLLM chooses them by the memory and the name of the device, for GPUs in data centres; a platform
    cannot state its own.

    Args:
        max_num_batched_tokens: of a step, for every way to start an engine.
        max_num_seqs: requests that run at once, likewise.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    contexts = (None, *UsageContext)
    tokens = dict.fromkeys(contexts, max_num_batched_tokens)
    seqs = dict.fromkeys(contexts, max_num_seqs)
    EngineArgs.get_batch_defaults = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls, world_size: (tokens, seqs)
    )


def fit_the_context() -> None:
    """Has an unset --max-model-len mean the longest context that fits, as -1 does.

    vLLM takes the longest that the model is made for, and does not start where the memory does not
    hold one such request. That is for GPUs that are chosen for a model; a Mac is there already.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "create_model_config", _fitted)


def _fitted(create: Callable[[EngineArgs], ModelConfig], self: EngineArgs) -> ModelConfig:
    config = create(self)
    if self.max_model_len is None:
        config.original_max_model_len = -1  # what vLLM notes of a -1 that its user gave
    return config


def accept_int8_kv_cache(parser: FlexibleArgumentParser | None) -> None:
    """Lets users write `--kv-cache-dtype int8`, as they write `fp8`.

    vLLM knows the format of our int8 cache under the name `int8_per_token_head` only.

    Args:
        parser: of the command line, whose choices get `int8`; None where there is none.
    """
    from vllm.engine import arg_utils

    replace(arg_utils, "resolve_kv_cache_dtype_string", _resolve_int8)
    for action in parser._actions if parser is not None else ():
        if action.dest == "kv_cache_dtype" and action.choices and "int8" not in action.choices:
            action.choices = [*action.choices, "int8"]


def cache_prefixes_of_states() -> None:
    """Has prefix caching on by default for models of states alone (Mamba), as for all others.

    vLLM counts it as experimental there.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "_set_default_chunked_prefill_and_prefix_caching_args", _prefixes_too)


def _prefixes_too(
    set_defaults: Callable[[EngineArgs, ModelConfig], None],
    self: EngineArgs,
    model_config: ModelConfig,
) -> None:
    if self.enable_prefix_caching is None and model_config.is_attention_free:
        self.enable_prefix_caching = model_config.runner_type == "generate"
    set_defaults(self, model_config)


def _resolve_int8(
    resolve: Callable[[str, ModelConfig], str], kv_cache_dtype: str, model_config: ModelConfig
) -> str:
    name = "int8_per_token_head" if kv_cache_dtype == "int8" else kv_cache_dtype
    return resolve(name, model_config)


def recompute_by_default() -> None:
    """Makes `kv_load_failure_policy` "recompute" where a user says nothing.

    vLLM's default, "fail", ends a request whose blocks cannot be loaded. A configuration does not
    tell a default from what its user wrote, so the default itself is changed: "fail" is honoured
    wherever it is written. Configurations that exist already keep theirs.
    """
    from vllm.config.kv_transfer import KVTransferConfig

    made: Any = KVTransferConfig  # for type checkers, no pydantic dataclass has these attributes
    if made.kv_load_failure_policy == "recompute":
        return
    made.kv_load_failure_policy = "recompute"
    made.__dataclass_fields__["kv_load_failure_policy"].default = "recompute"
    made.__pydantic_fields__["kv_load_failure_policy"].default = "recompute"
    rebuild_dataclass(made, force=True)  # its validator was built with the class
