# SPDX-License-Identifier: Apache-2.0
"""MTP layers in a folder of mlx-vlm's splitter draft like those of the whole checkpoint."""

import json
import pickle
import shutil

import mlx.core as mx
import numpy as np
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy
from engine.models.cases import cases
from engine.models.test_mtp_weights import write as write_latents
from engine.spec_decode.heads import BLOCK, Bench, K, engine_config
from engine.spec_decode.hybrids import EXPERTS, FAMILIES, NaiveMTP, write_hybrid
from engine.spec_decode.nemotron import write_nemotron
from engine.spec_decode.splitter import split
from engine.spec_decode.test_mtp_hybrids import parameters, text_of
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode import mtp
from vllm_metal.engine.spec_decode.registry import load_network
from vllm_metal.engine.weights.layers import dense_rows

#: MLX's quantizations that the splitter takes.
QUANTIZED = {
    "4 bits": {"q_bits": 4, "q_group_size": 32},
    "3 bits": {"q_bits": 3, "q_group_size": 32},
    "5 bits": {"q_bits": 5, "q_group_size": 32},
    "6 bits": {"q_bits": 6, "q_group_size": 32},
    "8 bits": {"q_bits": 8, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
}


#: A folder's quantization, and that of modules that differ.
MIXED = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
MIXED_MODULES = {
    "layers.0.self_attn.q_proj": {"bits": 5, "group_size": 64},
    "fc": {"bits": 8, "group_size": 32},
}


def quantize_by_module(folder):
    """Quantizes split layers in several ways, and writes each module's to config.json."""
    path = folder / "model.safetensors"
    arrays = mx.load(str(path))
    for name in [name for name in arrays if name.endswith(("_proj.weight", "fc.weight"))]:
        stem = name.removesuffix(".weight")
        packed = mx.quantize(arrays[name], **MIXED_MODULES.get(stem, MIXED))
        parts = ("weight", "scales", "biases")
        arrays |= {f"{stem}.{part}": a for part, a in zip(parts, packed, strict=False)}
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {"quantization": MIXED | MIXED_MODULES}
    path.write_text(json.dumps(content))


def without_layers(target, folder):
    """Writes a target like MLX's tools: without its MTP layers."""
    shutil.copytree(target, folder)
    path = folder / "model.safetensors"
    kept = {name: a for name, a in mx.load(str(path)).items() if not name.startswith("mtp.")}
    mx.save_safetensors(str(path), kept, {"format": "pt"})
    return folder


def arrays_of(folder):
    """Returns a split folder's dense arrays under the whole checkpoint's names."""
    arrays = mx.load(str(folder / "model.safetensors"))
    quantization = json.loads((folder / "config.json").read_text()).get("quantization")
    found = {}
    for name, array in arrays.items():
        if name.endswith((".scales", ".biases")):
            continue
        stem = name.removesuffix(".weight")
        if (scales := arrays.get(f"{stem}.scales")) is not None:
            stated = quantization.get(stem, quantization)
            options = {key: stated[key] for key in ("bits", "group_size", "mode") if key in stated}
            array = mx.dequantize(array, scales, arrays.get(f"{stem}.biases"), **options)
        array = array.astype(mx.float32)
        array = array - 1 if "norm" in name else array
        parts = {name: array}
        if ".switch_mlp." in name:
            parts = {name.replace("switch_mlp", f"experts.{n}"): array[n] for n in range(EXPERTS)}
        found |= {f"mtp.{part}": np.array(each, np.float64) for part, each in parts.items()}
    return found


@pytest.fixture(
    scope="module",
    params=cases(
        [(family, name) for family in FAMILIES for name in (*QUANTIZED, "by module")],
        [("qwen3_5", "4 bits"), ("qwen3_next", "mxfp4"), ("qwen3_5", "by module")],
        [("qwen3_5_moe", "4 bits"), ("qwen3_5", "3 bits"), ("qwen3_5_moe", "nvfp4")],
    ),
    ids=" ".join,
)
def bench(request, tmp_path_factory):
    family, name = request.param
    folder = tmp_path_factory.mktemp("models")
    target = write_hybrid(folder / "target", family)
    layers = split(target, folder / "layers", **QUANTIZED.get(name, {}))
    if name == "by module":
        quantize_by_module(layers)
    judge = NaiveMTP(target, arrays_of(layers))
    return Bench(engine_config(target, layers, "mtp", **text_of(family)), judge)


@pytest.mark.usefixtures("unfused")
def test_drafts_are_those_of_the_dequantized_layer(bench):
    bench.begin(0, bench.prompt(3 * BLOCK + 3))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0]) == [0, 0]
    drafted = 0
    for _ in range(4):
        drafted += sum(bench.step(bench.rng.permutation(2), bench.rng.integers(1, K + 1, 2)))
    assert drafted > 8


