# SPDX-License-Identifier: Apache-2.0
"""Model names that users type: accepted, or rejected with a suggestion."""

import socket

import pytest
from huggingface_hub import constants

from vllm_metal.engine.weights import folders
from vllm_metal.identity import model_names
from vllm_metal.identity.model_files import ModelLoadError


@pytest.fixture
def unreachable():
    """Address of a missing hub: a reserved port without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def machine(tmp_path, monkeypatch, unreachable):
    """A machine without a network and with two cached models."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", unreachable)
    monkeypatch.setattr(model_names, "getproxies", dict)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("mlx-community/Qwen3-8B-4bit", "meta-llama/Llama-3.2-3B-Instruct"):
        snapshot = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "0"
        snapshot.mkdir(parents=True)
    return tmp_path


def folder(machine, name, **files):
    made = machine / name
    made.mkdir(parents=True)
    for file, text in files.items():
        (made / file.replace("_json", ".json")).write_text(text)
    return made


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./nope", "there is no folder ./nope"),
        ("/models/Qwen3-8B", "Qwen3-8B; did you mean mlx-community/Qwen3-8B-4bit?"),
        ("llama3.2:3b", "is an Ollama name: give one on Hugging Face, as OWNER/NAME"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "give the model's name, Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-4bti", "give the folder of a model; did you mean mlx-"),
        ("gpt2", "gpt2 is not on this machine, and 127.0.0.1 does not answer"),
        ("model.gguf", "model.gguf does not exist"),
    ],
)  # fmt: skip
def test_a_name_that_means_nothing_here_is_answered_in_one_line(machine, model, told):
    with pytest.raises(ModelLoadError) as caught:
        folders.checked_folder_of(model)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "has no config.json: it is not a model's"),
        ({"model.gguf": ""}, "give the file, "),
        ({"config_json": '{\n "model_type": "llama",\n}'}, "config.json is not JSON, so download"),
        ({"config_json": "{\n,}"}, "line 2 column 1"),
    ],
)
def test_a_folder_that_is_no_models_says_what_it_lacks(machine, files, told):
    with pytest.raises(ModelLoadError, match=told):
        folders.checked_folder_of(str(folder(machine, "model", **files)))


def test_a_folder_around_a_model_and_a_dead_link_are_named(machine):
    made = folder(machine, "outer/snapshots/1", config_json="{}")
    with pytest.raises(ModelLoadError, match=f"it is not a model's; did you mean {made}"):
        folders.checked_folder_of(str(machine / "outer"))
    (machine / "link").symlink_to(machine / "gone")
    with pytest.raises(ModelLoadError, match=r"link is a broken link to .*gone"):
        folders.checked_folder_of(str(machine / "link"))


def test_what_may_be_a_model_is_left_alone(machine, monkeypatch):
    made = str(folder(machine, "model", config_json="{}"))
    left = [made, "mlx-community/Qwen3-8B-4bit", "s3://bucket/model"]
    assert [folders.checked_folder_of(model) for model in left] == left
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert folders.checked_folder_of("owner/new") == "owner/new"
    monkeypatch.setattr(model_names, "getproxies", lambda: {"http": "http://proxy:3128"})
    assert folders.checked_folder_of("owner/new") == "owner/new"  # a proxy may reach the hub
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        folders.checked_folder_of("owner/new")


@pytest.mark.parametrize("name", ["model.gguf", "./model.gguf", "{machine}/sha256-0"])
def test_a_file_is_known_by_its_first_bytes(machine, name):
    name = name.format(machine=machine)
    (machine / name).write_bytes(b"GGUF")
    model_names.check(name)
    (machine / name).write_bytes(b"PK")
    with pytest.raises(ModelLoadError):
        model_names.check(name)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "vocab.txt", "tekken.json"])
def test_a_folder_without_a_tokenizer_says_so(machine, file):
    made = folder(machine, "model", config_json="{}")
    with pytest.raises(ModelLoadError, match="has no tokenizer: add its"):
        model_names.check_tokenizer(str(made))
    (made / file).write_text('{"model": {}}')
    model_names.check_tokenizer(str(made))
    model_names.check_tokenizer("owner/name")  # which may be fetched
