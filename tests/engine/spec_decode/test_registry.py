# SPDX-License-Identifier: Apache-2.0
"""The registry is read without MLX, agrees with vLLM and our code, and is shown to users."""

import json
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from engine.batch.test_requests import new_request
from engine.spec_decode import assistants, blocks
from engine.spec_decode.heads import CONFIG, HIDDEN, MAX_LEN, VOCAB, write_target
from engine.spec_decode.page import BEGIN, END, PAGE, methods_table, renew_table
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import NewRequestData

from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.spec_decode.assistant import AssistantNetwork
from vllm_metal.engine.spec_decode.network import DraftNetwork
from vllm_metal.engine.spec_decode.proposer import Proposer, TextProposer
from vllm_metal.engine.spec_decode.registry import (
    BY_NAME,
    METHODS,
    SPECULATIVE_METHODS,
    load_network,
    make_speculator,
    method_of,
)
from vllm_metal.settings.draft_methods import keeps_kv

GLM = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
}
#: config.json of a draft checkpoint, by method; others draft from tokens.
DRAFTS = {
    "draft_model": CONFIG,
    "eagle": CONFIG | {"num_hidden_layers": 1},
    "eagle3": CONFIG | {"num_hidden_layers": 1},
    "medusa": {"model_type": "medusa", "num_heads": 3, "hidden_size": HIDDEN, "vocab_size": VOCAB},
    "mlp_speculator": {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "n_predict": 3,
        "emb_dim": HIDDEN,
        "vocab_size": VOCAB,
    },
    "mtp": GLM,
    "dflash": blocks.CONFIG,
    "dspark": blocks.CONFIG
    | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "block_size": 7},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target")


def checkpoint(folder, config):
    """Writes the part of a draft checkpoint that vLLM reads to configure an engine."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {"none": mx.zeros(1)}, {"format": "mlx"})
    return str(folder)


def configure(target, speculation, **options):
    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        speculative_config={"num_speculative_tokens": 3} | speculation,
        **options,
    ).create_engine_config()


def test_the_methods_are_known_where_mlx_cannot_be_imported():
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx_lm', 'vllm', 'torch'): sys.modules[name] = None\n"
        "from vllm_metal.engine.spec_decode.registry import BY_NAME\n"
        "print(*BY_NAME, *BY_NAME['mtp'].architectures, *BY_NAME['eagle'].architectures)\n"
        "BY_NAME['mtp'].load()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = done.stdout.split()
    assert names[: len(SPECULATIVE_METHODS)] == list(SPECULATIVE_METHODS)
    assert {"MiMoMTPModel", "EagleLlamaForCausalLM"} <= set(names)
    assert "ModuleNotFoundError: No module named 'mlx" in done.stderr  # it was out of reach


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.names[0])
def test_each_rows_code_is_what_it_says(method):
    family = method.load()
    assert issubclass(family, DraftNetwork if method.has_network else TextProposer)
    if method.has_network:
        assert method.keeps_kv == (family.writer is not DraftNetwork.writer)
    else:
        assert not method.keeps_kv


@pytest.mark.parametrize("name", SPECULATIVE_METHODS)
def test_what_a_row_says_of_vllm_is_so(target, tmp_path, name):
    drafts = DRAFTS.get(name)
    if name == "mtp":
        target = tmp_path / "draft"
    speculation = {"method": name}
    if drafts is not None:
        speculation["model"] = checkpoint(tmp_path / "draft", drafts)
    config = configure(target, speculation)
    row = BY_NAME[name]
    assert row.has_network == (drafts is not None)
    assert config.scheduler_config.async_scheduling == row.schedules_ahead
    if row.architectures:
        draft = config.speculative_config.draft_model_config
        assert draft.architectures[0] in row.architectures


@pytest.mark.parametrize(
    ("name", "changes", "family"),
    [
        ("mtp", {"architectures": ["MiMoV2FlashForCausalLM"]}, "MiMoV2MTPModel"),
        ("eagle3", {"architectures": ["Eagle3Qwen3vlForCausalLM"]}, "Eagle3Qwen3vl"),
    ],
)
def test_an_architecture_that_is_not_served_is_named(target, tmp_path, name, changes, family):
    draft = checkpoint(tmp_path / "draft", DRAFTS[name] | changes)
    served = ", ".join(BY_NAME[name].architectures)
    with pytest.raises(
        ValueError, match=rf"method '{name}' with {family}\w* \(served are {served}"
    ):
        configure(target, {"method": name, "model": draft})


def test_an_assistant_has_a_row_of_its_own_and_keeps_no_kv(tmp_path):
    """Its prefix hits include their last block, where an MTP layer's K/V may be wrong."""
    target = write_target(tmp_path / "target", assistants.TARGET)
    draft = checkpoint(tmp_path / "draft", assistants.CONFIG)
    config = configure(target, {"method": "mtp", "model": draft})
    row = method_of(config)
    assert row.load() is AssistantNetwork and row is not BY_NAME["mtp"]
    assert not keeps_kv(config) and config.scheduler_config.async_scheduling
    assert not config.speculative_config.use_eagle_block_drop()
    transfer = KVTransferConfig(
        kv_connector="MetalKVConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"path": str(tmp_path / "cache")},
    )
    config = configure(target, {"method": "mtp", "model": draft}, kv_transfer_config=transfer)
    assert config.speculative_config is None
    model = checkpoint(tmp_path / "glm", GLM)
    config = configure(model, {"method": "mtp", "model": model})
    assert method_of(config) is BY_NAME["mtp"] and keeps_kv(config)
    assert config.speculative_config.use_eagle_block_drop()


