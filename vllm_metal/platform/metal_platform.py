# SPDX-License-Identifier: Apache-2.0
"""MetalPlatform: implements vLLM's platform interface, and applies our defaults and patches."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vllm_metal.device import blas
from vllm_metal.patches.vllm_patches import environment, releases
from vllm_metal.settings import (
    cache_dtypes,
    envs,
)

# These must run before torch and vLLM are imported, below.
releases.require_tested_vllm()
environment.set_defaults()
_DEVICE = envs.requested_device() or "metal"
if _DEVICE == "cpu":
    blas.load()

import torch  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.platforms.interface import Platform, PlatformEnum  # noqa: E402

from metal_kernels.layout import BLOCK_SIZES  # noqa: E402
from vllm_metal.device import mlx_device  # noqa: E402
from vllm_metal.engine.distributed import groups  # noqa: E402
from vllm_metal.engine.pooling.encoders import served as encoders  # noqa: E402
from vllm_metal.engine.pooling.encoders.refusals import fit_positions  # noqa: E402
from vllm_metal.engine.spec_decode import checkpoint  # noqa: E402
from vllm_metal.engine.spec_decode.registry import keep_last_blocks, propose_nothing  # noqa: E402
from vllm_metal.engine.weights import folders  # noqa: E402
from vllm_metal.identity import rank_facts  # noqa: E402
from vllm_metal.kv_transfer.config import complete_kv_transfer, metric_types_of  # noqa: E402
from vllm_metal.patches.vllm_patches import (  # noqa: E402
    engine_args,
    engine_outputs,
    logs,
    pooling_failures,
    processes,
    replicas,
    runner_features,
    shutdown,
    speculation,
    start_failures,
    streaming_sessions,
)
from vllm_metal.platform import workers  # noqa: E402
from vllm_metal.platform.refusals import refuse_unsupported  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.config.cache import CacheDType
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_metal.engine.worker.step_hooks import Transfers

shutdown.answer_for_torch_accelerator()
logs.drop_unhelpful_warnings()
logs.redact_client_text()
start_failures.leave_causes()
processes.spawn_on_macos()
logger = init_logger(__name__)
logs.show_our_messages()

WORKER = "vllm_metal.engine.worker.worker.MetalWorker"
RANK_WORKER = "vllm_metal.engine.worker.rank_worker.RankWorker"
ENCODER_WORKER = "vllm_metal.engine.worker.encoder_worker.EncoderWorker"
#: Default of --max-num-batched-tokens by device. vLLM's own, up to 16384 by memory size alone, suit
#: data-center GPUs: on a Mac such a step would delay all other streams by seconds. 2048 is mlx-lm's
#: prefill step; the CPU device reaches its full speed at a quarter of that.
MAX_NUM_BATCHED_TOKENS = {"metal": 2048, "cpu": 512}
MAX_NUM_SEQS = 256  # default of --max-num-seqs, vLLM's own for GPUs of this size


class MetalPlatform(Platform):
    """Apple-silicon GPU through MLX; MLX's CPU backend with ``VLLM_METAL_DEVICE=cpu``."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"  # vLLM's process groups create torch devices by it; torch has no "metal"
    device_type = "cpu"  # for vLLM's own torch tensors; the model's arrays are MLX's
    dist_backend = "gloo"
    ray_device_key = "GPU"  # Ray detects one per Mac, so each Mac gets one rank
    mlx_device: envs.Device = _DEVICE

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that ``--dtype auto`` may pick; the first is the fallback.

        An explicit ``--dtype`` is honored on both devices.
        """
        # MLX's CPU backend multiplies only float32 matrices fast.
        if self.mlx_device == "cpu":
            return [torch.float32]
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        """Imports nothing: vLLM's compiled kernels are not used, and crash on some x86 machines."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return mlx_device.name(cls.mlx_device)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return mlx_device.total_memory(cls.mlx_device)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        import mlx.core as mx

        return float(mx.get_active_memory())

    @classmethod
    def set_device(cls, device: torch.types.Device) -> None:
        return  # there is one device; vLLM calls this in the thread that sends worker results

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        import mlx.core as mx

        mx.random.seed(seed)

    @classmethod
    def transfers(cls, vllm_config: VllmConfig) -> Transfers:
        """Creates the transfers of K/V between the worker's pool and disk or other machines."""
        from vllm_metal.kv_transfer.transfers import ConfiguredTransfers

        return ConfiguredTransfers(vllm_config)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        if quant != "metal":  # `quantization.NAME`, not imported as its module loads vLLM
            raise ValueError(
                f"--quantization={quant} is not supported: weights are served as their files have "
                "them. Leave it out, and choose a checkpoint that is quantized."
            )

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Checks that all variables named ``VLLM_*`` are known, this plugin's included."""
        environment.make_known(envs.NAMES)
        super().validate_environ(hard_fail)

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Changes vLLM's defaults and methods for this platform, before any engine is created."""
        import vllm_metal.platform.quantization  # noqa: F401 - registers itself with vLLM
        from vllm_metal.metrics.stat_logger import MetalStatLogger
        from vllm_metal.patches.vllm_patches import (  # here, as they import much of vLLM
            encoder_info,
            engine_links,
            engine_sleep,
            model_info,
            token_ids,
        )
        from vllm_metal.platform import default_drafts, model_folders, start_checks
        from vllm_metal.serving.idle import start as idle

        releases.warn_if_untested()
        engine_args.set_batch_defaults(MAX_NUM_BATCHED_TOKENS[cls.mlx_device], MAX_NUM_SEQS)
        # A later patch of a function wraps the earlier ones, so create_model_config checks the
        # model's folder before transformers reads it, and fits the context last.
        engine_args.fit_the_context()
        engine_args.check_folders(model_folders.check_config)
        engine_args.fit_batches_to_drafts()
        engine_args.complete_drafts(checkpoint.completed, default_drafts.default_drafts)
        engine_args.serve_files(folders.checked_folder_of, folders.folder_of)
        engine_args.accept_int8_kv_cache()
        engine_args.cache_prefixes_of_states()
        replicas.run_in_their_processes()
        replicas.refuse_other_ranks(rank_facts.difference)
        processes.stay_in_process_on_macos()
        shutdown.let_engines_end()
        shutdown.end_interrupted_starts()
        shutdown.silence_stopped_engines()
        engine_links.notice_lost_links()
        engine_links.notice_engines_that_end_early()
        speculation.allow_lookup_methods()
        speculation.keep_dropped_heads()
        model_info.register_models()
        model_info.accept_mlx_models()
        encoder_info.register_encoders()
        speculation.allow_min_p_and_logit_bias()
        runner_features.check_processors_alike()
        token_ids.reject_unknown_tokens()
        streaming_sessions.refuse_in_sessions()
        engine_args.recompute_by_default()
        engine_outputs.add_stat_logger(partial(MetalStatLogger, metric_types_of))
        pooling_failures.report_pooling_failures()
        idle.keep_engines()
        engine_sleep.refuse_to_wait_asleep()
        # Last of the patches of create_engine_config, so that arguments are checked first;
        # `name_causes` wraps it, as it explains errors of the check, too.
        engine_args.check_first(start_checks.check_engine)
        start_failures.name_causes()
        if parser is not None:  # a command; `LLM` needs no server and does not load uvicorn
            cls._change_servers()

    @staticmethod
    def _change_servers() -> None:
        from vllm_metal.patches.vllm_patches import (
            adapters,
            error_remedies,
            first_mistake,
            http_protocol,
            serve_arguments,
            server_app,
            server_end,
            start_log,
            unknown_fields,
        )
        from vllm_metal.platform import start_checks
        from vllm_metal.serving import limits, ready
        from vllm_metal.serving.idle import start as idle
        from vllm_metal.serving.parsers.serve import set_parsers
        from vllm_metal.serving.prefix_misses import start as misses

        http_protocol.limit_connections()
        first_mistake.stop_at_the_first_mistake()
        # Before vLLM's routes are created, which copy the schemas of request classes.
        unknown_fields.report_unknown_fields()
        error_remedies.name_remedies()
        adapters.reject_bad_adapters()
        # Each wraps those before it, so the last one is the outermost.
        server_app.around_servers(misses.around)
        server_app.around_servers(idle.around)
        server_app.around_servers(limits.around)
        server_app.around_servers(ready.around)
        server_app.around_servers(unknown_fields.around)
        server_end.set_server_exit()
        server_end.let_starts_be_interrupted()
        start_log.to_a_file()
        start_failures.end_commands_with_one_line(start_checks.SERVED)
        # In this order: choosing parsers reads the model that the check has validated.
        serve_arguments.complete(
            start_checks.check_server,
            partial(set_parsers, folder_of=folders.folder_of),
            replicas.answer_with_one_front_end,
        )

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        return  # check_and_update_config chooses the block size

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        # vLLM's compiler and graphs are for torch; MLX compiles by itself.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Checks and completes a configuration. Must be idempotent.

        vLLM calls this again on a complete configuration, in an engine's own process even after
        the pool is allocated.
        """
        if vllm_config.cache_config.num_gpu_blocks is None:  # else the pool is allocated
            cls._choose_block_size(vllm_config.cache_config)
        refuse_unsupported(vllm_config)
        runner_features.allow_supported_features()
        speculation.allow_no_drafts()
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            is_encoder = encoders.of_config(vllm_config) is not None
            parallel.worker_cls = ENCODER_WORKER if is_encoder else WORKER
            if groups.is_distributed(parallel):
                parallel.worker_cls = RANK_WORKER
        workers.prepare_ranks(vllm_config, cls.mlx_device)
        workers.prepare_replicas(vllm_config, cls.mlx_device)
        fit_positions(vllm_config)
        parallel.disable_custom_all_reduce = True
        speculation.schedule_ahead_with_ngram(vllm_config.speculative_config)
        model = vllm_config.model_config
        if model is not None and model.is_multimodal_model and model.is_mm_prefix_lm:
            # Attention within an image is bidirectional, so all of its tokens run in one step.
            vllm_config.scheduler_config.disable_chunked_mm_input = True
        cache = vllm_config.cache_config
        cache.cache_dtype = cast("CacheDType", cache_dtypes.canonical(cache.cache_dtype))
        complete_kv_transfer(vllm_config)
        propose_nothing(vllm_config)
        keep_last_blocks(vllm_config)
        cls.change_schedulers()
        if vllm_config.lora_config is not None:
            from vllm_metal.engine.lora.versions import Versions
            from vllm_metal.patches.vllm_patches import adapters

            adapters.identify_by_content(Versions)

    @staticmethod
    def _choose_block_size(cache: CacheConfig) -> None:
        """Sets the default block size, which a worker enlarges for models with recurrent layers."""
        if not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZES[0]
        elif cache.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"--block-size {cache.block_size} is not supported: choose one of {BLOCK_SIZES}"
            )

    @staticmethod
    def change_schedulers() -> None:
        """Patches vLLM's schedulers and the loop that runs them, in this process.

        Called by `check_and_update_config`, which vLLM runs in every process with an engine; an
        engine's own process runs it too late, and so calls this before
        (`vllm_metal.change_vllm`).
        """
        from vllm_metal.patches.vllm_patches import (
            drafts_with_results,
            engine_links,
            request_sizes,
            scheduler,
            state_modes,
            step_budget,
        )

        step_budget.bound_steps()
        drafts_with_results.take_drafts_with_results()
        state_modes.take_modes_of_workers()
        scheduler.end_failed_requests()
        streaming_sessions.serve_sessions()
        scheduler.send_salts()
        scheduler.send_images()
        request_sizes.drop_compilations()
        scheduler.end_chunks_within_blocks()
        shutdown.leave_ctrl_c_to_the_parent()
        if envs.requested_device() == "cpu":
            shutdown.skip_pythons_end()
        engine_links.end_without_a_server()

    @classmethod
    def validate_request(
        cls, processed_inputs: Any, params: SamplingParams | PoolingParams
    ) -> None:
        from vllm.sampling_params import SamplingParams

        from vllm_metal.engine.sample import validate
        from vllm_metal.serving.start import check_salt

        check_salt(processed_inputs.get("cache_salt"))
        if isinstance(params, SamplingParams):
            validate(params)


# Users create a KVTransferConfig before any engine, so `pre_register_and_update` alone is too late.
# If vllm.distributed imports the platform first, vllm.config cannot be imported yet.
if "vllm.config" in sys.modules:
    engine_args.recompute_by_default()
