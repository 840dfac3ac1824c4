# SPDX-License-Identifier: Apache-2.0
"""Makes blocks.npz of test_blocks.py: `python make_blocks.py LLAMA_CPP`.

llama.cpp's own ggml-quants.c, compiled alone, quantizes weights with outliers to each type and
dequantizes them. Saves the blocks and the values. Needs gcc and a checkout of
https://github.com/ggml-org/llama.cpp.
"""

import ctypes
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

OUT = Path(__file__).parent / "blocks.npz"
ROWS, COLUMNS = 3, 512
#: Quantized types, except those only for activations, and one that gguf cannot dequantize.
KINDS = [
    kind
    for kind, (block, _) in GGML_QUANT_SIZES.items()
    if block > 1 and kind.name not in ("Q8_1", "Q8_K", "Q1_0")
]


def compiled(llama_cpp: Path, folder: Path) -> ctypes.CDLL:
    """Compiles ggml's block functions, with type sizes from gguf's table."""
    ggml = llama_cpp / "ggml"
    cases = "".join(
        f"case {kind.value}: return n / {block} * {size};\n"
        for kind, (block, size) in GGML_QUANT_SIZES.items()
    )
    (folder / "sizes.c").write_text(
        "#include <stddef.h>\n#include <stdlib.h>\n"
        f"size_t ggml_row_size(int type, long n) {{ switch (type) {{ {cases} }} abort(); }}\n"
        "size_t ggml_type_size(int type) { abort(); }\n"
        "const char * ggml_type_name(int type) { abort(); }\n"
        "void ggml_abort(const char * file, int line, const char * text, ...) { abort(); }\n"
    )
    library = folder / "ggml.so"
    includes = [f"-I{ggml / each}" for each in ("include", "src")]
    sources = [ggml / "src" / "ggml-quants.c", folder / "sizes.c"]
    command = ["gcc", "-O2", "-w", "-shared", "-fPIC", *includes, *sources, "-o", library, "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def weights() -> np.ndarray:
    """Makes [ROWS, COLUMNS] float32 with outliers, a group of zeros and a row of one sign."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) * 0.02
    outliers = rng.choice(values.size, 12, replace=False)
    values.reshape(-1)[outliers] *= 40
    values[0, 64:96] = 0
    values[2] = np.abs(values[2])
    return values


def quantized(ggml: ctypes.CDLL, kind: GGMLQuantizationType, values: np.ndarray) -> np.ndarray:
    """Quantizes to [ROWS, bytes per row] uint8."""
    block, size = GGML_QUANT_SIZES[kind]
    data = np.zeros((ROWS, COLUMNS // block * size), np.uint8)
    importance = np.abs(values).mean(0).astype(np.float32)
    function = getattr(ggml, f"quantize_{_stem(kind)}")
    function.restype = ctypes.c_size_t
    pointers = (_pointer(values), _pointer(data))
    written = function(
        *pointers, ctypes.c_int64(ROWS), ctypes.c_int64(COLUMNS), _pointer(importance)
    )
    assert written == data.nbytes
    return data


def dequantized(ggml: ctypes.CDLL, kind: GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
    """Dequantizes to [ROWS, COLUMNS] float32."""
    values = np.zeros((ROWS, COLUMNS), np.float32)
    function = getattr(ggml, f"dequantize_row_{_stem(kind)}")
    function(_pointer(data), _pointer(values), ctypes.c_int64(values.size))
    return values


def _stem(kind: GGMLQuantizationType) -> str:
    name = kind.name.lower()
    return f"{name[:-1]}K" if name.endswith("_k") else name


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def main() -> None:
    values = weights()
    kept: dict[str, np.ndarray] = {}
    with TemporaryDirectory() as folder:
        ggml = compiled(Path(sys.argv[1]), Path(folder))
        for kind in KINDS:
            if kind.name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"):
                ggml.iq2xs_init_impl(ctypes.c_int(kind.value))
            if kind.name in ("IQ3_XXS", "IQ3_S"):
                ggml.iq3xs_init_impl(ctypes.c_int(256 if kind.name == "IQ3_XXS" else 512))
            data = quantized(ggml, kind, values)
            kept[f"{kind.name}.blocks"] = data
            kept[f"{kind.name}.values"] = dequantized(ggml, kind, data)
            error = kept[f"{kind.name}.values"] - values
            print(kind.name, np.sqrt((error**2).mean() / (values**2).mean()))
    np.savez_compressed(OUT, **kept)


if __name__ == "__main__":
    main()
