# SPDX-License-Identifier: Apache-2.0
"""A process with this plugin's platform but none of its changes to vLLM: what does vLLM do then?

`python unpatched.py FOLDER CHANGE...` runs the probes of those changes and prints a JSON object of
change to {"needed": bool, "found": what vLLM did}. FOLDER has the configuration of a small model.

A probe says whether vLLM still does what the change is there for; its docstring says what that is.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

#: Modules of vllm_patches that change nothing.
APART = {
    *("__init__", "chunk_lengths", "probe", "releases", "replacing", "step_result"),
    "torchvision_functions",
}
#: A module of changes that is there in this process, too: it chooses what to import.
_IMPORTED = {"partial_imports"}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}
MESSAGES: list[str] = []


@dataclass(frozen=True)
class Probe:
    """How to find out whether vLLM needs a change."""

    run: Callable[[str], tuple[bool, Any]]  # model folder to (needed, what vLLM did)
    on_mac: bool  # whether it is needed on macOS only
    at_once: bool  # whether any process with an engine's configuration and scheduler makes it


PROBES: dict[str, Probe] = {}


def probe(change: str, on_mac: bool = False, at_once: bool = True) -> Any:
    """Registers the probe of a change.

    Args:
        change: "module.name" of what makes it, or "module" where importing it is all.
        on_mac: whether vLLM needs it on macOS only.
        at_once: whether any process with an engine's configuration and scheduler makes it.
    """

    def register(run: Callable[[str], tuple[bool, Any]]) -> Callable[[str], tuple[bool, Any]]:
        PROBES[change] = Probe(run, on_mac, at_once)
        return run

    return register


def arguments(folder: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"max_model_len": 256} | options
    return EngineArgs(model=folder, skip_tokenizer_init=True, **options)


def raised(function: Callable[..., Any], *args: Any) -> str:
    """The error a call raises, or "" if it returns."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}"
    return ""


@probe("scheduler.send_salts")
def salts(folder):
    """A request's cache_salt is in nothing that the scheduler sends to the worker."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    scheduler = make_scheduler(folder_config(folder), num_blocks=8)
    scheduler.add_request(Request("a", [1, 2], SamplingParams(), None, cache_salt="pepper"))
    (sent,) = scheduler.schedule().scheduled_new_reqs
    return "pepper" not in repr(vars(sent)), vars(sent)


@probe("adapters.know_by_content", at_once=False)
def adapters(folder):
    """Blocks are hashed with an adapter's name and path, whatever is in its files."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
    from vllm.v1.request import Request

    request = Request("a", [1, 2], SamplingParams(), None)
    request.lora_request = LoRARequest("mine", 1, folder)
    keys, _ = generate_block_hash_extra_keys(request, 0, 2, 0)
    return keys == (("lora", "mine", folder),), keys


@probe("adapters.answer_for_bad_adapters", at_once=False)
def answers_for_bad_adapters(folder):
    """An adapter that the engine refuses is an error of the server's."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
    from vllm.utils.counter import AtomicCounter

    async def refuse(request):
        raise ValueError("LoRA adapter 'mine' has rank 99")

    serving: Any = OpenAIServingModels.__new__(OpenAIServingModels)
    serving.lora_resolver_lock = defaultdict(asyncio.Lock)
    serving.lora_requests, serving.lora_id_counter = {}, AtomicCounter(0)
    serving.engine_client = SimpleNamespace(add_lora=refuse)
    serving.registry = SimpleNamespace(is_base_model=lambda name: False)
    request = LoadLoRAAdapterRequest(lora_name="mine", lora_path=folder)
    found = asyncio.run(serving.load_lora_adapter(request))
    return found.error.code == 500, found.error


@probe("scheduler.send_images")
def images(folder):
    """The data of an image in a prefix that was found do not come with a request's start."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request

    image = MultiModalFeatureSpec(MultiModalKwargsItem(), "image", "a", PlaceholderRange(1, 4))
    request = Request("a", [1] * 8, SamplingParams(), None, mm_features=[image])
    request.num_computed_tokens = 6
    (sent,) = NewRequestData.from_request(request, ([0],)).mm_features
    return sent.data is None, repr(sent)


@probe("engine_args.fit_batches_to_drafts")
def batches_of_adapters(folder):
    """vLLM's defaults have no room for the drafts of as many requests, and its error no numbers."""
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 20}
    made = arguments(folder, speculative_config=drafts, enable_lora=True, **options)
    found = raised(made.create_engine_config)
    return "Consider increasing" in found, found


@probe("scheduler.keep_images_whole")
def images_in_parts(folder):
    """A chunk that begins with an image gets a part of it, though chunks are not to."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.request import Request

    scheduler = make_scheduler(folder_config(folder), num_blocks=8)
    scheduler.scheduler_config.disable_chunked_mm_input = True
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    image = MultiModalFeatureSpec(MultiModalKwargsItem(), "image", "a", PlaceholderRange(0, 20))
    request = Request("a", [1] * 30, SamplingParams(), None, mm_features=[image])
    planned = scheduler._try_schedule_encoder_inputs(request, 0, 15, 64)[1]
    return planned == 15, planned


@probe("engine_args.set_batch_defaults")
def batch_defaults(folder):
    """vLLM asks a platform for its device's name and memory, and for nothing else."""
    from vllm.engine import arg_utils
    from vllm.platforms import current_platform

    asked = set()

    class Recorder:
        def __getattr__(self, name):
            asked.add(name)
            return getattr(current_platform, name)

    arg_utils.current_platform = Recorder()
    try:
        arg_utils.EngineArgs.get_batch_defaults(1)
    finally:
        arg_utils.current_platform = current_platform
    known = {"get_device_total_memory", "get_device_name", "is_cpu", "is_tpu"}
    return bool(asked) and asked <= known, sorted(asked)


@probe("engine_args.accept_int8_kv_cache")
def int8(folder):
    """vLLM refuses `int8` as a format of the KV cache."""
    found = raised(lambda: arguments(folder, kv_cache_dtype="int8").create_engine_config())
    return "int8" in found, found


@probe("engine_args.fit_the_context")
def unset_length(folder):
    """Without --max-model-len vLLM takes the longest that the model is made for, not what fits."""
    config = arguments(folder, max_model_len=None).create_engine_config().model_config
    return config.original_max_model_len != -1, config.original_max_model_len


