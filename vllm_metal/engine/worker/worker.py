# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on one MLX device: lifecycle and memory; the runner computes the steps."""

from __future__ import annotations

import sys
import threading
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from metal_kernels import command_buffers
from vllm_metal.device import macos, mlx_device, openmp
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.memory.advice import BudgetError
from vllm_metal.engine.memory.planner import MemoryPlanner
from vllm_metal.engine.memory.pressure import MemoryPressure
from vllm_metal.engine.memory.wiring import Wiring
from vllm_metal.engine.worker.keep_awake import KeepAwake
from vllm_metal.engine.worker.networks import Networks
from vllm_metal.engine.worker.recovery import MAX_FAILURES_IN_A_ROW, RecoveringRunner
from vllm_metal.engine.worker.results import LateOutput
from vllm_metal.engine.worker.served_model import RunnerParts, ServedModel
from vllm_metal.engine.worker.step_hooks import Transfers
from vllm_metal.identity import rank_facts
from vllm_metal.metrics.step_clock import StepClock, StepTimes
from vllm_metal.metrics.step_meter import StepMeter, StepRows
from vllm_metal.patches.vllm_patches import (
    engine_links,
    memory_shares,
    processes,
    replicas,
    shutdown,
)
from vllm_metal.patches.vllm_patches.step_result import StepResult
from vllm_metal.settings.additional_config import AdditionalConfig
from vllm_metal.settings.draft_methods import OFF_SWITCH, are_default, drop_default

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.tasks import SupportedTask
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_metal.engine.lora.adapters import Adapters

logger = init_logger(__name__)


