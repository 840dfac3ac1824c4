# SPDX-License-Identifier: Apache-2.0
"""The plugin's own settings: the keys of --additional-config, read here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Keys under which vLLM passes on options of its own, for attention that this plugin does not
#: serve: --gdn-prefill-backend, --kda-prefill-backend, --kda-decode-backend.
VLLM_KEYS = ("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend")


@dataclass(frozen=True)
class AdditionalConfig:
    """A field for each key, all of them true or false, under the names users give."""

    #: Always draft num_speculative_tokens tokens, whatever verifying them costs.
    fixed_draft_length: bool = False

    @staticmethod
    def of(vllm_config: VllmConfig) -> AdditionalConfig:
        """What the user gave, defaults elsewhere.

        Raises:
            ValueError: it is no JSON object, has a key that nobody reads, or a value of another
                type than the key's.
        """
        given = vllm_config.additional_config
        if given is None:
            return AdditionalConfig()
        if not isinstance(given, dict):
            raise ValueError(
                f"--additional-config must be a JSON object with keys of {_known()}, not a "
                f"{type(given).__name__}"
            )
        values = {key: value for key, value in given.items() if key not in VLLM_KEYS}
        for key, value in values.items():
            if key not in _names():
                close = get_close_matches(str(key), _names(), n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"--additional-config has no key {key!r} (known: {_known()}){meant}"
                )
            if not isinstance(value, bool):
                raise ValueError(
                    f"--additional-config {key!r} must be true or false, not {value!r}"
                )
        return AdditionalConfig(**values)


def _names() -> list[str]:
    return [field.name for field in fields(AdditionalConfig)]


def _known() -> str:
    return ", ".join(map(repr, _names()))
