# SPDX-License-Identifier: Apache-2.0
"""A vLLM scheduler that records the engine's outputs, for `--scheduler-cls`."""

import os
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

#: Variable with the file's path. Each line has a salt, prompt tokens and answer tokens.
FILE = "E2E_RECORDED_TOKENS"


class RecordingScheduler(AsyncScheduler):
    """Writes a line per output into a file that stays open while the engine runs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._salts = {}
        self._recorded = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115

    def add_request(self, request):
        self._salts[request.request_id] = request.cache_salt
        super().add_request(request)

    def update_from_output(self, scheduled, output):
        made = super().update_from_output(scheduled, output)
        lines = []
        for outputs in made.values():
            for one in outputs.outputs:
                prompt = one.prefill_stats.num_prompt_tokens if one.prefill_stats else 0
                lines.append(f"{self._salts[one.request_id]} {prompt} {len(one.new_token_ids)}\n")
        self._recorded.write("".join(lines))
        return made


def read(file: Path) -> dict[str, tuple[int, int]]:
    """Returns (prompt tokens, answer tokens) by salt."""
    found: dict[str, tuple[int, int]] = {}
    for line in file.read_text().splitlines():
        salt, *numbers = line.split(" ")
        prompt, answer = map(int, numbers)
        before = found.get(salt, (0, 0))
        found[salt] = before[0] + prompt, before[1] + answer
    return found
