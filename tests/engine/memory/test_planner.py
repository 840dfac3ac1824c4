# SPDX-License-Identifier: Apache-2.0
"""Whether a model fits on a Mac where other programs run: the figures are a Mac's, nothing is
loaded. `tests/e2e/test_memory.py` has engines on this machine."""

import gc
import json
import re
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest
from mac import BUSY, FULL, IDLE, PAGE, Mac
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.device import mlx_device
from vllm_metal.engine.attention.layers import AttentionLayer
from vllm_metal.engine.kv_cache.specs import kv_cache_specs
from vllm_metal.engine.memory.advice import BudgetError
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.memory.planner import AdapterBytes, MemoryPlanner, peak_of
from vllm_metal.engine.memory.profile import LargestCalls

GIB = 2**30
#: Llama-3.1-8B's.
LAYERS = [AttentionLayer(f"layers.{index}", 32, 8, 128, None) for index in range(32)]
VOCAB, CONTEXT = 128_256, 131_072
KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
WEIGHTS = 4_500_000_000  # in 4 bits


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@dataclass
class Gpu:
    """Fakes MLX's memory values for steps of known cost."""

    active: int = 0
    peak: int = 0

    def take_over(self, monkeypatch):
        monkeypatch.setattr(mx, "get_active_memory", lambda: self.active)
        monkeypatch.setattr(mx, "get_peak_memory", lambda: self.peak)
        monkeypatch.setattr(mx, "reset_peak_memory", lambda: setattr(self, "peak", self.active))

    def work(self):
        """The largest calls of a step, its forward, and few requests."""

        def run(nbytes):
            self.peak = self.active + nbytes

        # Of 2048 rows: an MLP's three activations and six of the hidden size, in 16 bits.
        step = 2048 * (3 * 14336 + 6 * 4096) * 2
        sampling = VOCAB * 4 * 4  # of a row, in float32
        beside = LargestCalls(None, lambda rows: run(rows * sampling), VOCAB, 256, 2)
        return beside, lambda: run(step), None  # no layer keeps states


@pytest.fixture
def serve(model, monkeypatch):
    """Returns the bytes of the KV pool on `mac`, measured with the model loaded."""

    def serve(mac, loaded=None, weights=WEIGHTS, **options):
        names = ("transfer_bytes", "adapters", "image_bytes")
        beside = {name: options.pop(name) for name in names if name in options}
        args = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_batched_tokens=2048,
            max_num_seqs=256,
            **options,
        )
        config, gpu = args.create_engine_config(), Gpu()
        config.cache_config.kv_cache_layout = "LBNHC"  # the worker's word on it
        specs = kv_cache_specs(LAYERS, 16, mx.bfloat16)
        with monkeypatch.context() as patches:
            gpu.take_over(patches)
            mac.take_over(patches)
            memory = MemoryPlanner("metal")
            (loaded or mac).take_over(patches)
            gpu.active = weights
            try:
                return memory.pool_size(
                    config, Needs.of(config, specs), 0, None, *gpu.work(), **beside
                )
            finally:
                memory.release()

    return serve


def test_a_busy_mac_serves_8b_in_4_bits(serve):
    """psutil's figure leaves no room for a step beside the weights."""
    assert BUSY.psutil_available - WEIGHTS < 0.5 * GIB
    pool = serve(BUSY, max_model_len=4096)
    assert 4096 * KV_BYTES_PER_TOKEN <= pool < GIB