@pytest.fixture
def heads(monkeypatch):
    """Returns the loaded MTP heads."""
    found, make = [], mtp.MTPHead
    monkeypatch.setattr(mtp, "MTPHead", lambda *of: found.append(make(*of)) or found[-1])
    return found


def write_glm(folder):
    """Writes GLM-4.7-Flash with its MTP layer, in the published form."""
    folder.mkdir()
    write_latents(folder, "glm4_moe_lite", fp8=False)
    more = {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 512,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


#: Writers of other targets.
OTHERS = {"glm4_moe_lite": write_glm, "nemotron_h": write_nemotron}


@pytest.mark.parametrize(
    "family", cases([*FAMILIES, *OTHERS], ["qwen3_5", *OTHERS], ["qwen3_next"])
)
@pytest.mark.parametrize("name", [None, "4 bits"])
def test_the_layer_is_the_whole_checkpoints(tmp_path, heads, family, name):
    """One is added to the norms' weights once, and experts are stacked once."""
    folder = tmp_path / "whole"
    target = OTHERS[family](folder) if family in OTHERS else write_hybrid(folder, family)
    layers = split(target, tmp_path / "layers", **QUANTIZED.get(name, {}))
    for checkpoint in (target, layers):
        config = engine_config(target, checkpoint, "mtp", **text_of(family))
        load_network(config, parts.ModelParts(loader.load(config)))
    whole, own = map(parameters, heads)
    if family == "glm4_moe_lite":  # its splitter casts
        whole = {
            key: a if key.endswith("bias") else a.astype(mx.bfloat16) for key, a in whole.items()
        }
    modules = dict(heads[1].named_modules())
    packed = [path for path in modules if f"{path}.scales" in own]
    assert bool(packed) == (name is not None)
    for path in packed:
        weight = f"{path}.weight"
        codes, *others = mx.quantize(whole[weight], 32, 4)
        whole[weight] = mx.dequantize(codes, *(a.astype(mx.float32) for a in others), 32, 4)
        own[weight] = dense_rows(modules[path])
        del own[f"{path}.scales"], own[f"{path}.biases"]
    assert whole.keys() == own.keys()
    for key, array in whole.items():
        assert mx.allclose(array, own[key], atol=1e-5), key


#: Where the layers are, by the target's folder.
BESIDE = {
    "in it": "{}/mtp",
    "as mlx-vlm's convert names it": "{}-mtp",
    "as published": "{}-MTP",
}


@pytest.mark.parametrize("where", BESIDE)
def test_layers_beside_a_model_are_found(tmp_path, where):
    whole = write_hybrid(tmp_path / "whole", "qwen3_next")
    target = without_layers(whole, tmp_path / "Model-4bit")
    (tmp_path / "Model-8bit-MTP").mkdir()  # another model's
    layers = split(whole, BESIDE[where].format(target), q_bits=4, q_group_size=32)
    config = pickle.loads(pickle.dumps(configured(target, method="mtp")))  # as an engine gets it
    speculation = config.speculative_config
    assert (speculation.model, speculation.num_speculative_tokens) == (str(layers), 3)
    assert speculation.draft_model_config.hf_config.is_split


def configured(target, **speculation):
    return EngineArgs(
        model=str(target), skip_tokenizer_init=True, speculative_config=speculation
    ).create_engine_config()


def test_layers_beside_a_model_in_the_hubs_cache_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    whole = write_hybrid(tmp_path / "whole", "qwen3_next")
    target = cached(tmp_path, "some/Model-4bit")
    without_layers(whole, target)
    layers = cached(tmp_path, "some/Model-MTP-4bit")
    split(whole, layers)
    split(whole, cached(tmp_path, "other/Model-MTP-4bit"))  # not that owner's
    speculation = configured("some/Model-4bit", method="mtp").speculative_config
    assert speculation.model == str(layers)


def cached(folder, name):
    """Returns the path of a model's snapshot in the hub's cache."""
    repo = folder / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots").mkdir()
    return repo / "snapshots" / "abc"


def test_a_start_without_layers_says_where_they_were_looked_for(tmp_path):
    target = without_layers(write_hybrid(tmp_path / "whole", "qwen3_next"), tmp_path / "Model-4bit")
    with pytest.raises(ValueError, match="contains none") as caught:
        configured(target, method="mtp")
    message = str(caught.value)
    assert "\n" not in message
    for part in (target / "mtp", f"folders of {tmp_path}", "Model-4bit-mtp", '"model"'):
        assert str(part) in message


def test_the_first_of_several_layers_drafts_one_token(tmp_path):
    target = write_hybrid(tmp_path / "whole", "qwen3_next")
    layers = split(target, tmp_path / "layers")
    arrays = mx.load(str(layers / "model.safetensors"))
    second = {name.replace("layers.0", "layers.1"): a * 2 for name, a in arrays.items()}
    mx.save_safetensors(str(layers / "model.safetensors"), second | arrays, {"format": "mlx"})
    content = json.loads((layers / "config.json").read_text())
    content["text_config"]["num_mtp_layers"] = 2
    content["text_config"].pop("num_nextn_predict_layers")
    (layers / "config.json").write_text(json.dumps(content))
    config = configured(target, method="mtp", model=str(layers))
    assert config.num_speculative_tokens == 1
    assert load_network(config, parts.ModelParts(loader.load(config))) is not None
    with pytest.raises(ValueError, match=r"num_speculative_tokens 2 .*only the first is served"):
        configured(target, method="mtp", model=str(layers), num_speculative_tokens=2)


#: Changes of a split folder's text_config, and the error's text.
MISFITS = {
    "hidden size": ({"hidden_size": 32}, "hidden states of size 32, but those of .* are of 64"),
    "vocabulary": ({"vocab_size": 96}, "vocabulary of 96, but that of .* has 128"),
    "family": ({"model_type": "qwen3_5_text"}, "layers of qwen3_5 with a model of type qwen3_next"),
    "unknown": ({"model_type": "qwen9"}, "qwen3_5_mtp of a qwen9 model; .* qwen3_next"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_layers_of_another_model_are_rejected_before_weights_load(tmp_path, name):
    changes, reason = MISFITS[name]
    target = write_hybrid(tmp_path / "whole", "qwen3_next")
    layers = split(target, tmp_path / "layers")
    path = layers / "config.json"
    content = json.loads(path.read_text())
    content["text_config"] |= changes
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason) as caught:
        configured(target, method="mtp", model=str(layers))
    assert str(layers) in str(caught.value)


@pytest.mark.parametrize("name", cases(QUANTIZED, ["4 bits"], ["mxfp4"]))
def test_served_with_layers_beside(tmp_path, monkeypatch, name):
    """Text is mlx-lm's, and most drafts are right."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    whole = write_hybrid(tmp_path / "whole", "qwen3_next", guessable=True)
    target = without_layers(whole, tmp_path / "target")
    split(whole, tmp_path / "target-mtp", **QUANTIZED[name])
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 128, length).tolist() for length in (1, 17, 40)]
    dense = Dense(str(target))
    with engine(
        str(target),
        skip_tokenizer_init=True,
        max_model_len=256,
        speculative_config={"method": "mtp"},
    ) as llm:
        outputs = generate(llm, prompts, greedy(60, detokenize=False))
        for prompt, tokens in zip(prompts, outputs, strict=True):
            dense.check(prompt, tokens)
        seen = counters(llm)
    drafted = seen["vllm:spec_decode_num_draft_tokens"]
    assert drafted / 2 < seen["vllm:spec_decode_num_accepted_tokens"] < drafted
