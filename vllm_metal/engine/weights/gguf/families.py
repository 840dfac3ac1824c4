# SPDX-License-Identifier: Apache-2.0
"""Determines the GGUF model family that a file belongs to."""

from .dense_families import DENSE
from .family import Family, has_experts
from .mixed_families import MIXED
from .source import ConversionError, GGUFSource

#: The first family that has a file's architecture and accepts the file.
FAMILIES: tuple[Family, ...] = (*DENSE, *MIXED)


def family_of(source: GGUFSource) -> Family:
    """Finds a file's family for conversion.

    Raises ConversionError: `convert` does not support the family; the message lists those it does.
    """
    known = sorted(family.architecture for family in FAMILIES if family.converts)
    if source.architecture not in known:
        raise ConversionError(
            f"{source.path}: architecture {source.architecture!r} cannot be converted; "
            f"supported: {', '.join(known)}"
        )
    if has_experts(source):
        raise ConversionError(
            f"{source.path}: a mixture-of-experts {source.architecture} cannot be converted; "
            f"supported: dense models of {', '.join(known)}"
        )
    return next(family for family in FAMILIES if family.architecture == source.architecture)


def served_family(source: GGUFSource) -> Family:
    """Finds a file's family for serving.

    Raises ConversionError: the file is not a language model, or its family is not supported.
    """
    architecture, path = source.architecture, source.path
    if source.get("general.type") == "adapter":
        raise ConversionError(
            f"{path} is a LoRA adapter, not a model: GGUF adapters are not supported. Use "
            "--lora-modules with the adapter's PEFT folder"
        )
    if architecture == "clip" or source.get("general.type") == "mmproj":
        raise ConversionError(
            f"{path} is a vision encoder (mmproj), not a language model: images are not "
            "supported with GGUF files. Serve the language model's own file, or a checkpoint in "
            "safetensors"
        )
    families = [family for family in FAMILIES if family.architecture == architecture]
    if not families:
        known = ", ".join(sorted({family.architecture for family in FAMILIES}))
        raise ConversionError(
            f"{path}: GGUF architecture {architecture!r} is not supported. Supported: {known}. "
            "Serve the model's checkpoint in safetensors"
        )
    found = next((family for family in families if family.when(source)), None)
    if found is None:
        kind = "with" if has_experts(source) else "without"
        raise ConversionError(
            f"{path}: {architecture} {kind} experts is not supported. Serve the model's checkpoint "
            "in safetensors"
        )
    return found
