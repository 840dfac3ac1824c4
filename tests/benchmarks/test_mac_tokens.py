# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/mac_tokens.py reckons: by hand, beside other formulas, and on the page."""

import mac_tokens
import pytest
from _macs import BY_NAME, GB
from _published import DEEPSEEK_V3, GEMMA_27B, GPT_OSS_20B, QWEN3, QWEN_27B, QWEN_35B, QWEN_80B
from hybrid_bytes import CONTEXT as HYBRIDS_CONTEXT
from hybrid_bytes import QWEN_27B as SHAPE_27B
from hybrid_bytes import QWEN_35B as SHAPE_35B
from hybrid_bytes import WEIGHT_BYTES, moved
from mac_attention import LATENT, PAGE, Kind
from mac_tokens import Read, Served, served

QWEN_8B = QWEN3["8B"]


def test_a_dense_model_by_hand() -> None:
    hidden, layers, width, vocabulary = 4096, 36, 12288, 151936
    attention = hidden * (4096 + 1024 + 1024 + 4096)
    matrices = layers * (attention + 3 * hidden * width) + hidden * vocabulary
    for bits, each in ((4, 4.5 / 8), (8, 8.5 / 8), (16, 2)):
        found = served(QWEN_8B, bits)
        assert found.read == pytest.approx(matrices * each, rel=1e-3)  # norms besides
        assert found.weights == pytest.approx((matrices + hidden * vocabulary) * each, rel=1e-3)
        assert found.kv(1000) == 1000 * 36 * 8 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("known", "shape"),
    [(QWEN_27B, SHAPE_27B), pytest.param(QWEN_35B, SHAPE_35B, marks=pytest.mark.more)],
)
def test_hybrids_beside_the_sums_of_hybrid_bytes(known, shape) -> None:
    found, expected = served(known, 4), moved(shape, drafts=0, one_call=True)
    assert found.states == shape.recurrent * shape.state_bytes
    kv = found.kv(HYBRIDS_CONTEXT)
    assert kv == HYBRIDS_CONTEXT * shape.attending * 2 * shape.kv_heads * shape.head_size * 2
    assert found.read + kv == pytest.approx(expected.recurrent + expected.others, rel=2e-3)


@pytest.mark.parametrize(
    ("known", "billions", "active"),
    [
        pytest.param(QWEN_80B, 80, 3.9, marks=pytest.mark.more),
        pytest.param(DEEPSEEK_V3, 671, 37, marks=pytest.mark.more),
        (GEMMA_27B, 27, 27),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_models_have_the_weights_that_their_cards_name(known, billions, active) -> None:
    found = served(known, 4)
    assert found.weights / WEIGHT_BYTES == pytest.approx(billions * 1e9, rel=0.02)
    assert found.read / WEIGHT_BYTES == pytest.approx(active * 1e9, rel=0.1)


def test_windows_bound_what_is_read() -> None:
    found = served(GPT_OSS_20B)
    row = 2 * 8 * 64 * 2
    assert found.kv(100) == 24 * 100 * row
    assert found.kv(10_000) == 12 * (128 + 10_000) * row
    assert found.weights == pytest.approx(12.1e9, rel=0.01)  # of mlx-community's folder


def test_latents_are_keys_and_values_in_one() -> None:
    assert served(DEEPSEEK_V3, 4).kv(10) == 10 * 61 * (512 + 64) * 2


def a_model(kind: Kind, key_bytes: int) -> Served:
    return Served("m", "4 bit", 2 * 10**9, 10**9, 10**8, {Read(key_bytes, None, kind): 10})


def test_a_step_takes_its_bytes_over_the_bandwidth() -> None:
    chip, model = BY_NAME["M4 Max"], a_model(Kind("128", 16), 4096)
    assert model.seconds(chip, 1000) == pytest.approx((1.2e9 + 1000 * 10 * 4096) / 546e9)
    assert model.rate(chip, 1000) == "440"


def test_where_arithmetic_binds_keys_take_longer() -> None:
    chip, kind = BY_NAME["M4 Max"], Kind(LATENT, 16, 128)
    slower = kind.needed.slow / chip.slots(1152)
    assert slower > 10
    seconds = a_model(kind, 1152).seconds(chip, 1000)
    assert seconds == pytest.approx((1.2e9 + slower * 1000 * 10 * 1152) / (546 * GB))


def test_what_does_not_fit_has_no_rate() -> None:
    model = a_model(Kind("128", 16), 4096)  # 40,960 bytes a token, 2.1 GB at rest
    fits = int((16 * 2**30 * 2 / 3 - 2.1e9) / 40_960)
    assert model.rate(BY_NAME["M1"], fits - 1) != "–"
    assert model.rate(BY_NAME["M1"], fits + 1) == "–"


@pytest.mark.more
def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    tables = (mac_tokens.rates_table(), mac_tokens.bytes_table(), mac_tokens.check_table())
    for expected in tables:
        assert expected in page, "run python benchmarks/mac_tokens.py --write"
