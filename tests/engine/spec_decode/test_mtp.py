# SPDX-License-Identifier: Apache-2.0
"""Drafts of a target's MTP layer equal those of vLLM's torch modules on mlx-lm's states."""

import copy
import importlib
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.models.cases import cases
from engine.spec_decode.heads import (
    BLOCK,
    CONFIG,
    HIDDEN,
    QUANTIZATION,
    Bench,
    DenseTarget,
    K,
    engine_config,
    one_process,
    random_arrays,
    serve_and_check,
    write_target,
)
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.glm4_moe import Glm4MoeMLP

from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode.proposer import DraftRequest
from vllm_metal.engine.spec_decode.registry import load_network

LAYERS, EXPERTS, WINDOW = 4, 4, 20
SHARED = CONFIG | {"num_hidden_layers": LAYERS, "head_dim": 16, "num_nextn_predict_layers": 1}
MIMO = SHARED | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},  # transformers has none
}
MIMO_CODE = """
from transformers import Qwen2Config

class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
GLM = SHARED | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "use_qk_norm": True,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
}
EXAONE = SHARED | {
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "is_moe_layer": [False] + [True] * (LAYERS - 1),
    "eos_token_id": 1,
}


def attention_and_norms(name, biases=False, head_norms=False):
    sizes = {"q": 64, "k": 32, "v": 32}
    shapes = {f"{name}.self_attn.{kind}_proj.weight": (size, 64) for kind, size in sizes.items()}
    if biases:
        shapes |= {f"{name}.self_attn.{kind}_proj.bias": (size,) for kind, size in sizes.items()}
    if head_norms:
        shapes |= {f"{name}.self_attn.{kind}_norm.weight": (16,) for kind in "qk"}
    norms = ("input_layernorm", "post_attention_layernorm")
    return (
        shapes
        | {f"{name}.self_attn.o_proj.weight": (HIDDEN, 64)}
        | {f"{name}.{norm}.weight": (HIDDEN,) for norm in norms}
    )


def mlp(name, size):
    return {
        f"{name}.gate_proj.weight": (size, HIDDEN),
        f"{name}.up_proj.weight": (size, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, size),
    }


def joining(name, embedding, hidden, projection, final):
    norms = {f"{name}.{norm}.weight": (HIDDEN,) for norm in (embedding, hidden, final)}
    return norms | {f"{name}.{projection}.weight": (HIDDEN, 2 * HIDDEN)}


MIMO_LAYER = (
    joining(
        "model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
    )
    | attention_and_norms("model.mtp_layers.0", biases=True)
    | mlp("model.mtp_layers.0.mlp", 96)
)


def glm_layer(index=0):
    name = f"model.layers.{LAYERS + index}"
    shapes = (
        joining(name, "enorm", "hnorm", "eh_proj", "shared_head.norm")
        | attention_and_norms(name, head_norms=True)
        | mlp(f"{name}.mlp.shared_experts", 32)
        | {f"{name}.mlp.gate.weight": (EXPERTS, HIDDEN)}
        | {f"{name}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
    )
    for expert in range(EXPERTS):
        shapes |= mlp(f"{name}.mlp.experts.{expert}", 32)
    return shapes


def exaone_layers(count=1):
    shapes = joining("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    for name in (f"mtp.layers.{index}" for index in range(count)):
        shapes |= attention_and_norms(name, head_norms=True) | mlp(f"{name}.mlp", 96)
    return shapes


GLM_LAYER, EXAONE_LAYER = glm_layer(), exaone_layers()
#: One layer per draft; the last windows are longer than others, and than the layers' own.
SEVERAL = {"num_nextn_predict_layers": K}
GLM_LAYERS = {name: shape for index in range(K) for name, shape in glm_layer(index).items()}
EXAONE_KINDS = {
    "mtp_layer_types": ["sliding_attention", "full_attention"] * (K // 2),
    "mtp_sliding_windows": [WINDOW, None, WINDOW // 2, None],
}
#: Target, arrays of its MTP layer, whether quantized, layer whose states are read (from the end),
#: vLLM's module and class.
CASES = {
    "mimo": (MIMO, MIMO_LAYER, False, -2, "mimo_mtp", "MiMoMTP"),
    "glm4_moe": (GLM, GLM_LAYER, False, -1, "glm4_moe_mtp", "Glm4MoeMTP"),
    "glm4_moe, quantized": (GLM, GLM_LAYER, True, -1, "glm4_moe_mtp", "Glm4MoeMTP"),
    "exaone_moe, windowed": (EXAONE, EXAONE_LAYER, False, -1, "exaone_moe_mtp", "ExaoneMoeMTP"),
    "exaone_moe, full": (
        EXAONE | {"mtp_layer_types": ["full_attention"]},
        EXAONE_LAYER, False, -1, "exaone_moe_mtp", "ExaoneMoeMTP",
    ),
    "glm4_moe, several layers": (
        GLM | SEVERAL, GLM_LAYERS, False, -1, "glm4_moe_mtp", "Glm4MoeMTP"
    ),
    "exaone_moe, several layers": (
        EXAONE | SEVERAL | EXAONE_KINDS,
        exaone_layers(K), False, -1, "exaone_moe_mtp", "ExaoneMoeMTP",
    ),
}  # fmt: skip


def write(folder, config, shapes, quantized=False):
    """Writes a target whose checkpoint has its MTP layer, optionally quantized like the rest."""
    arrays = {}
    for name, tensor in random_arrays(shapes).items():
        # Large, so that drafts depend on the K/V of single positions.
        array = mx.array(tensor.numpy()) * (4 if "self_attn" in name else 1)
        if quantized and array.ndim == 2 and ".gate.weight" not in name:
            parts = mx.quantize(array, **QUANTIZATION)
            names = [name.removesuffix("weight") + part for part in ("weight", "scales", "biases")]
            arrays |= dict(zip(names, parts, strict=True))
        else:
            arrays[name] = array
    write_target(folder, config, arrays, quantized)
    (folder / "configuration_mimo.py").write_text(MIMO_CODE)
    return folder


def read(folder):
    """Returns the checkpoint's arrays as torch tensors, dequantized."""
    arrays = mx.load(str(folder / "model.safetensors"))
    found = {}
    for name, array in arrays.items():
        stem = name.removesuffix("weight")
        if f"{stem}scales" in arrays and name.endswith("weight"):
            array = mx.dequantize(
                array, arrays[f"{stem}scales"], arrays[f"{stem}biases"], **QUANTIZATION
            )
        if not name.endswith((".scales", ".biases")):
            found[name] = torch.tensor(np.array(array))
    return found


