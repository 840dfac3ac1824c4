# SPDX-License-Identifier: Apache-2.0
"""When a server's prompts are watched."""

from types import SimpleNamespace

from vllm_metal.serving.prefix_misses import start
from vllm_metal.serving.prefix_misses.header import MissHeader


class Renderer:
    """Like vLLM's renderer with --skip-tokenizer-init."""

    tokenizer = None

    def get_tokenizer(self):
        raise ValueError("Tokenizer not available when `skip_tokenizer_init=True`")


def test_a_server_without_a_tokenizer_starts(monkeypatch):
    texts = []
    monkeypatch.setattr(start, "Watch", lambda text, *others: texts.append(text))
    monkeypatch.setattr(start.prompts, "watch", lambda engine, watch: None)
    config = SimpleNamespace(
        additional_config={},
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=16),
        model_config=SimpleNamespace(is_hybrid=False),
    )
    engine = SimpleNamespace(vllm_config=config, renderer=Renderer())
    assert isinstance(start.around(None, SimpleNamespace(engine_client=engine)), MissHeader)
    assert texts[0]([5, 7]) == "5 7"