@probe("engine_args.cache_prefixes_of_states")
def prefixes_of_states(folder):
    """vLLM caches prefixes by default, but not where a model keeps states alone."""
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    found = {}
    for kind in ("decoder", "hybrid", "attention_free"):
        asked = SimpleNamespace(attn_type=kind, pooler_config=None)
        model = SimpleNamespace(
            is_prefix_caching_supported=ModelConfig.is_prefix_caching_supported.fget(asked),
            is_chunked_prefill_supported=True,
            is_attention_free=kind == "attention_free",
            runner_type="generate",
        )
        options = SimpleNamespace(enable_prefix_caching=None, enable_chunked_prefill=None)
        EngineArgs._set_default_chunked_prefill_and_prefix_caching_args(options, model)
        found[kind] = options.enable_prefix_caching
    return list(found.values()) == [True, True, False], found


@probe("environment.set_defaults", at_once=False)
def variables(folder):
    """vLLM would take the second model runner, or warns that it cannot; it does not count NaNs."""
    from vllm import envs

    names = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_COMPUTE_NANS_IN_LOGITS")
    config = folder_config(folder)
    for name in names:
        os.environ.pop(name, None)
    try:
        second, counts = config.use_v2_model_runner, envs.environment_variables[names[1]]()
    finally:
        os.environ.update(zip(names, "01", strict=True))
    warned = any("Model Runner V2 requires" in text for text in MESSAGES)  # once in a process
    return (second or warned) and not counts, f"second: {second}, {warned}; counts: {counts}"


@probe("environment.make_known", at_once=False)
def unknown_variable(folder):
    """vLLM refuses variables that begin with VLLM_ and are not its own."""
    from vllm.platforms.interface import Platform

    os.environ["VLLM_METAL_A_PROBE"] = "1"
    try:
        found = raised(Platform.validate_environ, True)
    finally:
        del os.environ["VLLM_METAL_A_PROBE"]
    return "VLLM_METAL_" in found, found  # it names one of those that it finds


@probe("engine_args.recompute_by_default")
def load_failure_policy(folder):
    """A request whose blocks cannot be loaded ends, unless its user asked for a recomputation."""
    from pydantic import TypeAdapter
    from vllm.config import KVTransferConfig

    made = KVTransferConfig(), TypeAdapter(KVTransferConfig).validate_json("{}")
    found = [config.kv_load_failure_policy for config in made]
    return found == ["fail", "fail"], found


@probe("logs.drop_unhelpful_warnings")
def warnings(folder):
    """The engine's process takes the platform's choice for its user's; torch looks for Triton."""
    from vllm.platforms import current_platform

    name = "vllm_metal.vllm_patches.logs"
    replaced = sys.modules.pop(name)
    unhelpful = importlib.import_module(name).UNHELPFUL
    sys.modules[name] = replaced
    folder_config(folder).__post_init__()  # as in an engine's process
    current_platform.import_ir_kernels()  # as where a worker starts
    missing = [text for text in unhelpful.values() if not any(text in m for m in MESSAGES)]
    return not missing, f"not said: {missing}"


@probe("logs.leave_out_what_clients_wrote")
def quotes(folder):
    """vLLM logs the name of a tool whose arguments, written by a client, are no JSON."""
    from vllm.renderers import chat_utils

    before = len(MESSAGES)
    call = {"type": "function", "function": {"name": "a-secret", "arguments": "{"}}
    chat_utils._postprocess_messages([{"role": "assistant", "tool_calls": [call]}])
    logged = MESSAGES[before:]
    return any("a-secret" in text for text in logged), logged


@probe("logs.show_our_messages", at_once=False)
def our_messages(folder):
    """vLLM's logging shows no INFO of a plugin."""
    logging.getLogger("vllm_metal").parent = logging.getLogger()
    shown = logging.getLogger("vllm_metal.worker").isEnabledFor(logging.INFO)
    return not shown, shown


@probe("engine_args.serve_files")
def file_for_a_model(folder):
    """A GGUF file is no model."""
    file = Path(folder) / "model.gguf"
    file.write_bytes(b"GGUF")
    found = raised(arguments(str(file)).create_model_config)
    return bool(found), found


@probe("engine_args.keep_names_of_files", at_once=False)
def name_of_a_file(folder):
    """Offline, a type behind a model's name is taken for a part of it."""
    from huggingface_hub import constants
    from vllm.engine import arg_utils

    constants.HF_HUB_OFFLINE = True
    try:
        found = raised(arg_utils.EngineArgs, "owner/name:Q4_K_M")
    finally:
        constants.HF_HUB_OFFLINE = False
    return "owner/name:Q4_K_M" in found, found


@probe("unknown_fields.tell_of_unknown_fields", at_once=False)
def unknown_field(folder):
    """A field that vLLM does not know is ignored, whatever it means to its client."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    asked = {"model": "m", "prompt": "a", "num_predict": 5}
    found = raised(CompletionRequest.model_validate, asked)
    return not found, found


@probe("start_failures.name_causes", at_once=False)
def page_of_validation(folder):
    """A setting that this platform refuses ends in a page of pydantic's."""
    found = raised(arguments(folder, block_size=48).create_engine_config)
    return found.startswith("ValidationError"), found


@probe("start_failures.leave_causes")
def failed_start(folder):
    """An engine's process logs the traceback of its failed start to the terminal."""
    from vllm.v1.engine import core

    found = getsource(core.EngineCoreProc.run_engine_core)
    return 'logger.exception("EngineCore failed to start.")' in found, found