class MetalWorker(WorkerBase):
    """Owns the model, the KV pool and the runner of one process."""

    runner: RecoveringRunner
    transfers: Transfers
    _memory: MemoryPlanner
    _most_failures = MAX_FAILURES_IN_A_ROW
    _awake: KeepAwake | None = None  # None: macOS decides when it sleeps
    _pool_bytes: int | None = None  # computed at loading if drafts may be dropped to fit
    _awake_bytes = 0  # bytes that MLX held when the engine was last awake

    def init_device(self) -> None:
        # A spawned engine tells of itself, and has its links, before its configuration's check.
        engine_links.end_without_a_server()
        replicas.tell_facts(rank_facts.of)
        mlx_device.select(self.current_platform.mlx_device)
        if self.current_platform.mlx_device == "cpu":
            openmp.share_cores()
        self.transfers = self.current_platform.transfers(self.vllm_config)
        if self.current_platform.mlx_device == "metal" and command_buffers.may_be_too_late():
            logger.warning(
                "MLX was imported before vLLM. If it has used the GPU, each layer of a step ends "
                "two command buffers: import vllm first, or export MLX_MAX_MB_PER_BUFFER=1048576"
            )
        if (slow := macos.slow_prompts_here()) is not None:
            logger.warning("%s. Run `vllm-metal doctor` for the command that fixes it", slow)
        share = memory_shares.given(self.parallel_config)
        self._memory = MemoryPlanner(self.current_platform.mlx_device, share)
        self._wiring = Wiring(
            self.current_platform.mlx_device,
            AdditionalConfig.of(self.vllm_config).wire_memory,
            alone=share is None,
        )
        self._pressure = MemoryPressure()
        if sys.platform == "darwin" and AdditionalConfig.of(self.vllm_config).keep_awake:
            self._awake = KeepAwake()
        # vLLM's multiprocessing executor reads a step's results in a thread of its own. They change
        # what a step is laid out from, so no step is laid out meanwhile.
        self._turn = threading.Lock()
        self._seed()

    def _seed(self) -> None:
        """Seeds MLX's generator; in an engine's own process also those of Python, numpy and torch.

        In the user's process, these three belong to the user.
        """
        if processes.in_users_process():
            mx.random.seed(self.model_config.seed)
        else:
            set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise NotImplementedError("--load-format dummy is not supported by vllm-metal")
        started = time.perf_counter()
        self.served.load()
        self.transfers.weights_loaded()
        logger.info(
            "Loaded %s in %.1f s: %.2f GiB of weights on %s",
            self.model_config.model,
            time.perf_counter() - started,
            mx.get_active_memory() / 2**30,
            self.current_platform.get_device_name(),
        )

    @cached_property
    def served(self) -> ServedModel:
        """The model, loaded or not."""
        return ServedModel(self.vllm_config, self.current_platform.mlx_device)

    @property
    def networks(self) -> Networks:
        return self.served.networks

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        if are_default(self.vllm_config) and self._pool_bytes is None:
            self._fit_default_drafts()
        return self.served.specs()

    def _fit_default_drafts(self) -> None:
        """Sizes the pool before vLLM knows its layers; without drafts if it would be too small."""
        layouts, specs = [self.get_supported_kv_cache_layouts()], self.served.specs()
        resolve_kv_cache_layout(self.vllm_config, layouts, specs.values())  # as vLLM does later
        try:
            self._pool_bytes = self.served.pool_size(self._memory, self.transfers.memory_bytes)
        except BudgetError as error:
            drop_default(self.vllm_config)
            self.cache_config.kv_cache_layout = None
            why, _, _ = str(error).partition(":\n")
            logger.warning("Serving without drafts: with them, %s. %s hides this", why, OFF_SWITCH)
            self.served.release()
            self.load_model()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]  # layer outermost: an array a layer, slots of a block in order

    def determine_available_memory(self) -> int:
        if self._pool_bytes is not None:
            return self._pool_bytes
        return self.served.pool_size(self._memory, self.transfers.memory_bytes)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        max_num_reqs = self.scheduler_config.max_num_seqs
        max_len = self.model_config.max_model_len
        # One spare block: vLLM may allocate one for a step in flight past the last position.
        max_blocks = -(-max_len // self.cache_config.block_size) + 1
        tables = BlockTables(len(kv_cache_config.kv_cache_groups), max_num_reqs, max_blocks)
        self._requests = Requests(max_num_reqs, max_len, tables)
        pool = "kernels" if self.served.backend.pipelined else "scatter"
        self.transfers.open(kv_cache_config, pool)
        self._clock = StepClock()
        self._parts = RunnerParts(
            kv_cache_config, self._requests, self.transfers.hooks, self._clock, self._memory
        )
        most_arrays = self.served.most_arrays
        self._wiring.weights(most_arrays)
        make = partial(self.served.make_runner, self._parts)
        self.runner = RecoveringRunner(make, self.transfers.hooks, self._most_failures)
        self._wiring.everything(most_arrays)
        self._meter = StepMeter(self._clock, self._memory.limit, lambda: self.runner.num_failures)
        self._rows = StepRows()  # rows of the step that was laid out last

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        return self.transfers.handshake()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        started = time.perf_counter()
        self.served.compile_kernels()
        self._warm_up()
        seconds = time.perf_counter() - started
        self._seed()
        shutdown.ignore_ctrl_c()  # not before: a start can be interrupted
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _warm_up(self) -> None:
        run_warm_up = partial(self.served.run_warm_up, self._parts.kv_cache_config)
        self.served.check(self.runner.warm_up(run_warm_up))

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        with self._turn, self._clock.preparing():
            self._pressure.poll()
            result = self.runner.execute_model(scheduler_output)
            if self._awake is not None:
                self._awake.update(len(self._requests) > 0)
        self._rows = StepRows.of(scheduler_output)
        if result is None and self.runner.runner.ends_at_once:
            return self._finish(None)
        return result

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        return self._finish(grammar_output)

    def _finish(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        with self._turn, self._clock.submitting() as step:
            output = self.runner.sample_tokens(grammar_output)
        read = partial(self._read, output, step, self._rows)
        return LateOutput(read, output.get_kv_connector_output())

    def _read(self, output: AsyncModelRunnerOutput, step: StepTimes, rows: StepRows) -> StepResult:
        with self._turn:
            return self._meter.measured(output, step, rows)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        with self._turn:
            return self.runner.take_draft_token_ids()

    def sleep(self, level: int = 1) -> None:
        """Frees memory: level 1 the KV pool; level 2 the weights, too.

        Unified memory leaves nowhere to move weights to, so level 1 keeps them.
        """
        before = mx.get_active_memory()
        self.discard(("weights",) if level >= 2 else ())
        logger.info("Asleep: freed %.2f GiB", (before - mx.get_active_memory()) / 2**30)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Frees the KV pool, and also the weights if the tags contain "weights"."""
        if self.runner.awake:
            self._awake_bytes = mx.get_active_memory()
        self._wiring.release()
        self.runner.release_pool()
        self.reset_encoder_cache()
        if "weights" in tags:
            self.served.release()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates the KV pool again, and reloads the weights if they were freed.

        Raises RuntimeError: other programs use the memory by now; the call may be repeated.
        """
        if tags is None or "kv_cache" in tags:
            self._memory.check_room(self._awake_bytes - mx.get_active_memory())
        if not self.served.is_loaded and (tags is None or "weights" in tags):
            self.load_model()
        if tags is None or "kv_cache" in tags:
            self._restore_pool()

    def _restore_pool(self) -> None:
        self._wiring.weights(self.served.most_arrays)
        self.runner.restore_pool()
        self._wiring.everything(self.served.most_arrays)

    def reload_weights(self) -> None:
        """Loads the weights again after their files have changed, and empties the KV pool.

        If the engine is awake, pause it first and reset its prefix cache afterwards, as vLLM's own
        documentation asks.
        """
        awake = self.runner.awake
        self._wiring.release()
        self.runner.release_pool()
        self.served.release()
        self.load_model()
        if awake:
            self._restore_pool()

    @property
    def num_requests(self) -> int:
        """Number of this worker's requests, preempted ones included."""
        return len(self._requests) + self._requests.num_preempted

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        pooler = self.networks.pooler
        return ("generate",) if pooler is None else tuple(sorted(pooler.get_supported_tasks()))

    @property
    def _adapters(self) -> Adapters:
        if self.networks.adapters is None:
            raise ValueError("LoRA adapters need --enable-lora")
        return self.networks.adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter before requests name it."""
        with self._turn:
            return self._adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter; running requests keep it until they end."""
        with self._turn:
            return self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        with self._turn:
            return self._adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        return self._adapters.ids()

    def get_model(self) -> Any:
        return self.networks.target.model

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def check_health(self) -> None:
        """Raises if the device no longer computes."""
        with self._turn:
            if hasattr(self, "runner"):
                self.runner.wait()  # an error of a step is the step's, not the caller's
            mx.eval(mx.zeros(1) + 1)

    def synchronize_device(self) -> None:
        with self._turn:
            self.runner.wait()

    def reset_encoder_cache(self) -> None:
        if self.served.is_loaded and self.networks.encoder is not None:
            self.networks.encoder.reset()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Captures a Metal trace between start and stop; needs MTL_CAPTURE_ENABLED=1."""
        if self.current_platform.mlx_device != "metal":
            raise RuntimeError("profiling captures Metal traces; the CPU device has none")
        if is_start:
            mx.metal.start_capture(f"{profile_prefix or 'vllm-metal'}.gputrace")
        else:
            self.runner.wait()
            mx.metal.stop_capture()

    def execute_dummy_batch(self) -> None:
        return  # only data-parallel ranks must keep step with each other

    def shutdown(self) -> None:
        """Frees the model and the pool once nothing on the device uses them."""
        if hasattr(self, "runner"):  # start-up may have failed before
            self.runner.close()
            del self.runner
            self.transfers.close()
            self._wiring.release()
            if self._awake is not None:
                self._awake.close()
        shutdown.forget_tokenizers()
        if "served" in vars(self):  # nor may it have been looked for
            self.served.release()
        if hasattr(self, "_memory"):
            self._memory.release()
