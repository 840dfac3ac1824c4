# SPDX-License-Identifier: Apache-2.0
"""The same prompt with parts turned off, by processes that answer as engines do."""

from commands.doctor.conftest import ended, ignore

from vllm_metal.commands.doctor import variants
from vllm_metal.commands.doctor.model import Model

SOME = Model("some", "/nowhere", local=True)
ANSWER = "say(prompt=[1], tokens={tokens}, text='{text}', answer_seconds=0.25)\n"
SETTINGS = {
    "VLLM_METAL_KERNELS=mlx",
    "MLX_DISABLE_COMPILE=1",
    "MLX_MAX_MB_PER_BUFFER=1048576",
}


def usual(tokens: list[int]):
    return ended(tokens=tokens, text="usual", answer_seconds=0.5)


def test_each_runs_with_its_variable_and_the_same_text_is_well(script, monkeypatch):
    # Each says which of the three it has: one, and with its value.
    names = [setting.partition("=")[0] for setting in sorted(SETTINGS)]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    text = "import os\n" + ANSWER.format(tokens="[1]", text="t")
    text += f"say(has=[n + '=' + os.environ[n] for n in {names} if n in os.environ])\n"
    tried = variants.try_all(SOME, ignore, script(text))
    assert set(tried) == SETTINGS
    assert all(ended.told["has"] == [setting] for setting, ended in tried.items())
    found = variants.check(usual([1]), tried)
    assert found.status == "ok"
    assert "as usual: 0.50 s" in found.seen and "MLX_DISABLE_COMPILE=1: 0.25 s" in found.seen


def test_another_text_and_a_crash_are_named(script):
    tried = variants.try_all(SOME, ignore, script(ANSWER.format(tokens="[2]", text="other")))
    tried["MLX_DISABLE_COMPILE=1"] = ended(-6, ("abort",), stage="answering")
    found = variants.check(usual([1]), tried)
    assert found.status == "warning" and found.advice
    assert "VLLM_METAL_KERNELS=mlx: 0.25 s, other text: 'other'" in found.seen
    assert "MLX_DISABLE_COMPILE=1: ended by signal 6 (SIGABRT) while answering" in found.seen
    assert found.log == ("MLX_DISABLE_COMPILE=1: abort",)