@probe("start_failures.end_commands_with_one_line", at_once=False)
def usage(folder):
    """An unknown option is answered with vLLM's usage."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    told = io.StringIO()
    with suppress(SystemExit), redirect_stderr(told):
        FlexibleArgumentParser().parse_args(["--unheard-of"])
    return "usage:" in told.getvalue(), told.getvalue()


@probe("start_log.to_a_file", at_once=False)
def terminal(folder):
    """A server logs its start to its terminal."""
    from vllm.logger import configure_logging_from_args

    found = configure_logging_from_args(SimpleNamespace()).pylogging_config_file
    return found is None, found


@probe("partial_imports.plan_only", at_once=False)
def dear_imports(folder):
    """An import of vLLM's planning of the cache brings torch's compiler, and transformers."""
    import vllm.v1.core.kv_cache_utils  # noqa: F401

    dear = {"torch._inductor", "transformers"} & sys.modules.keys()
    return bool(dear), f"{sorted(dear)}"


@probe("processes.spawn", at_once=False)
def start_method_of_workers(folder):
    """vLLM forks the workers of an engine."""
    return start_method(folder)


@probe("processes.spawn_on_macos", on_mac=True, at_once=False)
def start_method(folder):
    """vLLM forks on macOS, too."""
    from vllm.utils.system_utils import get_mp_context

    method = get_mp_context().get_start_method()
    return method == "fork", method


@probe("processes.stay_in_process_on_macos", on_mac=True, at_once=False)
def engine_process(folder):
    """`LLM` gives its engine a process of its own on macOS, too."""
    from vllm.v1.engine import llm_engine

    asked = []

    class StoppedHereError(Exception):
        pass

    def make_client(multiprocess_mode, **_):
        asked.append(multiprocess_mode)
        raise StoppedHereError

    llm_engine.EngineCoreClient.make_client = make_client
    found = raised(llm_engine.LLMEngine.from_engine_args, arguments(folder))
    return asked == [True], f"{asked} {found}"


@probe("scheduler.end_chunks_within_blocks")
def no_chunk_at_all(folder):
    """A prompt gets no token where a step has room for a block, but not beside what decodes."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=480),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        block_size=480,
        hash_block_size=480,
        max_num_scheduled_tokens=512,
        use_eagle_block_drop=False,
        mamba_partial_cache_hit=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_shared_prefix_checkpoint=False,
    )
    request = SimpleNamespace(
        num_computed_tokens=0, num_prompt_tokens=900, num_tokens=900, shared_prefix_boundary=0
    )
    chunk = Scheduler._mamba_block_aligned_split(scheduler, request, 470)
    return chunk == 0, chunk


@probe("model_info.TextModel")
def own_class(folder):
    """vLLM imports a class of torch's to ask what an architecture can do."""
    from vllm.model_executor.models import ModelRegistry

    found = ModelRegistry.models["LlamaForCausalLM"]
    return hasattr(found, "module_name"), repr(found)


@probe("model_info.answer_for_models")
def multimodal(folder):
    """A checkpoint of Gemma 3n is one that takes images, or is not known without what they need."""
    from vllm.model_executor.models import ModelRegistry

    try:
        found = ModelRegistry.models["Gemma3nForConditionalGeneration"].inspect_model_cls()
    except Exception as error:
        return True, repr(error)
    return found.supports_multimodal, found.supports_multimodal


@probe("encoder_info.EncoderModel")
def own_class_of_an_encoder(folder):
    """vLLM imports a class of torch's to ask what an encoder can do."""
    from vllm.model_executor.models import ModelRegistry

    found = ModelRegistry.models["BertModel"]
    return hasattr(found, "module_name"), repr(found)


@probe("encoder_info.answer_for_encoders")
def own_classes_of_encoders(folder):
    """So with all encoders that are served."""
    from vllm.model_executor.models import ModelRegistry

    from vllm_metal.encoders.served import ARCHITECTURES

    missing = [
        name for name in ARCHITECTURES if not hasattr(ModelRegistry.models[name], "module_name")
    ]
    return not missing, repr(missing)


@probe("model_info.ImageModel")
def images_in_a_process_apart(folder):
    """vLLM imports a class of torch's to ask whether an architecture takes images."""
    from vllm.model_executor.models import ModelRegistry

    found = ModelRegistry.models["Gemma3ForConditionalGeneration"]
    return hasattr(found, "module_name"), repr(found)


@probe("model_info.answer_for_images")
def class_of_text_alone(folder):
    """vLLM loads the class of a model that takes images where its text alone is served."""
    from vllm.config import ModelConfig
    from vllm.config.multimodal import MultiModalConfig

    class Text(ModelConfig):
        is_multimodal_model = True
        multimodal_config = MultiModalConfig(language_model_only=True)

        def __init__(self):
            pass

        @property
        def hf_config(self):
            raise LookupError("the class is looked up")

    found = raised(lambda: Text()._supports_multimodal_inputs())
    return bool(found), found


@probe("image_processors.readable", at_once=False)
def without_torchvision(folder):
    """vLLM's classes of models that take images cannot be imported without torchvision."""
    found = raised(importlib.import_module, "vllm.model_executor.models.gemma3_mm")
    return "No module named 'torchvision'" in found, found


@probe("image_processors.refuse_bombs", at_once=False)
def bomb(folder):
    """Pillow's error of an image of too many pixels is none of ValueError, which means 400."""
    import io

    from PIL import Image
    from vllm.multimodal.media.image import ImageMediaIO

    written = io.BytesIO()
    Image.new("RGB", (9, 9)).save(written, "PNG")
    Image.MAX_IMAGE_PIXELS = 9
    found = raised(ImageMediaIO().load_bytes, written.getvalue())
    return found.startswith("DecompressionBombError"), found


@probe("image_names.keep_apart", at_once=False)
def names_of_images(folder):
    """The hash that an image is found by does not depend on whose request it is in."""
    from vllm.multimodal.processing.inputs import ProcessorInputs

    given = {"inputs", *ProcessorInputs.__dataclass_fields__}
    return not {name for name in given if "salt" in name or "owner" in name}, sorted(given)


