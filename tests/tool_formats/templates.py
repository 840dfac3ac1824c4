# SPDX-License-Identifier: Apache-2.0
"""Chat templates as published, from source archives on PyPI.

llama-cpp-python has llama.cpp's collection, vLLM the recommended ones for its
parsers. None of them is in this repository: most have licenses of their own.
"""

from __future__ import annotations

from pathlib import Path

from upstream import archive

_LLAMA_CPP = "vendor/llama.cpp/models/templates/"
_VLLM = "examples/tool_chat_template_"


def template(name: str) -> str:
    """Returns a template by name: llama.cpp's file, or vLLM's after "vllm:".

    Raises:
        archive.UnavailableError: pip cannot download the archive.
    """
    if name.startswith("vllm:"):
        folder = archive.part("vllm", archive.VERSION, archive.SHA256, (_VLLM,))
        return _read(folder / f"{_VLLM}{name.removeprefix('vllm:')}.jinja")
    folder = archive.part(
        "llama-cpp-python",
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        (_LLAMA_CPP,),
        "scikit_build_core",
    )
    return _read(folder / _LLAMA_CPP / f"{name}.jinja")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
