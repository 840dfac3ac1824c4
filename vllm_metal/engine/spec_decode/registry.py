# SPDX-License-Identifier: Apache-2.0
"""The methods of --speculative-config: a table with one row per method.

The platform reads the table before a model is loaded, so this module imports neither MLX nor vLLM;
a method's own code is imported when an engine uses it. To add a method, add a module and a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_metal.engine.models.mtp_families import MTP_FAMILIES
from vllm_metal.engine.spec_decode.block_config import KINDS
from vllm_metal.settings import draft_methods
from vllm_metal.settings.draft_methods import KEEPING_KV, READING_KV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.batch.requests import Requests
    from vllm_metal.engine.models.parts import ModelParts
    from vllm_metal.engine.spec_decode.network import DraftNetwork
    from vllm_metal.engine.spec_decode.proposer import Proposer
    from vllm_metal.engine.spec_decode.speculator import Speculator
    from vllm_metal.engine.vision.column import ImageColumn


@dataclass(frozen=True)
class Method:
    """A speculative decoding method."""

    names: tuple[str, ...]  # of `method` in --speculative-config, as vLLM spells them
    #: "module:class" within spec_decode: a DraftNetwork where `has_network`, else a TextProposer.
    code: str
    drafts_come_from: str  # for users, like the next
    needs: str
    has_network: bool  # weights, which are loaded beside the target's
    schedules_ahead: bool = True  # False: vLLM turns async scheduling off
    #: Default of --additional-config prompt_lookup. A draft model copies well by itself; text needs
    #: no network.
    looks_up: bool = False
    #: Those served of draft checkpoints, as vLLM names them; empty: the code tells as it loads.
    architectures: tuple[str, ...] = ()
    #: Keys of the draft checkpoint's config.json, the first one that is there, for the width of the
    #: target's hidden states that it reads; empty: config.json does not say.
    hidden_size_keys: tuple[str, ...] = ()

    @property
    def keeps_kv(self) -> bool:
        """Whether the draft network keeps K/V of its own, in the same blocks as the target's."""
        keeping = not KEEPING_KV.isdisjoint(self.names)
        return keeping and READING_KV.isdisjoint(self.architectures)

    @property
    def needs_model(self) -> bool:
        """Whether `model` must name a checkpoint; MTP layers may be in the target's own."""
        return self.has_network and "mtp" not in self.names

    def load(self) -> Any:
        """Imports the class that `code` names, and MLX with it."""
        module, _, name = self.code.partition(":")
        return getattr(import_module(f"{__package__}.{module}"), name)


#: Generations of EAGLE heads, whose layers are Llama's, by architecture, as vLLM names it.
EAGLE_HEADS = {
    "EagleLlamaForCausalLM": "eagle",
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",
}
METHODS = (
    Method(
        ("ngram", "ngram_gpu"),
        "ngram:NgramProposer",
        "the request's own text; for edits, extraction, agents",
        "optional: `prompt_lookup_min`, `prompt_lookup_max`",
        has_network=False,
    ),
    Method(
        ("suffix",),
        "suffix:SuffixProposer",
        "the request's own text, and past outputs with the same `cache_salt`",
        "optional: vLLM's `suffix_decoding_*`",
        has_network=False,
        schedules_ahead=False,
    ),
    Method(
        ("draft_model",),
        "draft_model:DraftModel",
        "a smaller model of the same vocabulary, its KV in the same pool",
        "`model`",
        has_network=True,
    ),
    Method(
        ("eagle", "eagle3"),
        "eagle:Eagle",
        "a draft head, in Llama's layout, on the model's hidden states",
        "`model`",
        has_network=True,
        architectures=tuple(EAGLE_HEADS),
        hidden_size_keys=("target_hidden_size", "hidden_size"),
        looks_up=True,
    ),
    *(
        Method(
            (name,),
            "block:BlockNetwork",
            f"a block of tokens in one pass over the model's hidden states: {title}",
            "`model`",
            has_network=True,
            architectures=tuple(each for each, kind in KINDS.items() if kind.method == name),
            looks_up=True,
        )
        for name, title in (("dflash", "DFlash, DFlash2"), ("dspark", "DSpark"))
    ),
    Method(
        ("medusa",),
        "medusa:Medusa",
        "Medusa heads",
        "`model`",
        has_network=True,
        schedules_ahead=False,
    ),
    Method(
        ("mlp_speculator",),
        "mlp_speculator:MLPSpeculator",
        "IBM's MLP speculators",
        "`model`",
        has_network=True,
        schedules_ahead=False,
    ),
    Method(
        ("mtp",),
        "mtp:MTP",
        f"the model's own MTP layer: {', '.join(f.title for f in MTP_FAMILIES.values())}",
        "an MTP layer: in the served checkpoint, in a split folder (below), or in the checkpoint "
        "or folder that `model` names",
        has_network=True,
        architectures=tuple(MTP_FAMILIES),
        looks_up=True,
    ),
    Method(
        ("mtp",),
        "assistant:AssistantNetwork",
        "Gemma 4's assistant, which reads the model's own KV and keeps none",
        "an assistant: in a folder next to the model's (below), or in the folder that `model` "
        "names",
        has_network=True,
        architectures=tuple(READING_KV),
        hidden_size_keys=("backbone_hidden_size",),
        looks_up=True,
    ),
)
#: What `method` in --speculative-config may be.
SPECULATIVE_METHODS = tuple(dict.fromkeys(name for method in METHODS for name in method.names))
#: The first row of each method.
BY_NAME: Mapping[str, Method] = {
    name: next(method for method in METHODS if name in method.names) for name in SPECULATIVE_METHODS
}


