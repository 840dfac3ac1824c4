# SPDX-License-Identifier: Apache-2.0
"""Sets defaults and choices of vLLM's engine arguments, with values that the platform gives."""

# Remove when platforms may set defaults of engine arguments and read a folder first, and vLLM's
# default of kv_load_failure_policy is recompute. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import rebuild_dataclass

from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.settings import whole_prompts
from vllm_metal.settings.draft_methods import mark_default

_DRAFTS = "vllm_metal_drafts"  # EngineArgs attribute: num_speculative_tokens, as completed
#: Keys of --speculative-config that --spec-method, --spec-model and --spec-tokens set.
_FLAGS = ("method", "model", "num_speculative_tokens")

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

_CHECKS: list[Callable[[Path], object]] = []


def set_batch_defaults(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Sets the defaults of --max-num-batched-tokens and --max-num-seqs, for all entry points.

    vLLM derives its own from a data-center GPU's memory and name, and has no hook for platforms.
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
    """Makes an unset --max-model-len select the longest context that fits, like -1.

    vLLM takes the model's longest context, and does not start if memory cannot hold one such
    request. That suits GPUs bought for a model, but not a Mac that its user already has.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "create_model_config", _fitted)


def check_folders(check: Callable[[Path], object]) -> None:
    """Checks a model's folder before transformers reads its config.json.

    Args:
        check: called with a folder that has a config.json; raises if it cannot be served.
    """
    from vllm.engine.arg_utils import EngineArgs

    _CHECKS[:] = [check]
    replace(EngineArgs, "create_model_config", _checked)


def check_first(check: Callable[[EngineArgs], None]) -> None:
    """Checks an engine's arguments before vLLM processes them.

    Args:
        check: raises if an argument is not supported.
    """
    from vllm.engine.arg_utils import EngineArgs

    def checked(create: Callable[..., Any], self: EngineArgs, *args: Any, **options: Any) -> Any:
        check(self)
        return create(self, *args, **options)

    replace(EngineArgs, "create_engine_config", checked)


def _checked(create: Callable[[EngineArgs], ModelConfig], self: EngineArgs) -> ModelConfig:
    folder = Path(self.model).expanduser()
    if (folder / "config.json").is_file():
        for check in _CHECKS:
            check(folder)
    return create(self)


def _fitted(create: Callable[[EngineArgs], ModelConfig], self: EngineArgs) -> ModelConfig:
    config = create(self)
    if self.max_model_len is None:
        config.original_max_model_len = -1  # as vLLM records a user's -1
    return config


def fit_batches_to_drafts() -> None:
    """Makes the default batch sizes valid with both adapters and drafts.

    vLLM requires that a step has room for the drafts of --max-num-seqs requests, which neither its
    defaults nor the platform's have. Its error message does not say how much is needed.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "create_speculative_config", _noting_drafts)
    replace(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", _with_room_for_drafts)


def _noting_drafts(create: Callable[..., Any], self: EngineArgs, *args: Any, **options: Any) -> Any:
    config = create(self, *args, **options)
    setattr(self, _DRAFTS, 0 if config is None else config.num_speculative_tokens)
    return config


def _with_room_for_drafts(
    set_defaults: Callable[..., None], self: EngineArgs, *args: Any, **options: Any
) -> None:
    seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
    set_defaults(self, *args, **options)
    drafts = getattr(self, _DRAFTS, 0)
    if not self.enable_lora or not drafts:
        return
    assert self.max_num_seqs is not None and self.max_num_batched_tokens is not None
    most_seqs = self.max_num_batched_tokens // (drafts + 1)
    least_tokens = self.max_num_seqs * (drafts + 1)
    if most_seqs >= self.max_num_seqs:
        return
    if seqs is None and most_seqs > 0:
        self.max_num_seqs = most_seqs
    elif tokens is None:
        self.max_num_batched_tokens = least_tokens
    else:
        raise ValueError(
            f"--max-num-batched-tokens={tokens} is not supported with --enable-lora, {drafts} "
            f"speculative tokens and --max-num-seqs={self.max_num_seqs}: a step needs room for "
            f"the drafts of each request. Set --max-num-batched-tokens to {least_tokens} or more"
            + (f", or --max-num-seqs to {most_seqs} or fewer." if most_seqs else ".")
        )


def complete_drafts(
    completed: Callable[[Mapping[str, Any], ModelConfig], Mapping[str, Any]],
    default: Callable[[EngineArgs, ModelConfig], dict[str, Any] | None],
) -> None:
    """Completes --speculative-config before vLLM reads it.

    Args:
        completed: maps the option's value (including --spec-method and the like) and the model's
            configuration to the keys to add.
        default: returns the value if the user did not set the option.
    """
    from vllm.engine.arg_utils import EngineArgs

    def with_keys(
        create: Callable[..., Any],
        self: EngineArgs,
        target_model_config: ModelConfig,
        *args: Any,
        **options: Any,
    ) -> Any:
        flags = (self.spec_method, self.spec_model, self.spec_tokens)
        short = {key: flag for key, flag in zip(_FLAGS, flags, strict=True) if flag is not None}
        by_default = self.speculative_config is None and not short
        if by_default:
            self.speculative_config = default(self, target_model_config)
        else:
            given = dict(self.speculative_config or {})
            self.speculative_config = given | dict(completed(given | short, target_model_config))
        config = create(self, target_model_config, *args, **options)
        if by_default:
            self.speculative_config = None  # for a second configuration of these arguments
            if config is not None:
                mark_default(config)
        return config

    replace(EngineArgs, "create_speculative_config", with_keys)


#: Maps a folder that vLLM reads to the name that the user gave its model.
_NAMES: dict[str, str] = {}


def serve_files(
    folder_of: Callable[[str, bool], str], draft_folder_of: Callable[[str, bool], str]
) -> None:
    """Makes vLLM read a folder if `model`, or the draft's `model`, names a single file (GGUF).

    Models keep their names from the command line.

    Args:
        folder_of: maps the user's `model`, and whether its own tokenizer is used, to the folder
            for vLLM to read; returns other names unchanged.
        draft_folder_of: does the same for the draft's `model`, which may also name a Python class.
    """
    from vllm.engine import arg_utils
    from vllm.engine.arg_utils import EngineArgs

    def with_folders(
        override: Callable[..., Any],
        model: str,
        tokenizer: str | None,
        vllm_speculative_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        folder = folder_of(model, tokenizer in (None, model))
        if folder != model:
            _NAMES[folder] = model
            tokenizer = folder if tokenizer in (None, model) else tokenizer
        return override(
            model=folder,
            tokenizer=tokenizer,
            vllm_speculative_config=vllm_speculative_config,
            **options,
        )

    def with_draft(create: Callable[..., Any], self: EngineArgs, *args: Any, **options: Any) -> Any:
        given = self.speculative_config
        if given and isinstance(given.get("model"), str):
            self.speculative_config = {**given, "model": draft_folder_of(given["model"], True)}
        if isinstance(self.spec_model, str):
            self.spec_model = draft_folder_of(self.spec_model, True)
        return create(self, *args, **options)

    replace(arg_utils, "maybe_override_with_speculators", with_folders)
    replace(EngineArgs, "create_speculative_config", with_draft)
    replace(EngineArgs, "create_model_config", _with_name)


def keep_names_of_files(file_of: Callable[[str], Path | None]) -> None:
    """Keeps vLLM from looking up model names in the hub's cache if they refer to a single file.

    Args:
        file_of: returns the file that a model's name refers to; None for other names.
    """
    from vllm.engine import arg_utils

    def path_of(find: Callable[..., Any], model: str | Path, revision: str | None = None) -> Any:
        return find(model, revision) if file_of(str(model)) is None else model

    replace(arg_utils, "get_model_path", path_of)


def _with_name(create: Callable[[EngineArgs], ModelConfig], self: EngineArgs) -> ModelConfig:
    if self.served_model_name is None and self.model in _NAMES:
        self.served_model_name = _NAMES[self.model]
    return create(self)


def accept_int8_kv_cache() -> None:
    """Accepts `--kv-cache-dtype int8`, and makes "auto" the model's dtype.

    vLLM only knows our int8 format as `int8_per_token_head`. Its "auto" is fp8 if a checkpoint has
    scales for K and V, which this platform does not read.
    """
    from vllm.engine import arg_utils

    replace(arg_utils, "resolve_kv_cache_dtype_string", _resolve_int8)


def cache_prefixes_of_states() -> None:
    """Enables prefix caching by default for purely recurrent models (Mamba), too.

    vLLM considers it experimental for these. Models that attend to whole prompts get none.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "_set_default_chunked_prefill_and_prefix_caching_args", _prefixes_too)


def _prefixes_too(
    set_defaults: Callable[[EngineArgs, ModelConfig], None],
    self: EngineArgs,
    model_config: ModelConfig,
) -> None:
    whole_prompts.set_defaults(self, model_config)
    if self.enable_prefix_caching is None and model_config.is_attention_free:
        self.enable_prefix_caching = model_config.runner_type == "generate"
    set_defaults(self, model_config)


def _resolve_int8(
    resolve: Callable[[str, ModelConfig], str], kv_cache_dtype: str, model_config: ModelConfig
) -> str:
    if kv_cache_dtype == "auto":
        return kv_cache_dtype
    name = "int8_per_token_head" if kv_cache_dtype == "int8" else kv_cache_dtype
    return resolve(name, model_config)


def recompute_by_default() -> None:
    """Changes the default of `kv_load_failure_policy` to "recompute".

    vLLM's default, "fail", ends a request whose blocks cannot be loaded. A configuration does not
    show whether a value is the default or the user's, so the default itself is changed: an explicit
    "fail" is honored. Existing configurations keep their value.
    """
    from vllm.config.kv_transfer import KVTransferConfig

    made: Any = KVTransferConfig  # for type checkers, no pydantic dataclass has these attributes
    if made.kv_load_failure_policy == "recompute":
        return
    made.kv_load_failure_policy = "recompute"
    made.__dataclass_fields__["kv_load_failure_policy"].default = "recompute"
    made.__pydantic_fields__["kv_load_failure_policy"].default = "recompute"
    rebuild_dataclass(made, force=True)  # its validator was built with the class
