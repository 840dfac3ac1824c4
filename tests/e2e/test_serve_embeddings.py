# SPDX-License-Identifier: Apache-2.0
"""Servers that embed and rerank: OpenAI's client, all routes, tenants, idle sleep, a benchmark."""

import base64
import json
import re
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from e2e.server import VLLM, serve
from e2e.tenants import write_settings
from engine.pooling import checkpoints
from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.more

OPTIONS = ("--served-model-name", "m", "--max-model-len", "512", "--max-num-batched-tokens", "128")
TEXTS = ["The river rises in the hills. " * 8, "and ends in the sea", "The river rises"]
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
TOKENS, SLEEPS = "vllm:tenant_tokens_total", "vllm:engine_sleep_state"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = checkpoints.qwen3(tmp_path_factory.mktemp("served") / "model")
    checkpoints.as_sentence_transformer(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(model, tmp_path_factory):
    """A server that sleeps after two seconds without a request."""
    more = ("--hf-overrides", json.dumps({"is_matryoshka": True}))
    more += ("--additional-config", json.dumps({"idle_sleep": 2.0}))
    more += ("--kv-cache-memory-bytes", str(16 << 20))
    with serve(model, [*OPTIONS, *more], tmp_path_factory.mktemp("log") / "embedder") as running:
        yield running


@pytest.fixture(scope="module")
def expected(model):
    return SentenceTransformer(model, device="cpu").encode(TEXTS)


def post(server, path, status=200, **body):
    reply = httpx.post(f"{server.url}{path}", json={"model": "m", **body}, timeout=120)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_openai_s_client(embedder, expected):
    client = embedder.client()
    for encoding in ("float", "base64"):
        reply = client.embeddings.create(model="m", input=TEXTS, encoding_format=encoding)
        found = [
            np.frombuffer(base64.b64decode(each.embedding), np.float32)
            if isinstance(each.embedding, str)
            else each.embedding
            for each in reply.data
        ]
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert reply.usage.prompt_tokens > 40
    (short,) = client.embeddings.create(model="m", input=TEXTS[0], dimensions=16).data
    cut = expected[0, :16] / np.linalg.norm(expected[0, :16])
    np.testing.assert_allclose(short.embedding, cut, atol=1e-4)


def test_mistakes_are_the_client_s(embedder):
    for wrong in ({"dimensions": 65}, {"input": "word " * 600}, {"input": []}):
        post(embedder, "/v1/embeddings", 400, **{"input": "a"} | wrong)
    post(embedder, "/v1/completions", 404, prompt="a")
    kept = post(embedder, "/v1/embeddings", input="word " * 600, truncate_prompt_tokens=8)
    assert kept["usage"]["prompt_tokens"] == 8


def test_scores_of_two_embeddings(embedder, expected):
    reply = post(embedder, "/score", text_1=TEXTS[0], text_2=TEXTS[1:])
    scores = [each["score"] for each in reply["data"]]
    np.testing.assert_allclose(scores, expected[1:] @ expected[0], atol=1e-4)
    ranked = post(embedder, "/v1/rerank", query=TEXTS[0], documents=TEXTS)["results"]
    assert [each["index"] for each in ranked] == np.argsort(-expected @ expected[0]).tolist()


def test_an_idle_server_sleeps_and_wakes(embedder, expected):
    deadline = time.monotonic() + 240
    while embedder.metric(SLEEPS, sleep_state="awake"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    reply = post(embedder, "/v1/embeddings", input=TEXTS)
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], expected, atol=1e-4)


def test_metrics_count_requests_and_hits(embedder):
    post(embedder, "/v1/embeddings", input=TEXTS[0])
    names = ("vllm:request_success_total", "vllm:prefix_cache_hits_total")
    before = [embedder.metric(name) for name in names]
    post(embedder, "/v1/embeddings", input=TEXTS[0])
    done, hits = (embedder.metric(name) - b for name, b in zip(names, before, strict=True))
    assert done == 1
    assert hits >= 32


@pytest.mark.slow
def test_vllm_s_benchmark(embedder, model):
    port = embedder.url.rpartition(":")[2]
    command = [sys.executable, *VLLM, "bench", "serve", "--backend", "openai-embeddings"]
    command += ["--endpoint", "/v1/embeddings", "--model", "m", "--tokenizer", model]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--num-prompts", "20"]
    ran = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"Successful requests: +20\b", ran.stdout), ran.stdout
    print(ran.stdout)


@pytest.mark.slow
def test_a_reranker_behind_tenants(model, tmp_path):
    keys = write_settings(tmp_path, limits="")
    options = [*OPTIONS, "--runner", "pooling", "--hf-overrides", json.dumps(RERANKER)]
    options += ["--middleware", "vllm_metal.serving.Tenants"]
    environment = {"VLLM_METAL_SERVING_CONFIG": str(tmp_path / "serving.toml")}
    with serve(model, options, tmp_path / "log", environment=environment) as running:
        url = running.url

        def ask(path, key, **body):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": "m", **body}
            return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=120)

        documents = [f"{TEXTS[0]} {n}" for n in range(3)]
        asked = {"query": "Where does it end?", "documents": documents}
        ranked = {name: ask("/rerank", keys[name], **asked).json() for name in ("acme", "other")}
        scores = {
            name: {each["index"]: each["relevance_score"] for each in of["results"]}
            for name, of in ranked.items()
        }
        assert scores["acme"] == pytest.approx(scores["other"], abs=1e-5)
        by_score = ask("/score", keys["acme"], text_1=asked["query"], text_2=documents).json()[
            "data"
        ]
        assert [each["score"] for each in by_score] == pytest.approx(
            [scores["acme"][n] for n in range(3)], abs=1e-5
        )
        probs = ask("/classify", keys["acme"], input=documents).json()["data"]
        assert len(probs) == 3
        assert ask("/pooling", keys["acme"], input="a", task="classify").status_code == 200
        assert ask("/rerank", "no key", **asked).status_code == 401
        assert ask("/v2/embed", keys["acme"], texts=["a"]).status_code == 404
        running = type(running)(running.url, running.log, running.process, keys["metrics"])
        for name in ("acme", "other"):
            assert running.metric(TOKENS, tenant=name, kind="prompt") > 100
        # The query stands before each document; another tenant's is not found.
        assert running.metric(TOKENS, tenant="other", kind="cached") < running.metric(
            TOKENS, tenant="acme", kind="cached"
        )