class NaiveMoE(torch.nn.Module):
    """Replaces vLLM's, whose kernels need a GPU: DeepSeek-V3's router, one expert at a time."""

    n_logical_experts = n_physical_experts = n_local_physical_experts = EXPERTS
    n_routed_experts, n_shared_experts, n_redundant_experts = EXPERTS, 1, 0
    experts = None

    def __init__(self, config, prefix, **_):
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate.e_score_correction_bias = torch.nn.Parameter(torch.empty(EXPERTS))
        self.shared_experts = Glm4MoeMLP(HIDDEN, 32, "silu", prefix=f"{prefix}.shared_experts")
        self.name = prefix

    def forward(self, rows):
        scores = self.gate(rows).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.top_k).indices
        kept = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        kept = kept / kept.sum(1, keepdim=True) * self.scale
        out = self.shared_experts(rows)
        for expert in range(EXPERTS):
            gate, up, down = (
                self.arrays[f"{self.name}.experts.{expert}.{kind}_proj.weight"]
                for kind in ("gate", "up", "down")
            )
            inner = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
            out = out + kept[:, expert, None] * (inner @ down.T)
        return out


class Judge:
    """Runs vLLM's MTP module on a whole text at once."""

    def __init__(self, config, folder, layer_id, module, family):
        self.config, self.layer_id = config, layer_id
        self.target = DenseTarget(folder)
        draft = copy.copy(config)
        draft.model_config = config.speculative_config.draft_model_config
        weights = read(folder)
        heads = {
            f"{name.partition('eh_proj')[0]}shared_head.head.weight"
            for name in weights
            if "eh_proj" in name
        }
        weights |= dict.fromkeys(heads, weights["lm_head.weight"])  # as checkpoints repeat it
        names = "vllm.model_executor.models"
        with (
            one_process(),
            set_current_vllm_config(config),
            torch.no_grad(),
            mock.patch(f"{names}.glm4_moe.Glm4MoE", NaiveMoE),
            mock.patch(f"{names}.glm4_moe_mtp.Glm4MoE", NaiveMoE),
            mock.patch(
                f"{names}.glm4_moe_mtp.fused_moe_make_expert_params_mapping", return_value=()
            ),
        ):
            self.module = getattr(importlib.import_module(f"{names}.{module}"), family)(
                vllm_config=draft
            )
            self.module.load_weights(
                (name, array) for name, array in weights.items() if ".experts." not in name
            )
        for found in self.module.modules():
            if isinstance(found, NaiveMoE):
                found.arrays = weights

    @torch.no_grad()
    def __call__(self, text, drafts):
        """Returns the layers' [len(drafts), V] logits at each draft's place."""
        hidden = self.target.states(text)[self.layer_id][:-1]
        with one_process(), set_current_vllm_config(self.config):
            several = self.config.speculative_config.use_multi_module_mtp()
            return (self.by_layer if several else self.by_first)(hidden, text, drafts)

    def by_layer(self, hidden, text, drafts):
        """Like vLLM's MultiModuleMTPSpeculator: layer i reads the tokens i places further."""
        found, positions = [], torch.arange(len(hidden))
        for index in range(len(drafts)):
            tokens = torch.tensor([*text, *drafts][1 + index : 1 + index + len(hidden)])
            hidden = self.module(tokens, positions, hidden, spec_step_idx=index)
            found.append(self.module.compute_logits(hidden[-1:], spec_step_idx=index)[0])
        return torch.stack(found).numpy()

    def by_first(self, hidden, text, drafts):
        found = []
        for index in range(len(drafts)):
            tokens = torch.tensor([*text[1:], *drafts[:index]])
            out = self.module(tokens, torch.arange(len(tokens)), hidden)
            found.append(self.module.compute_logits(out[-1:])[0])
            hidden = torch.cat([hidden, out[-1:]])
        return torch.stack(found).numpy()