def test_a_method_without_a_row_is_refused_by_name(target):
    with pytest.raises(ValueError, match=r"method 'custom_class' \(choose one of ngram, ngram_gpu"):
        configure(target, {"method": "custom_class", "model": "a.Proposer"})
    given = SimpleNamespace(speculative_config=SimpleNamespace(method="custom_class"))
    with pytest.raises(ValueError, match="--speculative-config method 'custom_class' is not"):
        load_network(given, None)
    with pytest.raises(ValueError, match="--speculative-config method 'custom_class' is not"):
        make_speculator(given, None, None)


@pytest.mark.parametrize("name", SPECULATIVE_METHODS)
def test_an_engine_that_prefills_for_others_drafts_nothing(target, tmp_path, name):
    drafts = DRAFTS.get(name)
    if name == "mtp":
        target = tmp_path / "draft"
    speculation = {"method": name}
    if drafts is not None:
        speculation["model"] = checkpoint(tmp_path / "draft", drafts)
    transfer = KVTransferConfig(
        kv_connector="MetalKVConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"path": str(tmp_path / "cache")},
    )
    config = configure(target, speculation, kv_transfer_config=transfer)
    assert config.num_speculative_tokens == 0
    # vLLM counts the newest token of a DFlash block.
    assert config.num_lookahead_tokens == (1 if name == "dflash" else 0)
    assert make_speculator(config, None, None) is None
    if BY_NAME[name].keeps_kv:
        assert config.speculative_config.method == name
    else:
        assert config.speculative_config is None
        assert load_network(config, None) is None  # its weights are not even read


TEXT = [7, 1, 2, 3, 4, 5, 6, 9, 1, 2]


def drafts_of(config, text=TEXT):
    """Returns the drafts for a text, with the maximum number of rows reserved."""
    requests = Requests(2, MAX_LEN, BlockTables(1, 2, 10))
    requests.add_request(
        NewRequestData("a", text[:-1], [], SamplingParams(), None, ([1],), 0, None)
    )
    requests.token_ids_np[requests["a"].req_idx, : len(text)] = text
    requests.num_known_np[requests["a"].req_idx] = len(text)
    speculator = make_speculator(config, requests, None)
    speculator.enter(requests["a"])
    most = config.speculative_config.num_speculative_tokens
    drafts = speculator.step_drafts({"a": 1 + most}, {"a": [-1] * most})
    return np.array(drafts.token_ids)[0, : drafts.counts_np[0]].tolist()


@pytest.mark.parametrize(
    ("speculation", "drafts"),
    [
        ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2}, [3, 4, 5]),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}, []),
        ({"method": "suffix"}, [3, 4]),  # as many as the match is long
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1.5}, [3, 4, 5]),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 3}, [3]),
    ],
)
def test_the_options_of_methods_on_tokens_reach_them(target, speculation, drafts):
    config = configure(target, speculation, additional_config={"fixed_draft_length": True})
    assert drafts_of(config) == drafts


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("name", [name for name in SPECULATIVE_METHODS if name in DRAFTS])
def test_copies_beside_a_network_are_made_by_default_or_where_asked_for(
    target, tmp_path, name, given
):
    target = tmp_path / "draft" if name == "mtp" else target
    speculation = {"method": name, "model": checkpoint(tmp_path / "draft", DRAFTS[name])}
    options = {} if given is None else {"prompt_lookup": given}
    config = configure(target, speculation, additional_config=options)
    requests = Requests(1, MAX_LEN, BlockTables(1, 1, 10))
    requests.add_request(new_request("a", TEXT, ([1],), len(TEXT)))
    text = np.resize(TEXT, 3 * len(TEXT))
    requests.token_ids_np[0, : len(text)], requests.num_known_np[0] = text, len(text)
    speculator = make_speculator(config, requests, _Proposer())
    speculator.enter(requests["a"])
    default = name in ("mtp", "eagle", "eagle3", "dflash", "dspark")
    assert speculator.is_copying(["a", "gone"]) == (default if given is None else given)


class _Proposer(Proposer):
    def propose(self, request):
        raise AssertionError("nobody asks")


def test_the_page_for_users_shows_the_table():
    begin, end = PAGE.read_text().split(BEGIN), PAGE.read_text().split(END)
    assert len(begin) == len(end) == 2, f"{PAGE} has to have {BEGIN} and {END}, once each"
    shown = begin[1].split(END)[0].strip()
    command = "cd tests; python -m engine.spec_decode.page"
    assert shown == methods_table(), f"docs/speculation.md is behind the registry: run `{command}`"


def test_renewing_the_page_changes_nothing_around_the_table():
    page = f"before\n\n{BEGIN}\n| old |\n{END}\nafter\n"
    renewed = renew_table(page)
    assert renewed == f"before\n\n{BEGIN}\n{methods_table()}\n{END}\nafter\n"
    assert renew_table(renewed) == renewed
    with pytest.raises(ValueError, match="the page has no lines"):
        renew_table("no marks")


def test_the_table_tells_what_the_rows_say():
    rows = [line.strip("| ").split(" | ") for line in methods_table().splitlines()[2:]]
    assert [row[0].replace("`", "").split(", ") for row in rows] == [[*m.names] for m in METHODS]
    off = ["(turns off async scheduling)" in row[1] for row in rows]
    assert off == [not method.schedules_ahead for method in METHODS]
    assert all(row[2] == method.needs for row, method in zip(rows, METHODS, strict=True))
