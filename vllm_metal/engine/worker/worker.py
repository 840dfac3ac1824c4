# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on one MLX device: lifecycle and memory; the steps are the runner's."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from metal_kernels import command_buffers
from metal_kernels.paged_attention import Splits
from vllm_metal.device import gpu_cores, macos, mlx_device, openmp, tuned
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.kv_cache import choice, formats, warm_up
from vllm_metal.engine.kv_cache.specs import allocate_kv_caches, choose_block_size, kv_cache_specs
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.memory.planner import MemoryPlanner, quantized_share
from vllm_metal.engine.memory.pressure import MemoryPressure
from vllm_metal.engine.memory.profile import LargestCalls, profile_step, requests_profile
from vllm_metal.engine.memory.wiring import MOST_POOL_ARRAYS, Wiring
from vllm_metal.engine.models import dense_check, loader
from vllm_metal.engine.models.compiled import Graphs
from vllm_metal.engine.models.dense_check import HiddenTold, Told
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.pooling.pooling_end import PoolingEnd
from vllm_metal.engine.sample import CustomProcessors, Sampler
from vllm_metal.engine.spec_decode.network import DraftPool
from vllm_metal.engine.spec_decode.registry import drafts_for_others, make_speculator
from vllm_metal.engine.worker.keep_awake import KeepAwake
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.networks import Networks
from vllm_metal.engine.worker.recovery import MAX_FAILURES_IN_A_ROW, RecoveringRunner
from vllm_metal.engine.worker.rehearsal import Room, rehearse, rehearse_pooling
from vllm_metal.engine.worker.results import LateOutput
from vllm_metal.engine.worker.step_end import SamplingEnd
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.lora.request import LoRARequest
    from vllm.tasks import SupportedTask
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_metal.engine.batch.columns import RequestColumn
    from vllm_metal.engine.batch.step_end import StepEnd
    from vllm_metal.engine.lora.adapters import Adapters
    from vllm_metal.engine.sample import SamplerOutput
    from vllm_metal.engine.spec_decode.proposer import Proposer
    from vllm_metal.engine.spec_decode.speculator import Speculator

logger = init_logger(__name__)