@probe("media_loading.bound", at_once=False)
def pixels_of_a_request(folder):
    """Two images are decoded together, though each has as many pixels as one may have."""
    import asyncio
    import base64
    import io

    from PIL import Image
    from vllm.multimodal.media.connector import MediaConnector

    Image.MAX_IMAGE_PIXELS, os.environ["VLLM_MAX_IMAGE_PIXELS"] = None, "81"
    written = io.BytesIO()
    Image.new("RGB", (9, 9)).save(written, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"

    async def both() -> Any:
        connector = MediaConnector()
        return await asyncio.gather(*(connector.fetch_image_async(url) for _ in range(2)))

    found = raised(lambda: asyncio.run(both()))
    return not found, found


@probe("request_sizes.bound", at_once=False)
def grammar_of_many_rules(folder):
    """A grammar of thousands of rules that begin with each other is taken."""
    from vllm.v1.structured_output.backend_xgrammar import xgr

    rules = "".join(f'r{n} ::= r{n + 1} "a" | "b"\n' for n in range(3000))
    found = raised(xgr.Grammar.from_ebnf, f'root ::= r0\n{rules}r3000 ::= "c"')
    return not found, found


@probe("request_sizes.drop_compilations")
def compilation_of_an_aborted_request(folder):
    """A grammar is compiled for a request that was aborted while it waited for its turn."""
    from concurrent.futures import Future

    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request, RequestStatus

    scheduler = make_scheduler(folder_config(folder), num_blocks=8)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    request = Request("a", [1, 2], params, None)
    scheduler.add_request(request)
    request.structured_output_request.grammar = waiting = Future()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    return not waiting.cancelled(), waiting


@probe("engine_args.check_folders")
def layers_without_end(folder):
    """transformers makes a configuration of more layers than any model has."""
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        config = MODEL | {"num_hidden_layers": 20_000}
        pathlib.Path(name, "config.json").write_text(json.dumps(config))
        found = raised(lambda: arguments(name).create_model_config())
    return not found, found


@probe("engine_args.check_first")
def kv_cache_dtype(folder):
    """A kv-cache dtype that is none is answered with all of vLLM's."""
    found = raised(arguments(folder, kv_cache_dtype="int3").create_engine_config)
    return "fp8_e5m2" in found, found


@probe("engine_links.notice_engines_that_end_early")
def silent_engine(folder):
    """A client waits for an engine's first message and looks at nothing else."""
    from vllm.v1.engine import core_client

    found = getsource(core_client.MPClient.__init__)
    return "timeout=VLLM_ENGINE_READY_TIMEOUT_S * 1000" in found, found


@probe("shutdown.end_interrupted_starts")
def long_poll(folder):
    """A client that waits for engines looks for signals every ten seconds."""
    from vllm.v1.engine import utils

    return utils.STARTUP_POLL_PERIOD_MS >= 10_000, utils.STARTUP_POLL_PERIOD_MS


@probe("shutdown.end_with_sigterm", at_once=False)
def noted_signal(folder):
    """An engine that starts notes SIGTERM and goes on."""
    from vllm.v1.engine import core

    found = getsource(core.EngineCoreProc.run_engine_core)
    return "signal.signal(signal.SIGTERM, signal_handler)" in found, found


@probe("server_end.let_starts_be_interrupted", at_once=False)
def only_sigterm(folder):
    """A server that starts has SIGTERM raise, and leaves Ctrl-C to asyncio."""
    from vllm.entrypoints.launchers.api_server import entry

    found = getsource(entry.run_server)
    return "signal.SIGTERM" in found and "signal.SIGINT" not in found, found


@probe("error_remedies.name_remedies", at_once=False)
def response_of_no_store(folder):
    """A response that is not kept is answered as one that never was, and tools with options.

    An image for a model that reads none is answered without a remedy.
    """
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.multimodal.registry import MultiModalRegistry
    from vllm.renderers.online_renderer import OnlineRenderer

    found = getsource(OpenAIServingResponses._make_not_found_error)
    of_tools = getsource(OnlineRenderer.render_chat)
    of_images = getsource(MultiModalRegistry.create_processor)
    is_so = "--tool-call-parser to be set" in of_tools and "is not a multimodal" in of_images
    return is_so and "STORE" not in found, found


@probe("model_info.take_mlx_models")
def family_of_mlx(folder):
    """A family that mlx-lm alone has is a model type that transformers does not recognize."""
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        config = MODEL | {"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7"}
        pathlib.Path(name, "config.json").write_text(json.dumps(config))
        found = raised(lambda: arguments(name).create_engine_config())
    return "does not recognize this architecture" in found, found


@probe("speculation.allow_min_p_and_logit_bias")
def min_p(folder):
    """vLLM refuses both parameters beside speculation."""
    from vllm import SamplingParams

    both = SamplingParams(min_p=0.1), SamplingParams(logit_bias={5: 1.0})
    found = [raised(params._validate_spec_decode, object()) for params in both]
    return all("not yet supported" in text for text in found), found


@probe("token_ids.reject_unknown_tokens")
def unknown_tokens(folder):
    """Without a tokenizer, vLLM takes any token id."""
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    processor = InputProcessor(folder_config(folder))
    prompt = {"type": "token", "prompt_token_ids": [10**6]}
    found = raised(processor.process_inputs, "a", prompt, SamplingParams(), ("generate",))
    return not found, found


def make_scheduler(config: Any, num_blocks: int) -> Any:
    """vLLM's scheduler, without a worker."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=16)


@probe("step_budget.bound_steps")
def tokens_beside_a_stream(folder):
    """A prompt beside a stream gets as many tokens of a step as fit, however long steps take."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from vllm_metal.vllm_patches.step_result import StepResult

    config = arguments(folder, enable_prefix_caching=False).create_engine_config()
    scheduler = make_scheduler(config, num_blocks=32)
    params = SamplingParams(max_tokens=40)
    params.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request("stream", [1, 2, 3], params, None))
    for _ in range(6):
        planned = scheduler.schedule()
        time.sleep(0.05)  # the device's work: 17 ms a token of the prompt
        scheduler.update_from_output(planned, StepResult(["stream"], {"stream": 0}, [[5]]))
    scheduler.add_request(Request("long", [7] * 200, params, None))
    planned = scheduler.schedule().num_scheduled_tokens
    return planned == {"stream": 1, "long": 200}, planned


@probe("scheduler.end_failed_requests")
def failed_request(folder):
    """A scheduler goes on with a request that its worker says has failed, and cannot start all
    requests again while one waits for K/V to come."""
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    from vllm_metal.vllm_patches.step_result import StepResult

    scheduler = make_scheduler(folder_config(folder), num_blocks=8)
    params = SamplingParams(max_tokens=4)
    params.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request("a", [1, 2, 3], params, None))
    result = StepResult(["a"], {"a": 0}, sampled_token_ids=[[5]], failures={"a": "a reason"})
    outputs = scheduler.update_from_output(scheduler.schedule(), result)
    ended = [
        (str(output.finish_reason), output.stop_reason)
        for of_client in outputs.values()
        for output in of_client.outputs
        if output.finish_reason is not None
    ]
    goes_on = not ended and "a" in scheduler.requests
    scheduler.add_request(Request("b", [1, 2, 3], params, None))
    scheduler.schedule()
    loading = scheduler.requests["b"]
    scheduler.running.remove(loading)
    loading.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.kv_holding_waiting.add_request(loading)
    refused = raised(scheduler.reset_prefix_cache, True)
    return goes_on and "Failed to reset" in refused, (ended, refused)


