# SPDX-License-Identifier: Apache-2.0
"""A server loads, serves and unloads adapters while it answers others."""

import json
import shutil
import threading
import urllib.error
import urllib.request

import openai
import pytest
from e2e.server import serve
from engine.lora.toys import VOCAB, Toy, greedy_tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

pytestmark = pytest.mark.more
NUM_TOKENS = 16
PROMPT = list(range(5, 60))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = Toy("llama", tmp_path_factory.mktemp("base"))
    made.save()
    write_tokenizer(made.folder)
    return made


def write_tokenizer(folder):
    """Writes a tokenizer with one token per word."""
    words = {f"t{token}": token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, "t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


@pytest.fixture(scope="module")
def adapters(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: (folder / name, toy.adapter(folder / name, n)) for n, name in enumerate("abc")}


@pytest.fixture(scope="module")
def server(toy, adapters, tmp_path_factory):
    options = [
        *("--served-model-name", "base", "--max-model-len", "256"),
        *("--kv-cache-memory-bytes", str(16 << 20), "--enable-lora", "--max-loras", "2"),
        *("--max-cpu-loras", "4", "--lora-modules", f"a={adapters['a'][0]}"),
    ]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(str(toy.folder), options, log, environment=environment) as started:
        yield started


def post(server, route, **body):
    """Returns an answer's status and text."""
    asked = urllib.request.Request(
        f"{server.url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def complete(client, model, count=NUM_TOKENS):
    """Returns greedy tokens of a model or an adapter."""
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=count,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].token_ids


def test_load_unload_and_404_under_traffic(server, toy, adapters):
    client = server.client()
    wanted = {
        name: greedy_tokens(model, PROMPT, NUM_TOKENS) for name, (_, model) in adapters.items()
    }
    wanted["base"] = greedy_tokens(toy.model, PROMPT, NUM_TOKENS)
    stop, wrong, rounds = threading.Event(), [], []

    def traffic():
        with server.client() as mine:
            while not stop.is_set():
                for name in ("a", "base"):
                    if (found := complete(mine, name)) != wanted[name]:
                        wrong.append((name, found))
                rounds.append(1)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        assert complete(client, "a") == wanted["a"]
        for name in ("b", "c"):
            with pytest.raises(openai.NotFoundError):
                complete(client, name)
            status, text = post(
                server, "load_lora_adapter", lora_name=name, lora_path=str(adapters[name][0])
            )
            assert status == 200, text
            assert complete(client, name) == wanted[name]
        assert {model.id for model in client.models.list()} == {"base", "a", "b", "c"}
        assert post(server, "unload_lora_adapter", lora_name="b")[0] == 200
        with pytest.raises(openai.NotFoundError):
            complete(client, "b")
        assert post(server, "unload_lora_adapter", lora_name="b")[0] == 404
    finally:
        stop.set()
        thread.join(60)
    assert not wrong
    assert len(rounds) > 1
    assert server.metric("vllm:lora_requests_info", max_lora="2") > 0


def test_an_adapter_that_cannot_be_served_is_named(server, adapters, tmp_path):
    def load(path):
        return post(server, "load_lora_adapter", lora_name="d", lora_path=str(path))

    status, text = load(tmp_path / "nowhere")
    assert status == 404
    assert "No adapter found" in text
    shutil.copytree(adapters["a"][0], tmp_path / "d")
    weights = tmp_path / "d" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    status, text = load(tmp_path / "d")
    assert status == 400
    assert "LoRA adapter 'd' has an unreadable adapter_model.safetensors" in text
    with pytest.raises(openai.NotFoundError):
        complete(server.client(), "d")


def test_an_adapter_trained_anew_is_served_in_place(server, toy, adapters, tmp_path):
    client, path = server.client(), tmp_path / "e"
    shutil.copytree(adapters["a"][0], path)
    body = {"lora_name": "e", "lora_path": str(path)}
    assert post(server, "load_lora_adapter", **body)[0] == 200
    old = complete(client, "e")
    shutil.rmtree(path)
    anew = toy.adapter(path, 55)
    assert complete(client, "e") == old
    assert post(server, "load_lora_adapter", **body, load_inplace=True)[0] == 200
    assert complete(client, "e") == greedy_tokens(anew, PROMPT, NUM_TOKENS) != old
