# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's vocabulary from a wheel, instead of openai_harmony's download; and vLLM's parser."""

from __future__ import annotations

from pathlib import Path

from tool_formats.turns import Reader
from upstream import archive
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser import ParserManager

from vllm_metal.serving.parsers.choice import Choice

#: Variable that names the folder in which openai_harmony looks for this file.
VARIABLE, FILE = "TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken"
_KEPT = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"


def vocabulary(folder: Path) -> None:
    """Extracts the vocabulary file into a folder, from the wheel of litellm, which counts tokens.

    Raises:
        archive.UnavailableError: pip cannot download the wheel.
    """
    sha256 = "9efa1cbe61ac051f6500c267b173d988ff2d511c2eecf1c8f2ee546c0870747c"
    (folder / FILE).symlink_to(archive.of_wheel("litellm", "1.81.10", sha256, _KEPT))


class HarmonyReader(Reader):
    """vLLM's parser of gpt-oss, created and called as in its chat endpoint."""

    def __init__(self, choice: Choice) -> None:
        """Takes the choice; `VARIABLE` names a folder with the vocabulary."""
        super().__init__(choice, ())
        self._class = ParserManager.get_parser(
            tool_parser_name=choice.tool and choice.tool.parser,
            reasoning_parser_name=choice.reasoning and choice.reasoning.parser,
            enable_auto_tools=choice.tool is not None,
            is_harmony=True,
        )

    def units(self, text: str) -> list[tuple[str, list[int]]]:
        """Returns the text's tokens; those of one character form one unit."""
        encoding = get_encoding()
        units, part = [], []
        for token in encoding.encode(text, allowed_special="all"):
            part.append(token)
            try:
                units.append((encoding.decode_utf8(part), part))
            except ValueError:  # in the middle of a character
                continue
            part = []
        return units