def session_of(folder: str, turn: list[int]) -> tuple[Any, Any, Callable[[list[int]], Any]]:
    """A scheduler, the request of a session that begins with `turn`, and what makes its turns."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, eos_token_id=None)

    def make(tokens):
        return Request("a", tokens, params, None, resumable=True)

    scheduler, session = make_scheduler(folder_config(folder), num_blocks=8), make(turn)
    scheduler.add_request(session)
    return scheduler, session, make


@probe("streaming_sessions.serve_sessions")
def a_turn_too_long(folder):
    """A session grows past the longest text that there is room for."""
    from vllm_metal.vllm_patches.step_result import StepResult

    scheduler, session, make = session_of(folder, [1, 2, 3])
    planned = scheduler.schedule()
    scheduler.update_from_output(planned, StepResult(["a"], {"a": 0}, sampled_token_ids=[[5]]))
    scheduler.add_request(make([7] * 300))  # --max-model-len is 256
    found = (
        len(session.all_token_ids),
        session.status.name,
        getattr(scheduler, "sessions_to_end", None),
    )
    return found == (303, "WAITING", None), found


@probe("streaming_sessions.queue_preempted_sessions")
def a_turn_that_ends_while_preempted(folder):
    """A session whose turn ends with a token that was on its way at a preemption is never asked
    for again: no queue has it."""
    from vllm_metal.vllm_patches.step_result import StepResult

    scheduler, session, _ = session_of(folder, [1, 2, 3])
    planned = scheduler.schedule()
    scheduler.running.remove(session)
    scheduler._preempt_request(session, 0.0)
    scheduler.update_from_output(planned, StepResult(["a"], {"a": 0}, sampled_token_ids=[[5]]))
    queued = session in [*scheduler.waiting, *scheduler.kv_holding_waiting]
    return "a" in scheduler.requests and not queued, f"{session.status}, queued: {queued}"


@probe("streaming_sessions.refuse_in_sessions")
def settings_of_turns(folder):
    """vLLM takes prompt logprobs and grammars of a session's turns."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine.input_processor import InputProcessor

    class TakenError(Exception):
        pass

    def take(*_):
        raise TakenError

    double = SimpleNamespace(_validate_params=take)
    settings = {"prompt_logprobs": 1}, {"structured_outputs": StructuredOutputsParams(regex="a")}

    def ask(setting):
        InputProcessor.process_inputs(
            double, "a", {}, SamplingParams(**setting), (), resumable=True
        )

    found = [raised(ask, setting) for setting in settings]
    return all("TakenError" in text for text in found), found


@probe("streaming_sessions.end_failed_sessions")
def a_session_that_failed(folder):
    """A front end waits for the next turn of a session whose request ended with an error."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(None, log_stats=False)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
    fields = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt"))
    fields |= {"data_parallel_rank": None, "arrival_time": 0.0, "sampling_params": params}
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[1], resumable=True, external_req_id="a", **fields
    )
    processor.add_request(request, None)
    processor.process_outputs([EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR)])
    return "a" in processor.request_states, sorted(processor.request_states)


def end_slowly() -> None:
    """A process that takes its time to end when it is told to."""

    def end(*_):
        time.sleep(1.5)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    print("ready", file=sys.stderr, flush=True)
    while True:
        time.sleep(60)


@probe("engine_outputs.add_stat_logger")
def stat_loggers(folder):
    """A stat logger at vLLM's entry point has statistics collected that nobody asked for, and
    vLLM's own loggers fail where a worker reports figures and has no connector."""
    from vllm.v1.engine import async_llm
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_metal.vllm_patches.step_result import send_figures

    class Reached(Exception):
        pass

    def stop(*_):
        raise Reached

    async_llm.load_stat_logger_plugin_factories = lambda: [object]
    async_llm.renderer_from_config = stop
    config, server = folder_config(folder), object.__new__(async_llm.AsyncLLM)
    stopped = raised(server.__init__, config, None, False)
    stats, manager = SchedulerStats(), StatLoggerManager(config)
    send_figures(stats, {"step": {"host_seconds": 0.1}})
    failed = raised(manager.record, stats, None)
    return server.log_stats and "connector_cls" in failed, (stopped, server.log_stats, failed)


@probe("engine_outputs.watch", at_once=False)
def tokens_by_request(folder):
    """vLLM's statistics leave out tokens of requests that were aborted while a step computed them,
    and have of those that go on no more than sums over all."""
    import dataclasses

    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import IterationStats

    processor, statistics = OutputProcessor(None, log_stats=True), IterationStats()
    for name in ("goes-on", "aborted"):
        request = EngineCoreRequest(
            *(name, [1, 2], None, SamplingParams(detokenize=False), None, 0.0, None, None, None),
            external_req_id=name,
        )
        processor.add_request(request, None)
    processor.abort_requests(["aborted"], internal=True)
    outputs = [EngineCoreOutput(name, [5]) for name in ("goes-on", "aborted")]
    processor.process_outputs(outputs, 1.0, statistics)
    told = str(dataclasses.asdict(statistics) if dataclasses.is_dataclass(statistics) else "")
    told += str(vars(statistics))
    return statistics.num_generation_tokens == 1 and "goes-on" not in told, told


@probe("first_mistake.stop_at_the_first_mistake", at_once=False)
def mistakes(folder):
    """A request is told of each wrong item of a list, and of each kind that it might be."""
    from pydantic import ValidationError
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    found = []
    for count in (1, 10):
        try:
            ResponsesRequest.model_validate({"model": "m", "input": [{}] * count})
        except ValidationError as error:
            found.append(error.error_count())
    return found[1] > found[0] + 5, found


@probe("engine_sleep.keep", at_once=False)
def who_lets_engines_sleep(folder):
    """No setting has an engine sleep when it is idle, and nothing wakes it for a request."""
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM

    names = [name for name in vars(arguments(folder)) if re.search("idle|auto_?sleep", name)]
    wakes = "wake_up" in inspect.getsource(AsyncLLM.add_request)
    return not names and not wakes, names


@probe("engine_sleep.refuse_to_wait_asleep")
def who_waits_for_a_sleeping_engine(folder):
    """`LLM` makes steps until its requests end, though nothing computes them."""
    from vllm.entrypoints.common.offline import OfflineInferenceMixin

    class StoppedHereError(Exception):
        pass

    def step():
        raise StoppedHereError

    engine = SimpleNamespace(
        has_unfinished_requests=lambda: True,
        is_sleeping=lambda: True,
        abort_request=lambda ids, internal: None,
        output_processor=SimpleNamespace(request_states={}),
        step=step,
    )
    llm = SimpleNamespace(llm_engine=engine)
    found = raised(lambda: OfflineInferenceMixin._run_engine(llm, object, use_tqdm=False))
    return "StoppedHereError" in found, found


