# SPDX-License-Identifier: Apache-2.0
"""Reading of a model's folder, in the forms of publishers and converters."""

import json

import pytest

from vllm_metal.serving.parsers import files


@pytest.fixture
def folder(tmp_path):
    def write(**named):
        for name, content in named.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path)

    write(config__json={"model_type": "qwen3"})
    return write


def test_a_folder_without_a_configuration_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        files.read(str(tmp_path))


def test_the_text_models_family_counts(folder):
    model = folder(config__json={"model_type": "gemma4", "text_config": {"model_type": "inner"}})
    assert files.read(model).model_type == "inner"


@pytest.mark.parametrize(
    "written",
    [
        {"chat_template__jinja": "T", "tokenizer_config__json": {"chat_template": "old"}},
        {"chat_template__json": {"chat_template": "T"}},
        {"tokenizer_config__json": {"chat_template": "T"}},
    ],
)
def test_a_template_is_found_where_transformers_looks(folder, written):
    assert files.read(folder(**written)).templates == ("T",)


def test_of_named_templates_the_one_without_tools_is_first(folder):
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    assert files.read(folder(tokenizer_config__json={"chat_template": named})).templates == (
        "D",
        "U",
    )


def test_a_users_template_takes_the_place_of_the_models(folder, tmp_path):
    model = folder(chat_template__jinja="own")
    (tmp_path / "other.jinja").write_text("other")
    given = files.read(model, chat_template=str(tmp_path / "other.jinja"))
    assert given.templates == ("other",)
    assert files.read(model, chat_template="{{ messages }}").templates == ("{{ messages }}",)


def test_another_tokenizers_template_and_tokens_count(folder, tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    (other / "added_tokens.json").write_text(json.dumps({"<think>": 7}))
    found = files.read(folder(chat_template__jinja="own"), tokenizer=str(other))
    assert found.templates == ("other",) and found.has_token("<think>")


def test_tokens_are_found_as_json_writes_them(folder):
    added = {"added_tokens": [{"content": "<｜tool▁sep｜>"}, {"content": "<tool>\n"}]}
    plain = files.read(folder(tokenizer__json=json.dumps(added, ensure_ascii=False)))
    escaped = files.read(folder(tokenizer__json=json.dumps(added)))
    for found in (plain, escaped):
        assert found.has_token("<｜tool▁sep｜>") and found.has_token("<tool>\n")
        assert not found.has_token("<tool>")


def test_defaults_of_sampling_are_those_that_vllm_takes(folder):
    """`do_sample` and token ids are no request defaults."""
    from vllm.config import ModelConfig

    written = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 2}
    model = folder(
        generation_config__json=written | {"top_p": None},
        config__json={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "max_position_embeddings": 64,
            "vocab_size": 64,
        },
    )
    reference = ModelConfig(model, skip_tokenizer_init=True).get_diff_sampling_param()
    assert files.read(model).sampling == reference == {"temperature": 0.6, "top_k": 20}


def test_files_that_are_not_json_are_left_to_vllm(folder):
    found = files.read(folder(tokenizer_config__json="{", generation_config__json="[1]"))
    assert found.templates == () and found.sampling == {}


def test_a_name_that_the_hub_does_not_have_is_an_error():
    with pytest.raises(OSError, match=r"config\.json"):
        files.read("nobody/has-this-model")
    with pytest.raises(OSError, match="neither a folder nor a name"):
        files.read("not a name!")