def mtp_config(folder, **options):
    return engine_config(folder, folder, "mtp", trust_remote_code=True, **options)


@pytest.fixture(
    scope="module",
    params=cases(
        CASES,
        ["mimo", "glm4_moe", "glm4_moe, several layers"],
        ["glm4_moe, quantized", "exaone_moe, windowed", "exaone_moe, several layers"],
    ),
)
def bench(request, tmp_path_factory):
    target, shapes, quantized, layer_id, module, family = CASES[request.param]
    folder = write(tmp_path_factory.mktemp("models") / "target", target, shapes, quantized)
    config = mtp_config(folder)
    return Bench(config, Judge(config, folder, layer_id, module, family))


@pytest.mark.usefixtures("unfused")
def test_drafts_are_vllms_for_prompts_in_chunks_and_any_pattern_of_acceptance(bench):
    prefix = bench.prompt(3 * BLOCK)
    bench.begin(0, prefix + bench.prompt(3))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0], chunk=20) == [0, 0]
    counts = [bench.step([1, 0], [K, 0], chunk=20) for _ in range(2)]  # beside a prompt
    assert counts == [[K, 0], [K, 0]]
    bench.step([0, 1], [K, 2])
    # The scheduler leaves a block out: the layer's K/V at its end follow from the token after it.
    shared = bench.tables.tables_np[0][0, :2].tolist()
    bench.begin(2, prefix + bench.prompt(5), shared)
    assert bench.step([2], [0]) == [0]
    drafted = 0
    for _ in range(4):
        drafted += sum(bench.step(bench.rng.permutation(3), bench.rng.integers(0, K + 1, 3)))
    assert drafted > 15
    for req_idx in range(3):
        bench.proposer.forget_request(req_idx)


def test_a_checkpoint_without_mtp_layers_is_named(tmp_path):
    folder = write(tmp_path / "target", GLM, {})
    config = mtp_config(folder)
    model = loader.load(config)
    reason = rf"{folder} contains no MTP layers \(model.layers.{LAYERS}.*original checkpoint"
    with pytest.raises(loader.ModelLoadError, match=reason):
        load_network(config, parts.ModelParts(model))