@probe("pooling_failures.tell_pooling_failures")
def who_hears_of_a_pooling_request_that_failed(folder):
    """Of one without a result, the front end thinks that it generates: it raises, for all."""
    from vllm.pooling_params import PoolingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(None, log_stats=False)
    given = {"prompt_token_ids": [1], "mm_features": None, "sampling_params": None}
    request = EngineCoreRequest(
        request_id="a",
        external_req_id="a",
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **given,
    )
    processor.add_request(request, None)
    failed = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason="too hot")
    try:
        (output,) = processor.process_outputs([failed]).request_outputs
    except AssertionError:
        return True, "AssertionError"
    return output.error is None, repr(output.error)


@probe("prompts.watch", at_once=False)
def who_sees_prompts(folder):
    """Nobody is shown a prompt with its messages, nor what was found of it."""
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    names = {name for owner in (OnlineRenderer, AsyncLLM) for name in dir(owner)}
    hooks = {name for name in names if re.search("(?<!class)hook|observe|watch|listener", name)}
    return not hooks, sorted(hooks)


@probe("prompts.rewrite", at_once=False)
def who_changes_messages(folder):
    """No setting has messages changed before the template gets them."""
    names = [
        name
        for name in vars(arguments(folder))
        if re.search("messages|rewrit|normali[sz]e_(prompt|text)", name)
    ]
    return not names, names


@probe("server_app.around_servers", at_once=False)
def middlewares(folder):
    """A platform has no say in what stands around a server's application."""
    from vllm.platforms.interface import Platform

    names = [name for name in dir(Platform) if re.search("middleware|server|app_|asgi", name)]
    return not names, names


@probe("serve_arguments.complete", at_once=False)
def who_chooses_parsers(folder):
    """vLLM chooses no parser of tool calls, and a platform sees no parsed arguments of a server."""
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.platforms.interface import Platform

    names = [name for name in dir(Platform) if re.search("parser|serve|front|cli|args", name)]
    chosen = FrontendArgs.tool_call_parser, FrontendArgs.enable_auto_tool_choice
    return chosen == (None, False) and not names, (chosen, names)


@probe("replicas.run_in_their_processes")
def executor_of_ranks(folder):
    """Where there are several ranks, vLLM gives each worker a process beside its engine's."""
    found = raised(arguments(folder, data_parallel_size=2).create_engine_config)
    return "--distributed-executor-backend mp" in found, found


@probe("replicas.make_independent", at_once=False)
def lock_step(folder):
    """Ranks of a model with experts step together, whatever a platform shares out."""
    from vllm.v1.engine import core

    class StoppedHereError(Exception):
        pass

    def refuse(*args, **options):
        raise StoppedHereError

    core.DPEngineCoreProc = refuse
    core.decorate_logs = lambda: None
    config = arguments(folder).create_engine_config()
    config.parallel_config.data_parallel_size = 2
    config.model_config.model_arch_config.num_experts = 4
    found = raised(lambda: core.EngineCoreProc.run_engine_core(vllm_config=config, dp_rank=1))
    return found.startswith("StoppedHereError"), found


@probe("replicas.answer_with_one_front_end", at_once=False)
def front_ends_of_ranks(folder):
    """vLLM starts as many servers as there are ranks."""
    from argparse import Namespace

    from vllm.entrypoints.cli import serve

    asked = []
    serve.run_multi_api_server = lambda args: asked.append(args.api_server_count)
    modes = ("external_lb", "hybrid_lb", "multi_port_external_lb")
    off = dict.fromkeys((f"data_parallel_{mode}" for mode in modes), False)
    ranks = {"data_parallel_rank": None, "data_parallel_start_rank": None}
    given = {"api_server_count": None, "headless": False, "data_parallel_size": 3}
    serve.ServeSubcommand.cmd(Namespace(**off, **ranks, **given))
    return asked == [3], asked


def parallel_of_a_rank(folder):
    """The configuration of one of two data-parallel engines, as its own process has it."""
    parallel = arguments(folder).create_engine_config().parallel_config
    parallel.data_parallel_size = parallel.data_parallel_size_local = 2
    parallel.reconfigure_for_independent_dp_rank()
    return parallel


@probe("replicas.mark_ranks", at_once=False)
def ranks_of_a_server(folder):
    """An engine's process does not know that there are others."""
    parallel = parallel_of_a_rank(folder)
    return parallel.data_parallel_size == 1, parallel.data_parallel_size


@probe("memory_shares.give", at_once=False)
def ranks_of_a_machine(folder):
    """An engine's process does not know how many ranks its machine has."""
    parallel = parallel_of_a_rank(folder)
    return parallel.data_parallel_size_local == 1, parallel.data_parallel_size_local


@probe("replicas.tell_facts", at_once=False)
def what_an_engine_says(folder):
    """An engine tells its server neither which weights it has nor what a plugin adds."""
    from dataclasses import fields

    from vllm.v1.engine import EngineCoreReadyResponse

    names = {field.name for field in fields(EngineCoreReadyResponse)}
    return "vllm_version" in names and not re.search("weights|digest|hash", " ".join(names)), names


@probe("replicas.refuse_other_ranks")
def another_release(folder):
    """A server takes an engine of another release of vLLM."""
    import msgspec
    from vllm.v1.engine import EngineCoreReadyResponse
    from vllm.v1.engine.core_client import MPClient

    config = arguments(folder).create_engine_config()
    client = SimpleNamespace(
        vllm_config=config,
        _effective_attention_block_sizes=set(),
        _kv_event_sources={},
        stats_update_address=None,
    )
    for rank, release in enumerate(("0.32.0", '{"vllm": "0.1"}', '{"vllm": "0.2"}')):
        sizes = ("world_size", "data_parallel_size", "tensor_parallel_size")
        sizes += ("pipeline_parallel_size", "decode_context_parallel_size", "max_num_seqs")
        told = EngineCoreReadyResponse(
            **dict.fromkeys(sizes, 1),
            max_model_len=256,
            num_gpu_blocks=8,
            block_size=16,
            dp_stats_address=None,
            dtype="float32",
            vllm_version=release,
            data_parallel_rank=rank,
            max_num_batched_tokens=64,
            instance_id="",
            supports_lora=False,
            max_loras=0,
        )
        payload = msgspec.msgpack.encode(told)
        found = raised(MPClient._apply_ready_response, client, payload)
    return found == "", found


