# SPDX-License-Identifier: Apache-2.0
"""Reads a model's configuration and the headers of its weight files, from a folder or the hub.

Only configuration and headers are downloaded from the hub. The weight files in the temporary folder
have the published headers and sizes but no data; mlx-lm builds the model without reading weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_metal.cli.fit import images
from vllm_metal.engine.weights import folders
from vllm_metal.engine.weights.files import check_weight_files
from vllm_metal.identity.model_files import PATTERNS, ModelLoadError

#: Files besides config.json that mlx-lm looks for when it builds a model.
_OTHERS = (
    *("generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"),
    *images.FILES,
)


@contextmanager
def folder(model: str) -> Iterator[Path]:
    """Yields a folder that `model` can be built from.

    `model` is a folder, a GGUF file, or a hub name: then the Hugging Face cache if it has all
    weights, else the published headers. Raises ModelLoadError if there is no such model, the hub is
    unreachable, or the GGUF file is not supported.
    """
    path = Path(folders.checked_folder_of(model)).expanduser()
    if path.is_dir():
        yield path
    elif (cached := _cached(model)) is not None:
        yield cached
    else:
        with TemporaryDirectory(prefix="vllm-metal-fit-") as scratch:
            _fetch(model, Path(scratch))
            yield Path(scratch)


def _cached(model: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            model, local_files_only=True, allow_patterns=["config.json", *PATTERNS]
        )
        check_weight_files(Path(path))
    except (HFValidationError, LocalEntryNotFoundError, ModelLoadError):
        return None
    return Path(path) if (Path(path) / "config.json").is_file() else None


def _fetch(model: str, out: Path) -> None:
    import httpx
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        shutil.copy(hf_hub_download(model, "config.json"), out)
        for name in _OTHERS:
            try:
                shutil.copy(hf_hub_download(model, name), out)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue
        for name, header in get_safetensors_metadata(model).files_metadata.items():
            tensors = {
                tensor: (info.dtype, info.shape, info.data_offsets[1] - info.data_offsets[0])
                for tensor, info in header.tensors.items()
            }
            write_stub(out / name, tensors)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise ModelLoadError(f"{model} has no safetensors files to read: {error}") from error
    except (LocalEntryNotFoundError, httpx.TransportError, ConnectionError) as error:
        raise ModelLoadError(
            f"there is no folder {model!r}, and Hugging Face cannot be reached: without a "
            f"network, give the folder of a local model ({_first_line(error)})"
        ) from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise ModelLoadError(
            f"there is no folder {model!r}, and Hugging Face does not provide this model: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def write_stub(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> None:
    """Writes a sparse safetensors file: a header, and a hole instead of the tensors.

    `tensors` maps names to dtype (named as in safetensors), shape and bytes.
    """
    header, end = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        offsets = [end, end := end + nbytes]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