def test_what_the_model_itself_takes_does_not_count_against_it(serve):
    """Its pages replace file pages, which macOS frees, and halves of compressed pages."""
    pages = -(-WEIGHTS // PAGE)
    from_files = BUSY.files - 20_000
    compressed = 2 * (pages - from_files)
    files, others = BUSY.files - from_files, BUSY.anonymous - compressed
    pageable = Mac(free=2000, speculative=0, files=files, anonymous=others + pages)
    wired = Mac(free=2000, speculative=0, files=files, anonymous=others)
    pools = {serve(BUSY, loaded, max_model_len=4096) for loaded in (BUSY, pageable, wired)}
    assert len(pools) == 1


def test_an_idle_mac_gives_what_metal_recommends(serve):
    pool = serve(IDLE, max_model_len=16_384, gpu_memory_utilization=0.9)
    assert pool > 0.9 * IDLE.ram * IDLE.gpu_share - WEIGHTS - GIB


def test_adapters_take_their_slots_and_what_is_kept_beside_them(serve):
    """Slots are in memory with the weights when the pool is sized."""
    settings = {"max_model_len": 16_384, "gpu_memory_utilization": 0.9}
    slots, kept = GIB // 4, GIB // 8
    without = serve(IDLE, **settings)
    found = serve(IDLE, weights=WEIGHTS + slots, adapters=AdapterBytes(slots, kept), **settings)
    assert without - found == slots + kept


def test_a_quarter_of_it_will_do_unless_a_request_or_its_user_wants_more(serve):
    quarter = int(IDLE.ram * IDLE.gpu_share) // 4
    assert serve(IDLE, max_model_len=4096) == quarter
    longest = (16_384 + 16) * KV_BYTES_PER_TOKEN  # and the block that vLLM keeps for itself
    assert serve(IDLE, max_model_len=16_384) == quarter > longest
    longest = (24_576 + 16) * KV_BYTES_PER_TOKEN
    assert serve(IDLE, max_model_len=24_576) == longest > quarter


def test_a_context_that_nobody_asked_for_is_what_fits(serve):
    """131,072 tokens take 16 GiB."""
    left = serve(IDLE, gpu_memory_utilization=0.9)
    assert 1024 * KV_BYTES_PER_TOKEN < left < CONTEXT * KV_BYTES_PER_TOKEN
    less = float(re.search(r"weights take ([\d.]+) GiB less", refusal(serve, FULL))[1])
    weights = WEIGHTS - int(less * GIB) + 512 * KV_BYTES_PER_TOKEN  # so many tokens are missing
    assert "1024 tokens, the smallest context that is chosen automatically" in refusal(
        serve, FULL, weights=weights
    )


def test_a_fitted_context_takes_a_quarter_and_on_a_small_mac_at_most_a_half(serve):
    """131,072 tokens take 16 GiB; 16,384 take 2 of the 2.67 in a quarter of 16 GB."""

    def mac(gigabytes, share):
        return replace(IDLE, ram=gigabytes * GIB, gpu_share=share, free=gigabytes * 55_000)

    for gigabytes, share in ((16, 2 / 3), (16, 0.8), (24, 2 / 3), (64, 3 / 4)):
        quarter = int(gigabytes * GIB * share) // 4
        assert serve(mac(gigabytes, share)) == min(quarter, CONTEXT * KV_BYTES_PER_TOKEN)
    assert serve(mac(256, 3 / 4)) == 32 * GIB
    useful = (16_384 + 16) * KV_BYTES_PER_TOKEN  # and the block that vLLM keeps for itself
    assert serve(mac(8, 2 / 3), weights=GIB // 2) == useful > 8 * GIB * 2 // 3 // 4
    half = 4 * GIB * 2 // 3 // 2
    assert serve(mac(4, 2 / 3), weights=GIB // 8) <= half < useful


def test_memory_that_others_have_taken_meanwhile_is_not_taken_again(monkeypatch):
    """The Mac is idle when the engine goes to sleep and full when it wakes up."""
    gpu = Gpu(active=WEIGHTS)
    gpu.take_over(monkeypatch)
    IDLE.take_over(monkeypatch)
    memory = MemoryPlanner("metal")
    try:
        memory.check_room(4 * GIB)
        FULL.take_over(monkeypatch)
        with pytest.raises(
            RuntimeError, match=r"takes 4\.00 GiB, but only .* are free.* try again"
        ):
            memory.check_room(4 * GIB)
    finally:
        memory.release()


def test_staging_of_transfers_is_taken_off_the_pool(serve):
    options = {"max_model_len": 4096, "gpu_memory_utilization": 0.9}
    pools = [serve(IDLE, transfer_bytes=nbytes, **options) for nbytes in (0, GIB // 8)]
    assert pools[0] - pools[1] == GIB // 8


def test_staging_may_leave_too_little_for_a_pool_that_is_asked_for(serve):
    options = {"max_model_len": 4096, "kv_cache_memory_bytes": GIB}
    assert serve(IDLE, **options) == GIB
    message = refusal(serve, IDLE, transfer_bytes=10 * GIB, **options)
    assert "no memory is left for steps" in message and "- staging of K/V transfers" in message


def refusal(serve, *args, **options):
    with pytest.raises(BudgetError) as raised:
        serve(*args, **options)
    return str(raised.value)


def test_a_full_mac_refuses_and_says_what_to_close(serve):
    message = refusal(serve, FULL, max_model_len=4096)
    assert "- in use by others, beyond that" in message
    assert "\n  * close other programs: they hold" in message


def test_a_long_context_on_a_full_mac_needs_both(serve):
    message = refusal(serve, FULL, max_model_len=CONTEXT)
    assert "\n  * close other programs that hold" in message
    assert ", and --max-model-len " in message


def test_a_model_too_large_for_a_full_mac_names_the_programs_too(serve):
    message = refusal(serve, FULL, weights=12 * GIB, max_model_len=CONTEXT)
    assert "No single setting makes it fit: close other programs, which hold" in message
    assert message.endswith("use a smaller model, or more memory")


def test_images_that_leave_no_room_can_be_left_out(serve):
    message = refusal(serve, IDLE, max_model_len=4096, image_bytes=6 * GIB)
    assert "- images: embeddings" in message
    assert "\n  * --language-model-only" in message
    assert "--language-model-only" not in refusal(serve, IDLE, weights=12 * GIB)


@pytest.mark.parametrize(
    ("device", "release", "can"),
    [
        ("metal", "15.1", True),
        ("metal", "26.0", True),
        ("metal", "14.7", False),
        ("cpu", "26.0", False),
    ],
)
def test_memory_can_be_wired_on_a_gpu_from_macos_15_on(device, release, can, monkeypatch):
    monkeypatch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), "arm64"))
    assert mlx_device.can_wire(device) is can


def test_memory_that_python_collects_meanwhile_hides_nothing_of_a_peak():
    earlier = [mx.zeros((1 << 20,), mx.uint8)]
    earlier.append(earlier)  # held by itself alone, until Python's collector comes by
    mx.eval(earlier[0])
    del earlier
    youngest, older, _ = gc.get_threshold()

    def run():
        made = [[] for _ in range(20 * youngest * older)]
        mx.eval(mx.zeros((1 << 20,), mx.uint8) + 1)
        assert made

    assert peak_of(run) >= 1 << 20
    assert gc.isenabled()