@probe("drafts_with_results.take_drafts_with_results")
def drafts_before_tokens(folder):
    """An engine asks for the drafts of a step that it has just sent, and its scheduler puts them
    where the step's tokens belong."""
    from vllm import SamplingParams
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    options = {"speculative_config": drafting, "async_scheduling": False}
    config = arguments(folder, **options).create_engine_config()
    config.parallel_config.pipeline_parallel_size = 2
    scheduler = make_scheduler(config, num_blocks=8)
    params = SamplingParams(max_tokens=8)
    params.update_from_generation_config({}, eos_token_id=None)
    scheduler.add_request(Request("a", [1, 2, 3], params, None))
    scheduler.schedule()
    drafts = DraftTokenIds(["a"], [[7, 8]])
    engine = SimpleNamespace(
        check_for_draft_tokens=True,
        async_scheduling=False,
        vllm_config=config,
        scheduler=scheduler,
        model_executor=SimpleNamespace(take_draft_token_ids=lambda: drafts),
    )
    EngineCore.post_step(engine, model_executed=True)
    found = scheduler.schedule().scheduled_spec_decode_tokens
    return found == {"a": [7, 8]}, found


@probe("state_modes.take_modes_of_workers")
def modes_of_workers(folder):
    """An engine's configuration has no mode of states, whatever its workers' layers have."""
    import torch
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import MambaSpec

    config = folder_config(folder)
    spec = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.uint8,), mamba_cache_mode="align")
    workers = SimpleNamespace(vllm_config=config, collective_rpc=lambda _: [{"layer": spec}])
    Executor.get_kv_cache_specs(workers)
    return config.cache_config.mamba_cache_mode == "none", config.cache_config.mamba_cache_mode


@probe("engine_links.notice_lost_links")
def heartbeats_of_a_server(folder):
    """A server's sockets have no heartbeats, so that a link that is cut seems to be quiet."""
    from vllm.v1.engine import core_client

    return beating(core_client, "ROUTER")


@probe("engine_links.end_without_a_server")
def heartbeats_of_an_engine(folder):
    """An engine's have none either."""
    from vllm.v1.engine import core

    return beating(core, "DEALER")


def beating(module, kind):
    import zmq

    with zmq.Context() as context:
        kind = getattr(zmq, kind)
        socket = module.make_zmq_socket(context, "tcp://127.0.0.1:0", kind, bind=True)
        found = socket.getsockopt(zmq.HEARTBEAT_IVL)
        socket.close()
    return found == 0, found


@probe("engine_queues.hear_of_a_shutdown", at_once=False)
def a_queue_that_is_shut_down(folder):
    """A reader on another machine waits on."""
    import threading

    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    told = []

    def read():
        try:
            reader.dequeue()
        except RuntimeError as error:
            told.append(str(error))

    waiting = threading.Thread(target=read, daemon=True)
    waiting.start()
    reader.shutdown()
    waiting.join(5)
    return waiting.is_alive(), told


@probe("http_protocol.limit_connections", at_once=False)
def limits_on_headers(folder):
    """uvicorn's protocol for httptools takes longer headers than its configuration says."""
    import asyncio

    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

    async def first_words():
        config = uvicorn.Config(lambda: None, http="httptools", lifespan="off")
        config.h11_max_incomplete_event_size = 1000
        config.h11_max_header_count = 2
        config.load()
        told = []
        transport = SimpleNamespace(
            write=told.append,
            close=lambda: told.append("closed"),
            is_closing=lambda: False,
            get_extra_info=lambda name, default=None: None,
        )
        made = config.http_protocol_class(config, ServerState(), {})
        made.connection_made(transport)
        for number in range(10):
            head = b"GET / HTTP/1.1\r\n" if number == 0 else b""
            made.data_received(head + b"x-%d: " % number + b"a" * 10_000 + b"\r\n")
        return config.http_protocol_class is HttpToolsProtocol and not told, told

    return asyncio.run(first_words())


class DeadEngine:
    """What a server asks of an engine that has died by itself."""

    errored, is_running, should_keep_api_server_alive = True, False, False
    vllm_config = SimpleNamespace(
        shutdown_timeout=0,
        additional_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )


@probe("server_end.tell_how_servers_end", at_once=False)
def a_servers_end(folder):
    """A server whose engine has died ends as one that was told to stop."""
    import asyncio

    try:
        asyncio.run(serve_until_it_ends(DeadEngine()))
    except SystemExit as ended:
        return False, ended.code
    return True, "no status"


async def serve_until_it_ends(engine):
    """Runs vLLM's HTTP server, which looks at its engine as soon as it has started."""
    import asyncio

    from fastapi import FastAPI
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server import entry

    app = FastAPI()
    app.state.engine_client = engine

    async def look():
        while not getattr(getattr(app.state, "server", None), "started", False):
            await asyncio.sleep(0.01)
        launcher.terminate_if_errored(app.state.server, engine)

    looking = asyncio.create_task(look())
    ending = await entry.serve_http(app, sock=None, host="127.0.0.1", port=0, log_level="error")
    await looking
    await ending


@probe("shutdown.let_engines_end")
def time_to_end(folder):
    """A server kills an engine's process before it has had any time to end."""
    import multiprocessing
    import threading

    from vllm.v1.engine.utils import CoreEngineProcManager

    process = multiprocessing.get_context("spawn").Process(target=end_slowly)
    process.start()
    time.sleep(2)  # for its handler; ending before that is no less a death by signal
    manager = object.__new__(CoreEngineProcManager)
    manager.processes, manager.manager_stopped = [process], threading.Event()
    manager._request_shutdown_timeout = 0
    manager._finalizer = SimpleNamespace(detach=lambda: True)
    manager.shutdown(timeout=0)  # what a server asks for without --shutdown-timeout
    process.join(20)
    return process.exitcode != 0, process.exitcode


@probe("shutdown.skip_pythons_end")
def end_of_an_engine(folder):
    """An engine's process takes down all of Python's modules when it ends."""
    from vllm.v1.engine import core

    found = getsource(core.EngineCoreProc.run_engine_core)
    return "engine_core.shutdown()" in found and "_exit" not in found, found