def test_a_layer_of_another_target_is_named(tmp_path):
    target = write(tmp_path / "target", GLM, {})
    narrow = GLM | {"moe_intermediate_size": 16}
    other = {name: shape for name, shape in GLM_LAYER.items() if ".shared_experts." not in name}
    other |= mlp(f"model.layers.{LAYERS}.mlp.shared_experts", 16)
    mimo = write(tmp_path / "mimo", MIMO, MIMO_LAYER)
    with pytest.raises(ValueError, match=r"MTP layers of mimo with a model of type glm4_moe: cho"):
        engine_config(target, mimo, "mtp", trust_remote_code=True)
    config = engine_config(target, write(tmp_path / "narrow", narrow, other), "mtp")
    model = loader.load(config)
    with pytest.raises(loader.ModelLoadError, match="does not fit the target"):
        load_network(config, parts.ModelParts(model))


@pytest.mark.usefixtures("unfused")
def test_layers_of_their_own_drafts_leave_whole_blocks(tmp_path):
    """K/V of a block's last positions depend on as many later tokens as there are layers."""
    folder = write(tmp_path / "target", GLM | SEVERAL, GLM_LAYERS)
    config = mtp_config(folder)
    bench = Bench(config, Judge(config, folder, -1, "glm4_moe_mtp", "Glm4MoeMTP"))
    prefix = bench.prompt(2 * BLOCK + K)
    bench.begin(0, prefix + bench.prompt(2))
    bench.step([0], [0])
    here, none = np.array([0], np.int32), np.array([0], np.int32)
    known = here + 2 * BLOCK + bench.proposer.lookahead
    bench.proposer.complete_draft_kv(DraftRequest(bench.token_ids_np, here, known, none))
    shared = bench.tables.tables_np[0][0, :2].tolist()
    bench.proposer.forget_request(0)
    bench.begin(1, prefix + bench.prompt(3), shared)
    assert bench.step([1], [0]) == [0]
    assert bench.step([1], [K]) == [K]


SEVERAL_REFUSED = {
    "fewer than drafts": (
        GLM | {"num_nextn_predict_layers": 2},
        {},
        "num_speculative_tokens 4 .config.json states 2 MTP layers.* choose 2 or fewer",
    ),
    "not of that family": (MIMO | SEVERAL, {}, "only the first is served.*choose 1 or fewer"),
    "stored": (
        GLM | SEVERAL,
        {"kv_transfer_config": KVTransferConfig("MetalKVConnector", kv_role="kv_both")},
        "several MTP layers and a KV connector",
    ),
}


@pytest.mark.parametrize("name", SEVERAL_REFUSED)
def test_several_layers_are_rejected_with(tmp_path, name):
    target, options, reason = SEVERAL_REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        mtp_config(write(tmp_path / "target", target, {}), **options)


def test_each_of_several_layers_drafts_one_token_by_default(tmp_path):
    folder = write(tmp_path / "target", GLM | SEVERAL, GLM_LAYERS)
    args = EngineArgs(str(folder), skip_tokenizer_init=True, speculative_config={"method": "mtp"})
    config = args.create_engine_config()
    assert config.num_speculative_tokens == K
    assert config.num_prefill_lookahead_tokens == config.num_hash_lookahead_tokens == K
    config.speculative_config.num_speculative_tokens = 2
    network = load_network(config, parts.ModelParts(loader.load(config)))
    assert [layer.name for layer in network.layers] == ["draft.layers.0", "draft.layers.1"]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "family",
    cases(
        ["mimo", "glm4_moe, quantized", "exaone_moe, several layers"],
        more=["mimo", "exaone_moe, several layers"],
    ),
)
def test_served(tmp_path, monkeypatch, family):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    target, shapes, quantized, *_ = CASES[family]
    small = {"vocab_size": 32, "num_hidden_layers": LAYERS}
    folder = write(tmp_path / "target", target | small, shapes, quantized)
    # vLLM still takes the families' own names of the method.
    spec = {"method": f"{target['model_type']}_mtp", "num_speculative_tokens": 3}
    serve_and_check(folder, spec, trust_remote_code=True)