class MetalWorker(WorkerBase):
    """Owns the model, the KV pool and the runner of one process."""

    runner: RecoveringRunner
    transfers: Transfers
    _networks: Networks | None = None
    _memory: MemoryPlanner
    _most_failures = MAX_FAILURES_IN_A_ROW
    #: Of what this worker sampled, what it goes on with, see SamplingEnd.
    _agreed: Callable[[SamplerOutput], SamplerOutput] | None = None
    _awake: KeepAwake | None = None  # None: macOS decides when it sleeps
    _samples = True  # whether it makes tokens of what it computes
    _awake_bytes = 0  # that MLX held when the engine was awake last

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
        """Seeds MLX's generator, and in a process of its own Python's, numpy's and torch's too.

        In the user's process those three are the user's.
        """
        if processes.in_users_process():
            mx.random.seed(self.model_config.seed)
        else:
            set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise NotImplementedError("--load-format dummy is not supported by vllm-metal")
        started = time.perf_counter()
        self._load()
        logger.info(
            "Loaded %s in %.1f s: %.2f GiB of weights on %s",
            self.model_config.model,
            time.perf_counter() - started,
            mx.get_active_memory() / 2**30,
            self.current_platform.get_device_name(),
        )

    def _load(self) -> None:
        """Loads the networks, and chooses the blocks and the kind of their pool."""
        self._networks = self._load_networks()
        self.transfers.weights_loaded()
        dtype = loader.mlx_dtype(self.vllm_config)
        self._pool_dtype = formats.pool_dtype(self.cache_config.cache_dtype, dtype)
        self._choose_block_size()
        self._backend = choice.kv_backend(
            self.current_platform.mlx_device,
            self.networks.layers_of_all_ranks,
            dtype,
            self._pool_dtype,
            self.cache_config.block_size,
            Splits.of_gpu(gpu_cores.count(), AdditionalConfig.of(self.vllm_config).fixed_splits),
            tuned.current(),
        )

    def _load_networks(self) -> Networks:
        return Networks.load(self.vllm_config)

    def _choose_block_size(self) -> None:
        """Blocks have room for a state, where layers keep any."""
        cache = self.cache_config
        state_bytes = choose_block_size(cache, self.networks.layers_of_all_ranks, self._pool_dtype)
        if not state_bytes:
            return
        logger.info(
            "Each request keeps %.1f MiB of recurrent state besides K/V; blocks have %d "
            "tokens to make room for it, and prefix-cache hits end at whole blocks",
            state_bytes / 2**20,
            cache.block_size,
        )

    @property
    def networks(self) -> Networks:
        if self._networks is None:
            raise RuntimeError("the weights are not loaded: call wake_up first")
        return self._networks

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs, draft = self._specs_of_all_ranks(), self.networks.draft
        # Of a loaded prompt, vLLM would leave out the last block of layers that it knows as a
        # draft network's; here their K/V came complete (`spec_decode.draft_writer`).
        known = self.vllm_config.kv_transfer_config is None
        of_draft = {layer.name for layer in draft.layers} if draft and known else ()
        return {
            layer.name: replace(specs[layer.name], is_draft=layer.name in of_draft)
            for layer in self.networks.all_layers
        }

    def _specs_of_all_ranks(self) -> dict[str, KVCacheSpec]:
        return kv_cache_specs(
            self.networks.layers_of_all_ranks, self.cache_config.block_size, self._pool_dtype
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]  # layer outermost: an array a layer, slots of a block in order

    def determine_available_memory(self) -> int:
        """Bytes for the KV pool."""
        networks, config, kv_cache = self.networks, self.vllm_config, self._backend
        layers = networks.all_layers
        elsewhere = [layer.name for layer in networks.elsewhere]
        return self._memory.pool_size(
            config,
            Needs.of(config, self._specs_of_all_ranks(), elsewhere),
            networks.draft_bytes,
            quantized_share(layers, self._pool_dtype),
            LargestCalls.of(config, layers, kv_cache, self.vocab_size if self._samples else 0),
            self._largest_step,
            partial(requests_profile, networks.target, networks.layers, config, kv_cache),
            self.transfers.memory_bytes,
            networks.adapter_bytes,
            networks.image_bytes(config),
        )

    def _largest_step(self) -> None:
        networks = self.networks
        profile_step(
            networks.target,
            networks.layers,
            self.vllm_config,
            self._backend,
            networks.heaviest_extras,
        )
        if networks.draft is not None:
            networks.draft.profile(self._backend)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._kv_cache_config = kv_cache_config
        max_num_reqs = self.scheduler_config.max_num_seqs
        max_len = self.model_config.max_model_len
        # One spare block: vLLM may allocate one for a step in flight past the last position.
        max_blocks = -(-max_len // self.cache_config.block_size) + 1
        tables = BlockTables(len(kv_cache_config.kv_cache_groups), max_num_reqs, max_blocks)
        self._requests = Requests(max_num_reqs, max_len, tables)
        pool = "kernels" if self._backend.pipelined else "scatter"
        self.transfers.open(kv_cache_config, pool)
        self._clock = StepClock()
        self._wiring.weights(self._most_arrays)
        self.runner = RecoveringRunner(self._make_runner, self.transfers.hooks, self._most_failures)
        self._wiring.everything(self._most_arrays)
        self._meter = StepMeter(self._clock, self._memory.limit, lambda: self.runner.num_failures)
        self._rows = StepRows()  # of the step that was laid out last

    @property
    def _most_arrays(self) -> int:
        """Arrays of weights and pool at most: a draft network and adapters have fewer."""
        networks = self.networks
        weights = len(tree_flatten(networks.target.model.parameters()))
        return 2 * weights + MOST_POOL_ARRAYS * len(networks.all_layers)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        return self.transfers.handshake()

    def _make_runner(self, graphs: Graphs) -> ModelRunner:
        """Allocates the pool, and makes all that works on it.

        Args:
            graphs: whether forwards may be built by graphs, and where such are counted.
        """
        networks, block_size = self.networks, self.cache_config.block_size
        kv_caches = allocate_kv_caches(
            self._kv_cache_config,
            networks.all_layers,
            block_size,
            self._pool_dtype,
            self._backend,
        )
        groups = self._kv_cache_config.kv_cache_groups
        group_of = {name: g for g, group in enumerate(groups) for name in group.layer_names}
        executor = ModelExecutor(
            networks.target,
            networks.layers,
            kv_caches,
            group_of,
            block_size,
            graphs,
            networks.variables,
        )
        mx.eval(executor.pool_arrays())
        requests, proposer, writer = self._requests, None, None
        pool = DraftPool(kv_caches, group_of, requests.block_tables, graphs)
        if networks.draft is not None and drafts_for_others(self.vllm_config):
            writer = networks.draft.writer(pool, requests)
        elif networks.draft is not None:
            proposer = networks.draft.proposer(pool)
        return ModelRunner(
            executor,
            requests,
            self._make_end(executor),
            self.scheduler_config.max_num_seqs,
            self._make_speculator(proposer),
            writer,
            self._columns(),
            hooks=self.transfers.hooks,
            clock=self._clock,
        )

    def _make_speculator(self, network: Proposer | None) -> Speculator | None:
        """What drafts for requests.

        Args:
            network: the proposer of the draft network; None: there is none.
        """
        most = self._memory.most_drafts
        return make_speculator(self.vllm_config, self._requests, network, most)

    def _columns(self) -> Sequence[RequestColumn]:
        """What modules of the target read of requests."""
        return self.networks.columns

    def _make_end(self, executor: ModelExecutor) -> StepEnd:
        """What makes results of hidden states."""
        model = self.model_config
        if (pooler := self.networks.pooler) is not None:
            assert model.pooler_config is not None
            return PoolingEnd(pooler, model.pooler_config, self._requests)
        sampler = Sampler(
            self.vocab_size,
            self.scheduler_config.max_num_seqs,
            model.logprobs_mode,
            model.seed,
            CustomProcessors(self.vllm_config),
        )
        return SamplingEnd(executor, self._requests, sampler, self._agreed)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        started = time.perf_counter()
        warm_up.compile_kernels(
            self._backend,
            self.networks.all_layers,
            loader.mlx_dtype(self.vllm_config),
            self._pool_dtype,
            self.cache_config.block_size,
        )
        self._warm_up()
        seconds = time.perf_counter() - started
        self._seed()
        shutdown.ignore_ctrl_c()  # not before: a start can be interrupted
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _warm_up(self) -> None:
        self._check(self.runner.warm_up(self._rehearse))

    def _rehearse(self, runner: ModelRunner) -> Told | HiddenTold:
        pool = self._kv_cache_config
        room = Room(
            len(pool.kv_cache_groups),
            self.cache_config.block_size,
            pool.num_blocks,
            self.model_config.max_model_len,
        )
        if (pooler := self.model_config.pooler_config) is not None:
            return rehearse_pooling(runner, pooler, self.vocab_size, room)
        sampler = Sampler(self.vocab_size, self.scheduler_config.max_num_seqs)
        defaults = self.model_config.get_diff_sampling_param()
        return rehearse(runner, sampler, defaults, self.vocab_size, room)

    def _check(self, told: Told | HiddenTold) -> None:
        """Refuses a model that is not served right; codes in the pool would hide it."""
        dtype = loader.mlx_dtype(self.vllm_config)
        if AdditionalConfig.of(self.vllm_config).dense_check and self._pool_dtype == dtype:
            family, target = loader.model_type(self.vllm_config), self.networks.target
            if isinstance(told, HiddenTold):
                dense_check.check_hidden(target, told, dtype, family)
            else:
                dense_check.check(target.model, told, dtype, family)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        with self._turn, self._clock.laying_out():
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
        with self._turn, self._clock.handing_over() as step:
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
        """Gives memory back: level 1 the KV pool; level 2 the weights, too.

        On unified memory there is nowhere to move weights out of the way, so level 1 leaves them.
        """
        before = mx.get_active_memory()
        self.discard(("weights",) if level >= 2 else ())
        logger.info("Asleep: returned %.2f GiB", (before - mx.get_active_memory()) / 2**30)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Gives back the KV pool, and where the tags name "weights" these."""
        if self.runner.awake:
            self._awake_bytes = mx.get_active_memory()
        self._wiring.release()
        self.runner.release_pool()
        self.reset_encoder_cache()
        if "weights" in tags:
            self._release_weights()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates the KV pool again, and loads the weights again where they were given back.

        Raises:
            RuntimeError: other programs have the memory by now; all may be tried again.
        """
        if tags is None or "kv_cache" in tags:
            self._memory.check_room(self._awake_bytes - mx.get_active_memory())
        if self._networks is None and (tags is None or "weights" in tags):
            self.load_model()
        if tags is None or "kv_cache" in tags:
            self._restore_pool()

    def _restore_pool(self) -> None:
        self._wiring.weights(self._most_arrays)
        self.runner.restore_pool()
        self._wiring.everything(self._most_arrays)

    def reload_weights(self) -> None:
        """Loads the weights again, after their files have changed.

        The KV pool is emptied as well. If the engine is awake, pause it first and reset its prefix
        cache afterwards, as vLLM's own documentation asks.
        """
        awake = self.runner.awake
        self._wiring.release()
        self.runner.release_pool()
        self._release_weights()
        self.load_model()
        if awake:
            self._restore_pool()

    def _release_weights(self) -> None:
        self._networks = None
        mlx_device.give_back()

    @property
    def num_requests(self) -> int:
        """Requests that this worker knows of, with a row in its tables or without."""
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
        """Loads an adapter, before requests name it."""
        with self._turn:
            return self._adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Lets go of an adapter; requests that have it end with it."""
        with self._turn:
            return self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Has an adapter stay, in a slot."""
        with self._turn:
            return self._adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that are loaded."""
        return self._adapters.ids()

    def get_model(self) -> Any:
        return self.networks.target.model

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def check_health(self) -> None:
        """Raises where the device no longer computes."""
        with self._turn:
            if hasattr(self, "runner"):
                self.runner.wait()  # an error of a step is the step's, not the caller's
            mx.eval(mx.zeros(1) + 1)

    def synchronize_device(self) -> None:
        with self._turn:
            self.runner.wait()

    def reset_encoder_cache(self) -> None:
        if self._networks is not None and self._networks.encoder is not None:
            self._networks.encoder.reset()

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
        """Lets go of the model and the pool, once nothing on the device uses them."""
        if hasattr(self, "runner"):  # start-up may have failed before
            self.runner.close()
            del self.runner
            self.transfers.close()
            self._wiring.release()
            if self._awake is not None:
                self._awake.close()
        shutdown.forget_tokenizers()
        self._release_weights()
        if hasattr(self, "_memory"):
            self._memory.release()
