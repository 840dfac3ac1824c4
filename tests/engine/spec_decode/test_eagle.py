# SPDX-License-Identifier: Apache-2.0
"""EAGLE's drafts equal those of vLLM's torch heads on mlx-lm's dense hidden states."""

import numpy as np
import pytest
import torch
from engine.models.cases import cases
from engine.spec_decode.heads import (
    BLOCK,
    CONFIG,
    HIDDEN,
    VOCAB,
    Bench,
    DenseTarget,
    K,
    check_chunks_and_rejections,
    engine_config,
    one_process,
    vllm_module,
    write_head,
    write_target,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vllm_metal.engine.models import loader
from vllm_metal.engine.spec_decode.proposer import DraftRequest

pytestmark = pytest.mark.usefixtures("unfused")

DRAFT_VOCAB = 48


def layer_shapes(name, width):
    """Returns the arrays of one decoder layer whose attention reads rows of `width`."""
    shapes = {f"{name}.self_attn.{kind}_proj.weight": (32, width) for kind in "kv"}
    return shapes | {
        f"{name}.self_attn.q_proj.weight": (64, width),
        f"{name}.self_attn.o_proj.weight": (HIDDEN, 64),
        f"{name}.mlp.gate_proj.weight": (96, HIDDEN),
        f"{name}.mlp.up_proj.weight": (96, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, 96),
        f"{name}.post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle3_shapes(name="midlayer", num_states=3):
    return layer_shapes(name, 2 * HIDDEN) | {
        "fc.weight": (HIDDEN, num_states * HIDDEN),
        f"{name}.input_layernorm.weight": (HIDDEN,),
        f"{name}.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }


EMBEDDING = {"embed_tokens.weight": (VOCAB, HIDDEN)}
REDUCED = {
    "d2t": torch.arange(DRAFT_VOCAB) + torch.arange(DRAFT_VOCAB) % 2,  # 0, 3, 4, 7, 8, ...
    "t2d": torch.zeros(VOCAB, dtype=torch.bool),
}
#: Method, shapes, other arrays, config.json, file, layers whose states are read (9: final).
CASES = {
    "eagle": ("eagle", layer_shapes("layers.0", HIDDEN)
        | EMBEDDING | {"fc.weight": (HIDDEN, 2 * HIDDEN)}, {}, {}, "pytorch_model.bin", [9]),
    "eagle of two layers": ("eagle", layer_shapes("layers.0", HIDDEN)
        | layer_shapes("layers.1", HIDDEN) | {"layers.1.input_layernorm.weight": (HIDDEN,)}
        | {"fc.weight": (HIDDEN, 2 * HIDDEN)}, {}, {"num_hidden_layers": 2}, "model.safetensors",
        [9]),
    "eagle3": ("eagle3", eagle3_shapes() | EMBEDDING | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)},
        REDUCED, {"draft_vocab_size": DRAFT_VOCAB}, "pytorch_model.bin", [2, 4, 5]),
    "eagle3, other norms": ("eagle3", eagle3_shapes("layers.0", 2)
        | {"lm_head.weight": (VOCAB, HIDDEN), "input_norm.weight": (2 * HIDDEN,)}
        | {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(2)}, {},
        {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True,
         "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 8],
         "num_aux_hidden_states": 2}, "model.safetensors", [1, 8]),
}  # fmt: skip


class Judge:
    """Runs vLLM's head on a whole text at once."""

    def __init__(self, config, target_folder, method, layer_ids):
        self.target = DenseTarget(target_folder)
        self.config, self.layer_ids = config, layer_ids
        weights = loader.load_weights(config.speculative_config.draft_model_config, config)
        weights = {name: torch.tensor(np.array(array)) for name, array in weights.items()}
        family = Eagle3LlamaForCausalLM if method == "eagle3" else EagleLlamaForCausalLM
        self.module = vllm_module(family, config, weights)
        inner = self.target.model
        self.lm_head = torch.tensor(np.array(inner.lm_head.weight))
        if "embed_tokens.weight" not in weights:
            shared = torch.tensor(np.array(inner.model.embed_tokens.weight))
            self.module.model.embed_tokens.weight.data[:VOCAB] = shared

    @torch.no_grad()
    def __call__(self, text, drafts):
        """Returns the head's [len(drafts), V] logits at each draft's place."""
        states = self.target.states(text)
        hidden = torch.cat([states[layer_id] for layer_id in self.layer_ids], dim=-1)[:-1]
        if isinstance(self.module, Eagle3LlamaForCausalLM):
            hidden = self.module.combine_hidden_states(hidden)
        found = []
        with one_process(), set_current_vllm_config(self.config):
            for index in range(len(drafts)):
                tokens = torch.tensor([*text[1:], *drafts[:index]])
                out, carried = self.module(tokens, torch.arange(len(tokens)), hidden)
                found.append(self._of(out[-1:])[0])
                hidden = torch.cat([hidden, carried[-1:]])
        return torch.stack(found).numpy()

    def _of(self, out):
        if isinstance(self.module, Eagle3LlamaForCausalLM):
            return self.module.compute_logits(out)
        return out @ self.lm_head.T


@pytest.fixture(
    scope="module",
    params=cases(CASES, ["eagle", "eagle3"], ["eagle of two layers", "eagle3, other norms"]),
)
def bench(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    method, shapes, extra, changes, file, layer_ids = CASES[request.param]
    target = write_target(folder / "target")
    config = CONFIG | {"num_hidden_layers": 1} | changes
    head = write_head(folder / "head", shapes, extra, config, file)
    config = engine_config(target, head, method)
    return Bench(config, Judge(config, target, method, layer_ids))


def test_drafts_are_vllms_for_prompts_in_chunks_and_any_pattern_of_acceptance(bench):
    # The scheduler leaves a block out: the head's K/V at its end follow from the token after it.
    check_chunks_and_rejections(bench, found=2)
    for req_idx in range(3):
        bench.proposer.forget_request(req_idx)


def test_a_prompt_that_never_drafted_leaves_whole_blocks_when_its_kv_are_completed(bench):
    prefix = bench.prompt(2 * BLOCK + 1)  # the head's K/V at a block's end follow from what is next
    bench.begin(0, prefix + bench.prompt(2))
    bench.step([0], [0])
    here, none = np.array([0], np.int32), np.array([0], np.int32)
    request = DraftRequest(bench.token_ids_np, here, here + 2 * BLOCK + 1, none)
    bench.proposer.complete_draft_kv(request)
    shared = bench.tables.tables_np[0][0, :2].tolist()
    bench.proposer.forget_request(0)
    # A request that is gone has nothing to complete, and takes nothing down.
    bench.proposer.complete_draft_kv(request)
    bench.begin(1, prefix + bench.prompt(3), shared)
    assert bench.step([1], [0]) == [0]
    assert bench.step([1], [K]) == [K]
    bench.proposer.forget_request(1)


def test_a_request_without_hidden_states_gets_no_drafts(bench):
    bench.begin(3, bench.prompt(18))
    assert bench.step([3], [K]) == [0]
    assert bench.step([3], [K]) == [K]
    bench.begin(3, bench.token_ids_np[3, : bench.known[3]].tolist())  # preempted, resumed
    assert bench.step([3], [K]) == [0]
    assert bench.step([3], [K]) == [K]
    bench.proposer.forget_request(3)


def test_a_call_with_nothing_new_runs_nothing_and_changes_nothing(bench):
    bench.begin(3, bench.prompt(9))
    bench.step([3], [0])
    of_step = bench.token_ids_np, np.array([3], np.int32), bench.known[[3]]
    first = bench.proposer.propose(DraftRequest(*of_step, np.array([K], np.int32)))
    again = bench.proposer.propose(DraftRequest(*of_step, np.array([0], np.int32)))
    assert again.counts_np.tolist() == [0]
    assert not np.array(again.token_ids).any()
    repeated = bench.proposer.propose(DraftRequest(*of_step, np.array([K], np.int32)))
    np.testing.assert_array_equal(np.array(repeated.token_ids), np.array(first.token_ids))
    bench.proposer.forget_request(3)
