# SPDX-License-Identifier: Apache-2.0
"""Lists options of the engine that are always rejected if they are set."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches.processes import is_engine_process

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class RefusedOption:
    """An option that is not supported with any value."""

    option: str  # as users type it
    config_path: str  # attribute path of its value in vLLM's configuration
    reason: str  # the reason, or what to use instead
    allowed: tuple[Any, ...] = ()  # neutral values besides the default in `EngineArgs`
    model_keys: tuple[str, ...] = ()  # keys of the model's configuration that vLLM defaults to
    #: Whether vLLM itself sets it in an engine's process; the launcher checks the user's value.
    set_by_engine: bool = False

    @property
    def field(self) -> str:
        """The option's field of `EngineArgs`."""
        return self.option.removeprefix("--").replace("-", "_")


_ONE_DEVICE = "there is one device"
_MLX_LM = "mlx-lm's modules are used instead"
_NO_CLASSES = "only vLLM's own model classes do that"
_UNIFIED = "memory is unified: there is no other side to offload weights to"

REFUSED_OPTIONS = (
    RefusedOption(
        "--use-fp64-gumbel", "model_config.use_fp64_gumbel", "a Mac's GPU has no float64"
    ),
    RefusedOption(
        "--return-sampling-mask",
        "model_config.return_sampling_mask",
        "the sampler does not report which tokens it left out",
    ),
    RefusedOption(
        "--enable-trace-replay",
        "model_config.enable_trace_replay",
        "the sampler chooses every token",
    ),
    RefusedOption(
        "--enable-return-routed-experts",
        "aux_output_config.enable_return_routed_experts",
        "mlx-lm's layers do not report which experts they chose",
    ),
    RefusedOption(
        "--model-weights", "model_config.model_weights", "weights lie beside config.json"
    ),
    RefusedOption(
        "--load-format",
        "load_config.load_format",
        "mlx-lm reads only safetensors: leave it out",
        ("hf", "safetensors"),
    ),
    RefusedOption(
        "--model-loader-extra-config",
        "load_config.model_loader_extra_config",
        "mlx-lm loads the weights",
    ),
    RefusedOption(
        "--ignore-patterns", "load_config.ignore_patterns", "weight files are those of the index"
    ),
    RefusedOption(
        "--config-format", "model_config.config_format", "mlx-lm reads config.json", ("hf",)
    ),
    RefusedOption(
        "--code-revision",
        "model_config.code_revision",
        "a model's code is read from the folder of its weights: --revision names both",
    ),
    RefusedOption(
        "--hf-token",
        "model_config.hf_token",
        "weights are downloaded with the token in HF_TOKEN: export it",
        (True,),
    ),
    RefusedOption("--model-impl", "model_config.model_impl", _MLX_LM),
    RefusedOption("--model-class-overrides", "model_config.model_class_overrides", _MLX_LM),
    RefusedOption(
        "--quantization-config",
        "model_config.quantization_config",
        "use a checkpoint that is quantized",
    ),
    RefusedOption(
        "--sleep-preserve-parameter-names",
        "model_config.sleep_preserve_parameter_names",
        "a sleep of level 2 drops all weights",
    ),
    RefusedOption("--diffusion-config", "diffusion_config", _NO_CLASSES),
    RefusedOption("--watermark-config", "watermark_config", "the sampler has no watermark"),
    RefusedOption(
        "--weight-transfer-config",
        "weight_transfer_config",
        "weights come from files; start another server for others",
    ),
    RefusedOption("--cpu-offload-gb", "offload_config.uva.cpu_offload_gb", _UNIFIED),
    RefusedOption("--offload-group-size", "offload_config.prefetch.offload_group_size", _UNIFIED),
    RefusedOption(
        "--prefill-context-parallel-size",
        "parallel_config.prefill_context_parallel_size",
        _ONE_DEVICE,
    ),
    RefusedOption(
        "--device-ids", "parallel_config.assigned_physical_gpu_ids", _ONE_DEVICE, set_by_engine=True
    ),
    RefusedOption("--enable-elastic-ep", "parallel_config.enable_elastic_ep", _ONE_DEVICE),
    RefusedOption(
        "--enable-fault-tolerance", "parallel_config.enable_fault_tolerance", _ONE_DEVICE
    ),
    RefusedOption(
        "--mamba-cache-dtype",
        "cache_config.mamba_cache_dtype",
        "states have the dtype that mlx-lm's layer gives them",
    ),
    RefusedOption(
        "--mamba-ssm-cache-dtype",
        "cache_config.mamba_ssm_cache_dtype",
        "mlx-lm's layers keep such states in float32",
        ("float32",),
        ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
    ),
    RefusedOption(
        "--enable-mamba-cache-stochastic-rounding",
        "mamba_config.enable_stochastic_rounding",
        "states are rounded to the nearest",
    ),
    RefusedOption(
        "--prefix-match-unit",
        "cache_config.prefix_match_unit",
        "prefix-cache hits end at whole blocks",
    ),
    RefusedOption(
        "--enable-mamba-shared-prefix-checkpoint",
        "cache_config.enable_mamba_shared_prefix_checkpoint",
        "states are kept at the ends of blocks",
    ),
    RefusedOption(
        "--use-replayssm",
        "cache_config.use_replayssm",
        "recurrent states are cached, not layer inputs",
    ),
)


def refused_options(config: VllmConfig) -> dict[str, bool]:
    """Maps each option, in the words of the start error, to whether it is set."""
    if config.model_config is None:
        return {}
    model = config.model_config.hf_text_config
    return {
        f"{row.option} ({row.reason})": attrgetter(row.config_path)(config)
        not in (default, *row.allowed, *(getattr(model, key, default) for key in row.model_keys))
        for row, default in _with_defaults()
        if not (row.set_by_engine and is_engine_process())
    }


@cache
def _with_defaults() -> list[tuple[RefusedOption, Any]]:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name: field for field in fields(EngineArgs)}
    rows = [(row, known[row.field]) for row in REFUSED_OPTIONS]
    return [
        (row, field.default if field.default_factory is MISSING else field.default_factory())
        for row, field in rows
    ]
