# SPDX-License-Identifier: Apache-2.0
"""The fingerprint covers everything that affects a response besides the request."""

import asyncio
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from vllm_metal.identity import facts
from vllm_metal.patches.vllm_patches import media_loading
from vllm_metal.serving.response_cache import rendering
from vllm_metal.serving.response_cache.key import Rendered


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The relevant state of vLLM's application, for a model folder."""
    monkeypatch.setattr(
        rendering.weights_digest, "of_networks", lambda config, memo: {"target": "0123"}
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "parser.py").write_text("one = 1")
    (tmp_path / "processor.py").write_text("class Same: pass")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("processor", None)
    model = SimpleNamespace(
        model=str(folder),
        tokenizer=str(folder),
        revision=None,
        get_diff_sampling_param=lambda: {"temperature": 0.5},
    )
    load = SimpleNamespace(download_dir=None)
    config = SimpleNamespace(model_config=model, load_config=load)
    yield SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=config),
        args=Namespace(
            max_model_len=64,
            port=8000,
            tool_call_parser="hermes",
            tool_parser_plugin=str(tmp_path / "parser.py"),
            logits_processors=["processor:Same"],
        ),
        online_renderer=SimpleNamespace(chat_template="{{ messages }}"),
    )
    sys.modules.pop("processor", None)


def other_version(monkeypatch, package):
    versions = facts.versions
    monkeypatch.setattr(facts, "versions", lambda *names: versions(*names) | {package: "0"})


CHANGES = {
    "sources": lambda s, tmp, patch: patch.setattr(facts, "sources", lambda _: "0" * 32),
    "transformers": lambda s, tmp, patch: other_version(patch, "transformers"),
    "tokenizers": lambda s, tmp, patch: other_version(patch, "tokenizers"),
    "xgrammar": lambda s, tmp, patch: other_version(patch, "xgrammar"),
    "mlx": lambda s, tmp, patch: other_version(patch, "mlx"),
    "vllm": lambda s, tmp, patch: patch.setattr(rendering.vllm, "__version__", "0"),
    "a file": lambda s, tmp, patch: (tmp / "model" / "tokenizer.json").write_text("{}"),
    "a parser": lambda s, tmp, patch: setattr(s.args, "tool_call_parser", "mistral"),
    "a parser's code": lambda s, tmp, patch: (tmp / "parser.py").write_text("one = 2"),
    "a processor's code": lambda s, tmp, patch: (tmp / "processor.py").write_text("class Same: a"),
    "the template": lambda s, tmp, patch: setattr(s.online_renderer, "chat_template", ""),
    "the device": lambda s, tmp, patch: patch.setenv("VLLM_METAL_DEVICE", "metal"),
    "weights": lambda s, tmp, patch: patch.setattr(
        rendering.weights_digest, "of_networks", lambda config, memo: {"target": "0124"}
    ),
    "defaults of sampling": lambda s, tmp, patch: setattr(
        s.engine_client.vllm_config.model_config, "get_diff_sampling_param", dict
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_counts(state, tmp_path, monkeypatch, name):
    before = rendering.fingerprint(state, None)
    assert len(before) == 32 and before == rendering.fingerprint(state, None)
    CHANGES[name](state, tmp_path, monkeypatch)
    sys.modules.pop("processor", None)
    assert rendering.fingerprint(state, None) != before


def test_where_a_server_listens_does_not_count(state):
    before = rendering.fingerprint(state, None)
    state.args.port = 9000
    assert rendering.fingerprint(state, None) == before


def test_images_that_a_key_needs_are_counted_apart():
    """The answer reads them again, so the cache does not lower a request's limit."""
    memory = media_loading.MEMORY
    fields = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

    async def prompt(request):
        memory.charge(memory.per_request, 0)
        return SimpleNamespace(token_ids=[1], features=None)

    models = SimpleNamespace(lora_requests={})
    served = SimpleNamespace(
        serving_render=SimpleNamespace(render_chat_request=prompt, models=models)
    )

    async def answer():
        with memory.request():
            found = await rendering.renderer(served)("chat", fields)
            memory.charge(memory.per_request, 0)
        return found

    assert asyncio.run(answer()) == [Rendered([1], {})]