def architectures_of(name: str) -> tuple[str, ...]:
    """Architectures of draft checkpoints that a method is served with; empty: see Method."""
    return tuple(each for row in METHODS if name in row.names for each in row.architectures)


def method_of(config: VllmConfig) -> Method | None:
    """The row of the configured method and draft checkpoint; None without speculation.

    Raises:
        ValueError: the method is unknown.
    """
    speculation = config.speculative_config
    if speculation is None:
        return None
    rows = [method for method in METHODS if speculation.method in method.names]
    if not rows:
        raise ValueError(
            f"--speculative-config method {speculation.method!r} is not supported: choose one of "
            f"{', '.join(SPECULATIVE_METHODS)}"
        )
    draft = getattr(speculation, "draft_model_config", None)
    names = set(getattr(draft, "architectures", None) or ())
    return next((row for row in rows if not names.isdisjoint(row.architectures)), rows[0])


def drafts_for_others(config: VllmConfig) -> bool:
    """Whether this engine only prefills for other engines (kv_producer), and so does not draft."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_role == "kv_producer"


def propose_nothing(config: VllmConfig) -> None:
    """Turns off drafts in the configuration if the engine only prefills for other engines.

    The engine's scheduler then reserves neither tokens nor blocks for drafts. A method with draft
    K/V, which the engine computes, remains with 0 drafts per step.
    """
    method, speculation = method_of(config), config.speculative_config
    if method is None or speculation is None or not drafts_for_others(config):
        return
    if method.keeps_kv:
        speculation.num_speculative_tokens = 0
        speculation.num_speculative_tokens_per_batch_size = None  # numbers up to that one
    else:
        config.speculative_config = None


def keep_last_blocks(config: VllmConfig) -> None:
    """Makes prefix hits include their last block if no draft K/V in it depend on the next token."""
    if config.speculative_config is not None and not draft_methods.keeps_kv(config):
        config.speculative_config.disable_eagle_block_drop = True


def load_network(
    config: VllmConfig, target: ModelParts, images: ImageColumn | None = None
) -> DraftNetwork | None:
    """Loads the draft network; None if the method has none, or this engine does not need it.

    Args:
        config: vLLM's; its speculative_config names the method and its checkpoint.
        target: the target model; some networks read its hidden states.
        images: the target's; None: only its text is served.

    Raises:
        ValueError: the method is unknown.
        ModelLoadError: the checkpoint cannot be loaded, or does not fit the target.
        NotImplementedError: the network's layers, or its inputs from the target, are not supported.
    """
    method = method_of(config)
    if method is None or not method.has_network:
        return None
    if drafts_for_others(config) and not method.keeps_kv:
        return None
    network: DraftNetwork = method.load()(config, target)
    if images is not None:
        network.read_images(images)
    return network


def make_speculator(
    config: VllmConfig,
    requests: Requests,
    network: Proposer | None,
    most_drafts: int | None = None,
) -> Speculator | None:
    """Makes the speculator; None if this engine does not draft.

    Args:
        config: vLLM's.
        requests: requests to draft for.
        network: the draft network's proposer; None if the method has no network.
        most_drafts: most drafts of all requests in a step; None: no limit.

    Raises:
        ValueError: the method is unknown, or --additional-config has an unknown key.
    """
    from vllm_metal.engine.spec_decode.adaptive import AdaptiveDraftLengths, DraftLengths
    from vllm_metal.engine.spec_decode.prompt_lookup import PromptLookup
    from vllm_metal.engine.spec_decode.speculator import Speculator
    from vllm_metal.settings.additional_config import AdditionalConfig

    method, speculation = method_of(config), config.speculative_config
    if method is None or speculation is None or drafts_for_others(config):
        return None
    num_drafts = speculation.num_speculative_tokens
    max_num_reqs = config.scheduler_config.max_num_seqs
    given = AdditionalConfig.of(config)
    lengths: DraftLengths
    if given.fixed_draft_length:
        lengths = DraftLengths(num_drafts)
    else:
        lengths = AdaptiveDraftLengths(num_drafts, max_num_reqs)
    proposer = network if method.has_network else method.load().from_config(speculation)
    assert proposer is not None  # the worker has loaded the network before
    looks_up = method.looks_up if given.prompt_lookup is None else given.prompt_lookup
    lookup = PromptLookup(max_num_reqs) if looks_up else None
    return Speculator(requests, proposer, lengths, num_drafts, most_drafts, lookup)
