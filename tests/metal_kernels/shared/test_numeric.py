# SPDX-License-Identifier: Apache-2.0
"""All quantized values, against torch's conversions."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch

from metal_kernels import kernel

HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]

ENCODE = """// ---- kernel body
const uint i = thread_position_in_grid.x;
codes[i] = encode_element<C>(decode_element(values[i]));
"""
DECODE = """// ---- kernel body
const uint i = thread_position_in_grid.x;
values[i] = decode_element(codes[i]);
"""


def run(tmp_path, body, names, given, dtype):
    (tmp_path / "numeric_test.metal").write_text(body)
    loaded = kernel.load(
        tmp_path / "numeric_test.metal", names[:1], names[1:], shared=("numeric.metal",)
    )
    with kernel.using(metal_interpreter.metal_kernel):
        (out,) = loaded(
            inputs=[given],
            template=[("C", dtype)],
            grid=(given.size, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[given.shape],
            output_dtypes=[dtype],
        )
    return np.array(out.view(mx.uint16) if dtype.size == 2 else out)


def encode(tmp_path, values, dtype):
    return run(tmp_path, ENCODE, ("values", "codes"), mx.array(values), dtype)


def decode(tmp_path, codes):
    return run(tmp_path, DECODE, ("codes", "values"), mx.array(codes), mx.float32)


def fp8(values):
    return torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)


def test_fp8_codes_of_all_finite_halves(tmp_path):
    wanted = fp8(FINITE).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode(tmp_path, FINITE, mx.uint8), wanted)


def test_fp8_codes_around_the_middle_between_two_codes(tmp_path):
    """Half way rounds to even; the next floats on either side do not."""
    codes = np.arange(0x7F, dtype=np.uint8)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate([halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 999)])
    values = np.concatenate([values, -values]).astype(np.float32)
    wanted = fp8(values).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode(tmp_path, values, mx.uint8), wanted)


def test_fp8_saturates(tmp_path):
    values = np.array([448.1, 464, 480, 3e38, np.inf, -449, -np.inf, 448], np.float32)
    wanted = [0x7E] * 5 + [0xFE] * 2 + [0x7E]
    np.testing.assert_array_equal(encode(tmp_path, values, mx.uint8), wanted)


def test_fp8_numbers_of_all_codes_but_nan(tmp_path):
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    found = decode(tmp_path, codes)
    assert np.flatnonzero(np.isnan(wanted)).tolist() == [0x7F, 0xFF]
    np.testing.assert_array_equal(found[~np.isnan(wanted)], wanted[~np.isnan(wanted)])
    assert np.signbit(found[0x80]) and not np.signbit(found[0])


def test_int8_codes_of_all_finite_halves(tmp_path):
    wanted = np.clip(np.rint(FINITE.astype(np.float32)), -127, 127)
    found = encode(tmp_path, FINITE, mx.int8)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(decode(tmp_path, found), wanted)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_short_floats_come_back(tmp_path, dtype):
    bits = mx.array(np.arange(2**16, dtype=np.uint16)).view(dtype)
    bits = bits[mx.array(np.flatnonzero(np.isfinite(np.array(bits.astype(mx.float32)))))]
    found = run(tmp_path, ENCODE, ("values", "codes"), bits, dtype)
    np.testing.assert_array_equal(found, np.array(bits.view(mx.uint16)))
