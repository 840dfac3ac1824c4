# SPDX-License-Identifier: Apache-2.0
"""Small Nemotron-H models with an MTP layer, and vLLM's torch class as reference."""

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
import torch
from engine.spec_decode.heads import (
    HIDDEN,
    VOCAB,
    DenseTarget,
    NaiveAttention,
    one_process,
    random_arrays,
    write_target,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.models import nemotron_h, nemotron_h_mtp

EXPERTS, CHOSEN, GROUPS, LATENT, SHARED = 8, 2, 2, 32, 96
CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": CHOSEN,
    "n_group": GROUPS,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "moe_latent_size": LATENT,
    "moe_shared_expert_intermediate_size": SHARED,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
}


_ATTENTION = tuple(f".mixer.{part}_proj.weight" for part in "qkvo")


def mtp_shapes(kinds: list[str]) -> dict[str, tuple[int, ...]]:
    """Returns the arrays of an MTP layer of these layers, as in checkpoints."""
    last = len(kinds) - 1
    shapes = {
        f"mtp.layers.{name}.weight": (HIDDEN,)
        for name in ("0.enorm", "0.hnorm", f"{last}.final_layernorm")
    }
    shapes["mtp.layers.0.eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    for index, kind in enumerate(kinds):
        layer = f"mtp.layers.{index}"
        mixer = f"{layer}.mixer"
        shapes[f"{layer}.norm.weight"] = (HIDDEN,)
        if kind == "attention":
            shapes |= {f"{mixer}.{part}_proj.weight": (64, HIDDEN) for part in "qo"}
            shapes |= {f"{mixer}.{part}_proj.weight": (32, HIDDEN) for part in "kv"}
            continue
        shapes |= {
            f"{mixer}.gate.weight": (EXPERTS, HIDDEN),
            f"{mixer}.gate.e_score_correction_bias": (EXPERTS,),
            f"{mixer}.fc1_latent_proj.weight": (LATENT, HIDDEN),
            f"{mixer}.fc2_latent_proj.weight": (HIDDEN, LATENT),
            f"{mixer}.shared_experts.up_proj.weight": (SHARED, HIDDEN),
            f"{mixer}.shared_experts.down_proj.weight": (HIDDEN, SHARED),
        }
        for expert in range(EXPERTS):
            shapes[f"{mixer}.experts.{expert}.up_proj.weight"] = (32, LATENT)
            shapes[f"{mixer}.experts.{expert}.down_proj.weight"] = (LATENT, 32)
    return shapes


def _adds(name: str) -> bool:
    return name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight"))


def write_nemotron(folder: Path, guessable: bool = False, **changes) -> Path:
    """Writes a model of random weights whose checkpoint includes its MTP layer.

    Args:
        folder: folder to write.
        guessable: whether the newest token mostly determines the next, and the MTP layer reads it
            alone.
        changes: changes of config.json.
    """
    config = CONFIG | changes
    shapes = mtp_shapes(config["mtp_layers_block_type"])
    mtp = {name: mx.array(tensor.numpy()) for name, tensor in random_arrays(shapes).items()}
    # Large, so that drafts depend on the K/V of single positions.
    mtp = {name: array * (4 if name.endswith(_ATTENTION) else 1) for name, array in mtp.items()}
    write_target(folder, config)
    arrays = mx.load(str(folder / "model.safetensors"))
    if guessable:
        arrays = {name: a * 0.02 if _adds(name) else a for name, a in arrays.items()}
        mtp = {name: mx.zeros_like(a) if _adds(name) else a for name, a in mtp.items()}
        mtp["mtp.layers.0.eh_proj.weight"] = mx.concatenate(
            [mx.eye(HIDDEN), mx.zeros((HIDDEN, HIDDEN))], axis=1
        )
        mtp["mtp.layers.0.enorm.weight"] = mx.ones(HIDDEN)
        mtp["mtp.layers.1.final_layernorm.weight"] = arrays["backbone.norm_f.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), arrays | mtp, {"format": "pt"})
    return folder


class NemotronTarget(DenseTarget):
    """Nemotron-H; MTP reads its final states alone."""

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        ends = self.model.backbone.embeddings.weight, self.model.lm_head.weight
        embedding, lm_head = (torch.tensor(np.array(each)) for each in ends)
        return embedding, lm_head

    def states(self, tokens) -> list[torch.Tensor]:
        final = self.model.backbone(mx.array([list(tokens)]))
        return [torch.tensor(np.array(final[0]))]


class NaiveMoE(torch.nn.Module):
    """Replaces vLLM's, whose kernels need a GPU: one expert at a time."""

    def __init__(self, config, quant_config=None, parallel_config=None, prefix=""):
        super().__init__()
        self.config, self.name = config, prefix
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate.e_score_correction_bias = torch.nn.Parameter(torch.empty(EXPERTS))
        self.shared_experts = nemotron_h.NemotronHMLP(config, HIDDEN, SHARED, prefix=prefix)
        self.fc1_latent_proj = torch.nn.Linear(HIDDEN, LATENT, bias=False)
        self.fc2_latent_proj = torch.nn.Linear(LATENT, HIDDEN, bias=False)

    def forward(self, rows):
        scores = self.gate(rows).sigmoid()
        biased = (scores + self.gate.e_score_correction_bias).view(len(rows), GROUPS, -1)
        best = biased.topk(2, dim=-1).values.sum(-1).argmax(-1)
        of_best = torch.nn.functional.one_hot(best, GROUPS)[..., None] > 0
        chosen = biased.masked_fill(~of_best, -torch.inf).flatten(1).topk(CHOSEN).indices
        kept = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        kept = kept / kept.sum(1, keepdim=True) * self.config.routed_scaling_factor
        latent, mixed = self.fc1_latent_proj(rows), 0
        for expert in range(EXPERTS):
            up, down = (
                self.arrays[f"{self.name}.experts.{expert}.{kind}_proj.weight"]
                for kind in ("up", "down")
            )
            mixed = mixed + kept[:, expert, None] * ((latent @ up.T).relu() ** 2 @ down.T)
        return self.fc2_latent_proj(mixed) + self.shared_experts(rows)


@contextmanager
def of_torch(config):
    """Sets the part of vLLM that its MTP class needs."""
    with (
        one_process(),
        set_current_vllm_config(config),
        torch.no_grad(),
        mock.patch.object(nemotron_h, "Attention", NaiveAttention),
        mock.patch.object(nemotron_h, "NemotronHMoE", NaiveMoE),
        mock.patch.object(nemotron_h_mtp, "fused_moe_make_expert_params_mapping", return_value=()),
    ):
        yield


class Judge:
    """Runs vLLM's class of the MTP layer on a whole text at once."""

    def __init__(self, config, folder: Path) -> None:
        self.config, self.target = config, NemotronTarget(folder)
        arrays = mx.load(str(folder / "model.safetensors"))
        mtp = {name: torch.tensor(np.array(a)) for name, a in arrays.items() if "mtp." in name}
        with of_torch(config):
            self.module = nemotron_h_mtp.NemotronHMTP(vllm_config=config)
            weights = [(name, a) for name, a in mtp.items() if ".experts." not in name]
            loaded = self.module.load_weights(weights)
        assert loaded == {name for name, _ in self.module.named_parameters()}
        embedding, self.lm_head = self.target.ends
        self.module.model.embed_tokens = torch.nn.Embedding.from_pretrained(embedding)
        for found in self.module.modules():
            if isinstance(found, NaiveMoE):
                found.arrays = mtp

    def hidden(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        """Returns the layer's [len(drafts), H] hidden states at each draft's place."""
        hidden = self.target.states(text)[-1][:-1]
        with of_torch(self.config):
            for index in range(len(drafts)):
                tokens = torch.tensor([*text[1:], *drafts[:index]])
                out = self.module(tokens, torch.arange(len(tokens)), hidden)
                hidden = torch.cat([hidden, out[-1:]])
        return hidden[len(hidden) - len(drafts) :]

    def __call__(self, text: list[int], drafts: list[int]) -> np.ndarray:
        """Returns the layer's [len(drafts), V] logits at each draft's place."""
        return (self.hidden(text, drafts) @ self.lm_head.T).numpy()
