# SPDX-License-Identifier: Apache-2.0
"""Defaults and choices of vLLM's engine arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


def set_batch_defaults(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Sets the defaults of the two flags, which vLLM picks by memory size for GPUs of its own."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    contexts = (None, *UsageContext)
    tokens = dict.fromkeys(contexts, max_num_batched_tokens)
    seqs = dict.fromkeys(contexts, max_num_seqs)
    EngineArgs.get_batch_defaults = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls, world_size: (tokens, seqs)
    )


def accept_int8_kv_cache(parser: FlexibleArgumentParser | None) -> None:
    """Lets --kv-cache-dtype say `int8` beside `fp8`, where vLLM knows `int8_per_token_head` only.

    Args:
        parser: of the command line, if there is one.
    """
    from vllm.engine import arg_utils
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    def resolve(kv_cache_dtype: str, model_config: ModelConfig) -> str:
        name = "int8_per_token_head" if kv_cache_dtype == "int8" else kv_cache_dtype
        return resolve_kv_cache_dtype_string(name, model_config)

    arg_utils.resolve_kv_cache_dtype_string = resolve
    for action in parser._actions if parser is not None else ():
        if action.dest == "kv_cache_dtype" and action.choices and "int8" not in action.choices:
            action.choices = [*action.choices, "int8"]