@probe("shutdown.leave_ctrl_c_to_the_parent")
def ctrl_c(folder):
    """An engine's process ends when a terminal sends it Ctrl-C, whatever its parent makes of it."""
    from vllm.v1.engine import core

    seen = []

    class Engine(core.EngineCoreProc):
        shutdown_state = None

        def __init__(self, *_, **__):
            pass

        def _handle_shutdown(self):
            os.kill(os.getpid(), signal.SIGINT)
            seen.append(self.shutdown_state)
            return False

        def shutdown(self):
            pass

    process, config = multiprocessing.current_process(), folder_config(folder)
    run, kept = core.EngineCoreProc.run_engine_core, (core.EngineCoreProc, process.name)
    core.EngineCoreProc, process.name = Engine, "EngineCore"
    try:
        with suppress(SystemExit):
            run(vllm_config=config)
    finally:
        core.EngineCoreProc, process.name = kept
    return seen == [core.EngineShutdownState.REQUESTED], str(seen)


@probe("engine_wake.let_connectors_wake", at_once=False)
def idle_engine(folder):
    """An idle engine waits for its front end; no connector can have it look for other work."""
    import queue

    from vllm.v1.engine import core

    told = []

    class Engine(core.EngineCoreProc):
        scheduler = SimpleNamespace(connector=SimpleNamespace(wake_by=told.append))
        input_queue = queue.Queue()

        def __init__(self):
            pass

        def _handle_shutdown(self):
            return False

    with suppress(SystemExit):
        Engine().run_busy_loop()
    return not told, f"the connector was told {len(told)} times"


@probe("shutdown.tell_a_stop_from_a_failure")
def stop(folder):
    """A server logs the end of an engine that it stopped itself, with a traceback."""
    import asyncio
    import weakref

    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    class Resources:
        engine_dead, engine_manager = False, None

        def __call__(self):
            self.engine_dead = True

    client = object.__new__(AsyncMPClient)
    client.resources = Resources()
    client._finalizer = weakref.finalize(client, print)
    client.shutdown()

    async def get_output_async():
        raise client._format_exception(EngineDeadError())

    server = object.__new__(AsyncLLM)
    passed_on = []
    server.output_handler = server.logger_manager = None
    server.engine_core = SimpleNamespace(
        get_output_async=get_output_async, shutdown=lambda timeout: None
    )
    server.output_processor = SimpleNamespace(propagate_error=passed_on.append)
    server.log_stats = False
    server.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=print)

    async def serve():
        server._run_output_handler()
        await server.output_handler

    before = len(MESSAGES)
    asyncio.run(serve())
    server.output_handler = None  # or its own end would cancel it
    logged = [text for text in MESSAGES[before:] if "output_handler failed" in text]
    return bool(logged) and len(passed_on) == 1, logged


@probe("speculation.allow_lookup_methods")
def lookup_methods(folder):
    """vLLM does not plan ahead with `ngram`, and refuses `suffix` without arctic-inference."""
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    ahead = arguments(folder, speculative_config=ngram, async_scheduling=True)
    suffix = arguments(folder, speculative_config={"method": "suffix"})
    found = [raised(ahead.create_engine_config), raised(suffix.create_engine_config)]
    return "sync scheduling" in found[0] and "Arctic" in found[1], found


@probe("speculation.schedule_ahead_with_ngram", at_once=False)
def engine_s_check(folder):
    """The engine's process refuses to schedule ahead with `ngram`, whatever its parent allowed."""
    drafts = {"method": "ngram_gpu", "num_speculative_tokens": 2}
    config = arguments(
        folder, speculative_config=drafts, async_scheduling=True
    ).create_engine_config()
    config.speculative_config.method = "ngram"
    found = raised(config.__post_init__)
    return "sync scheduling" in found, found


@probe("shutdown.forget_tokenizers", at_once=False)
def tokenizer(folder):
    """A function that vLLM remembers keeps the copies of a tokenizer alive."""
    import gc

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.renderers.hf import resolve_chat_template_kwargs
    from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool
    from vllm.utils import func_utils

    class Ours(PreTrainedTokenizerFast):
        pass

    def count():
        gc.collect()
        return sum(isinstance(thing, Ours) for thing in gc.get_objects())

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    pooled = get_cached_tokenizer(Ours(tokenizer_object=words))
    maybe_make_thread_pool(pooled)
    resolve_chat_template_kwargs(pooled, "{{ messages }}", {"thinking": True})
    del pooled
    kept = count()
    func_utils._supports_kw.cache_clear()
    return kept > 0 and count() == 0, f"{kept}, {count()} after the cache is emptied"


@probe("shutdown.answer_for_torch_accelerator")
def accelerator(folder):
    """vLLM's clean-up empties torch's accelerator caches, which fails without an accelerator."""
    import torch
    from vllm.distributed import parallel_state

    alone = raised(torch.accelerator.empty_cache)
    asked = []
    torch.accelerator.empty_cache = lambda: asked.append("empty_cache")
    torch.accelerator.empty_host_cache = lambda: asked.append("empty_host_cache")
    parallel_state.cleanup_dist_env_and_memory()
    # With an accelerator, a Mac's, it does not raise but ends the process: not to be tried.
    return len(asked) == 2 and (bool(alone) or sys.platform == "darwin"), [alone, asked]


def folder_config(folder: str) -> Any:
    return arguments(folder).create_engine_config()


def inert(name: str) -> ModuleType:
    """A module whose every function does nothing."""

    class Inert(ModuleType):
        def __getattr__(self, function: str) -> Any:
            if function.startswith("__"):
                raise AttributeError(function)
            return lambda *_, **__: None

    return Inert(name)


def listen(record: logging.LogRecord) -> bool:
    """Keeps a message; a filter, since vLLM takes handlers away whenever it sets its loggers up."""
    MESSAGES.append(record.getMessage())
    return True


def main(folder: str, names: list[str]) -> None:
    if "--applied" in names:
        folder_config(folder)  # as in each process that runs an engine, its worker elsewhere
    else:
        for module in {change.partition(".")[0] for change in PROBES} - _IMPORTED:
            name = f"vllm_metal.vllm_patches.{module}"
            sys.modules[name] = inert(name)
    for logger in (
        "torch._library.triton",
        "vllm.config.vllm",
        "vllm.renderers.chat_utils",
        "vllm.v1.engine.async_llm",
    ):
        logging.getLogger(logger).addFilter(listen)
    found = {}
    for name in names:
        if name == "--applied":
            continue
        try:
            needed, told = PROBES[name].run(folder)
        except Exception as error:
            needed, told = False, f"the probe does not fit any more: {error!r}"
        found[name] = {"needed": needed, "found": str(told)}
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # doubles of vLLM's objects are not to be torn down
