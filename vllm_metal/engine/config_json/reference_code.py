# SPDX-License-Identifier: Apache-2.0
"""Finds which keys of config.json a model's reference implementations read.

References are transformers' configuration and modeling files, vLLM's model file, and the folder's
own code named in `auto_map`. All are searched as text, for attribute names and quoted words; none
is imported or run. This overestimates: a key may be checked although no reference reads it, but no
key that a reference names is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_metal.engine.config_json import reference_classes
from vllm_metal.engine.config_json.reference_classes import MISSING, literal, same
from vllm_metal.patches.mlx_patches import mlx_vlm_text
from vllm_metal.patches.mlx_patches.replacing import MLX_VLM

Config = Mapping[str, Any]

_COMMENT = re.compile(r"#.*")
#: A read of a key: an attribute that is neither called nor only assigned to, or a quoted word.
_READ = r"""(?:\b(\w+)|[)\]])\.{key}\b(?!\s*(?:\(|(?::[^=\n()]+)?=[^=]))|["']{key}["']"""
#: A default beside a read: `getattr(config, "key", default)` and `config.get("key", default)`.
_FALLBACK = r"""(?:getattr\(\s*[\w.]+,\s*|\.get\(\s*)["']{key}["'],\s*([^()\n]+?),?\s*\)"""
#: A local variable assigned from an attribute.
_ALIAS = r"\b{name}\s*=\s*[\w.]*\b(\w+)[ \t]*(?:$|if\b)"
#: Fields of vLLM's configurations that hold other vLLM configurations; `hf_config` is the model's.
_SETTINGS = re.compile(r"^    ((?!hf_)\w+_config): [A-Z]\w*Config\b", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*from (\.[\w.]*|vllm\.\w[\w.]*) import\s*(\([^)]*\)|[^\n]+)", re.MULTILINE
)
_DEFINITION = re.compile(r"^(?:class|def) (\w+)", re.MULTILINE)
#: An entry of vLLM's registry; an entry of transformers' class tables.
_LISTED = re.compile(r'"(\w+)":\s*\(\s*"([\w.]+)",')
_MAPPED = re.compile(r'\(\s*"([\w-]+)",\s*"(\w+)"\s*\)')
_REGISTERED = re.compile(r'^    "?([\w-]+)"?\s*[=:]', re.MULTILINE)
#: The default share of a rope in transformers' classes.
_SHARE = re.compile(r'setdefault\("partial_rotary_factor", (?:kwargs\.\w+\("\w+", )?([\d.]+)\)')
#: A RoPE key that a class reads only under a name of its own.
_RENAMED = re.compile(r'rope_parameters\.setdefault\("(\w+)", kwargs\.\w+\("(\w+)"')
_BASES = {"global": "rope_theta", "local": "rope_local_base_freq"}  # by layer type
#: Base class of configurations; transformers renamed it.
_CONFIG_BASE = re.compile(r"\(PreTrainedConfig|\(PretrainedConfig")
_THETA = 10_000.0
#: Shared files of transformers that read keys for every family.
_SHARED = (
    "cache_utils.py",
    "configuration_utils.py",
    "integrations/moe.py",
    "masking_utils.py",
    "modeling_layers.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
)
#: vLLM's files that every model imports and that read no family's keys.
_COMMON_FILES = frozenset({"adapters", "interfaces", "interfaces_base", "utils"})
#: vLLM's registry entry for models that transformers implements.
_LEFT_TO_TRANSFORMERS = "transformers"
#: Where vLLM keeps code shared by models.
_MODEL_FOLDERS = (["model_executor", "models"], ["transformers_utils", "configs"])
_WHOLE = ""  # in place of a definition's name
#: transformers' tables of classes by model_type, and of folders named differently.
_CLASSES = Path("models/auto/modeling_auto.py")
_FOLDERS = Path("models/auto/auto_mappings.py")
_FOLDER_TABLE = "\nSPECIAL_MODEL_TYPE_TO_MODULE_NAME"
#: Maps types of text models in published files to the type that transformers reads them as.
_TEXT_TYPES = dict.fromkeys(("minimax_m3", "minimax_m3_text"), "minimax_m3_vl_text")


@dataclass(frozen=True)
class Reference:
    """The reference implementations of one model, with their code and defaults."""

    files: tuple[str, ...]  # for messages; empty if none is installed
    is_complete: bool  # has transformers' modeling files of the model_type
    texts: tuple[str, ...]  # of the files and of the code that they share with others
    #: Defaults of transformers' class, and aliases of keys.
    declared: Mapping[str, Any]
    aliases: Mapping[str, str]
    rope: Mapping[str, float]  # defaults for a rope's base and share
    rope_names: Mapping[str, str]  # names of a rope's base and share outside rope_parameters
    absent_rope: Mapping[str, Any] | None  # default rope_parameters, if more than base and share
    overwritten: frozenset[str]  # keys that it always computes from others
    beside_text: frozenset[str]  # keys of its image and audio configurations
    #: Defaults of the folder's own class, or else of vLLM's.
    parameters: Mapping[str, Any]

    def reads(self, key: str) -> bool:
        """Whether a key may affect what the reference computes; True without a reference."""
        return not self.files or any(key in text and _reads(text, key) for text in self.texts)

    def is_default(self, key: str, value: Any) -> bool:
        """Whether a value is the reference's default, so that the key could be omitted."""
        for defaults in (self.declared, self.parameters):
            if key in defaults:
                return same(defaults[key], value)
        pattern = re.compile(_FALLBACK.format(key=re.escape(key)))
        found = [each for text in self.texts if key in text for each in pattern.findall(text)]
        return bool(found) and all(same(literal(each), value) for each in found)

    def has_types_of_layers(self, key: str) -> bool:
        """Whether `layer_types` decides which layers use a key that the class does not declare."""
        return "layer_types" in self.declared and key not in self.declared


def reference_of(
    config: Config, folder: Path | None = None, around: Config | None = None
) -> Reference:
    """Finds the references of a config.json, or of a `text_config` within `around`.

    `folder`: the model's folder, if it has code of its own.
    """
    inner = config.get("text_config")
    around = around or {}
    parts = [config, around, *([inner] if isinstance(inner, Mapping) else [])]
    types = [_type_of(part) for part in parts if part.get("model_type")]
    names = [str(name) for part in parts for name in part.get("architectures") or ()]
    own = [] if folder is None else _own_code({**around, **config}, folder)
    return _reference(_type_of(config), tuple(types), tuple(names), tuple(own))


def _type_of(config: Config) -> str:
    stated = str(config.get("model_type") or "")
    return _TEXT_TYPES.get(stated, stated)


def listed_by_vllm(table: str) -> dict[str, str]:
    """Maps architectures in a table of vLLM's registry to their modules."""
    package = _package("vllm")
    if package is None:
        return {}
    text = _text(package / "model_executor" / "models" / "registry.py")
    return dict(_LISTED.findall(text.partition(f"\n{table}")[2].partition("\n}")[0]))


@functools.cache
def decoders_of_transformers() -> frozenset[str]:
    """Returns transformers' architectures that generate text, many of which vLLM does not list."""
    if (transformers := _package("transformers")) is None:
        return frozenset()
    text = _text(transformers / "models" / "auto" / "modeling_auto.py")
    text = text.partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("\n)")[0]
    return frozenset(name for _, name in _MAPPED.findall(text))


@functools.cache
def families() -> frozenset[str]:
    """Returns each model_type for which transformers or vLLM has a configuration class."""
    found: set[str] = set()
    if (transformers := _package("transformers")) is not None:
        text = _text(transformers / _FOLDERS).partition("\nCONFIG_MAPPING_NAMES")[2]
        found |= {key for key, _ in _MAPPED.findall(text.partition("\n)")[0])}
    if (vllm := _package("vllm")) is not None:
        text = _text(vllm / "transformers_utils" / "config.py").partition("\n_CONFIG_REGISTRY")[2]
        found |= set(_REGISTERED.findall(text.partition("\n)")[0]))
    return frozenset(found)


def is_used(args: type, key: str) -> bool:
    """Whether a library's module uses a field of its arguments, instead of only naming it."""
    if args.__module__.startswith(MLX_VLM):
        return any(_reads(_text(path), key) for path in mlx_vlm_text.sources(args))
    # A patch may have derived the class from the library's.
    classes = [each for each in args.__mro__ if vars(each).get("__dataclass_fields__")]
    files = [inspect.getsourcefile(each) for each in classes]
    return any(file is None or _reads(_text(Path(file)), key) for file in files)


@functools.cache
def _reference(
    model_type: str, types: tuple[str, ...], architectures: tuple[str, ...], own: tuple[Path, ...]
) -> Reference:
    by_transformers = _transformers_files(types, architectures)
    files = (*by_transformers, *_vllm_files(architectures), *own)
    declared: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    rope: dict[str, float] = {"rope_theta": _THETA} if by_transformers else {}
    rope_names: dict[str, str] = {}
    beside_text: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    absent_rope: dict[str, Any] | None = None
    for path in by_transformers:
        if not path.name.startswith("configuration_"):
            continue
        classes = list(reference_classes.classes_of(path, model_type))
        for each in classes:
            declared = dict(reference_classes.fields(each)) | declared
            aliases = reference_classes.aliases(each) | aliases
            beside_text |= reference_classes.beside_text(each)
            overwritten |= reference_classes.overwritten(each)
            absent_rope = absent_rope or reference_classes.absent_rope(each)
            theta = reference_classes.assigned(each).get("default_theta")
            if isinstance(theta, dict):
                rope = {_BASES[kind]: base for kind, base in theta.items() if kind in _BASES}
            elif theta is not None:
                rope["rope_theta"] = theta
        if classes and (shares := _SHARE.findall(_text(path))):
            rope["partial_rotary_factor"] = float(shares[0])
        if classes:
            rope_names |= dict(_RENAMED.findall(_text(path)))
        if classes and f"{reference_classes.ROPE_IS_ABSENT}:" in _text(path) and not absent_rope:
            rope = {}  # the default has more than a base and a share, but is not a literal
    texts = tuple(_texts([*files, *(_shared() if by_transformers else ())]))
    parameters = _parameters_by_vllm(texts)
    for path in own:
        if path.name.startswith("configuration_"):
            parameters |= reference_classes.parameters(_text(path))
    return Reference(
        tuple(f"{path.parent.name}/{path.name}" for path in files),
        any(path.name.startswith("modeling_") for path in _transformers_files((model_type,), ())),
        texts,
        declared,
        aliases,
        rope,
        rope_names,
        absent_rope,
        overwritten,
        beside_text,
        parameters,
    )


def _parameters_by_vllm(texts: Iterable[str]) -> dict[str, Any]:
    """Returns the defaults on which vLLM's configuration classes in `texts` agree."""
    found: dict[str, Any] = {}
    for text in texts:
        if _CONFIG_BASE.search(text):
            for key, value in reference_classes.parameters(text).items():
                agreed = key not in found or same(found[key], value)
                found[key] = value if agreed else MISSING
    return {key: value for key, value in found.items() if value is not MISSING}


def _transformers_files(types: Iterable[str], architectures: Iterable[str]) -> list[Path]:
    """Finds configuration and modeling files by model_type or architecture."""
    root = _package("transformers")
    if root is None:
        return []
    by_class = {name: key for key, name in _MAPPED.findall(_text(root / _CLASSES))}
    table = _text(root / _FOLDERS).partition(_FOLDER_TABLE)[2].partition("\n)")[0]
    folders = dict(_MAPPED.findall(table))
    known = [*types, *(by_class[name] for name in architectures if name in by_class)]
    found: list[Path] = []
    for model_type in known:
        folder = root / "models" / folders.get(model_type, model_type.replace("-", "_"))
        found += [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
    return list(dict.fromkeys(found))


def _vllm_files(architectures: Iterable[str]) -> list[Path]:
    package = _package("vllm")
    if package is None:
        return []
    root = package / "model_executor" / "models"
    listed = dict(_LISTED.findall(_text(root / "registry.py")))
    found: list[Path] = []
    for name in architectures:
        module = listed.get(name, _LEFT_TO_TRANSFORMERS)
        if module != _LEFT_TO_TRANSFORMERS:
            found += _files_of(module, package, root)
    return list(dict.fromkeys(found))


def _files_of(module: str, package: Path, root: Path) -> list[Path]:
    """Returns the files of a module or package; `module` is absolute if it has a dot."""
    location = package.joinpath(*module.split(".")[1:]) if "." in module else root / module
    if location.is_dir():
        return sorted(location.rglob("*.py"))
    file = location.with_suffix(".py")
    return [file] if file.is_file() else []


def _own_code(config: Config, folder: Path) -> list[Path]:
    """Returns the existing Python files that `auto_map` names."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return []
    named: list[Path] = []
    for entry in auto_map.values():
        for name in entry if isinstance(entry, list | tuple) else (entry,):
            if isinstance(name, str) and "--" not in name:  # "--" refers to another repository
                named.append(folder.joinpath(*name.split(".")[:-1]).with_suffix(".py"))
    return [path for path in dict.fromkeys(named) if path.is_file()]


def _shared() -> list[Path]:
    root = _package("transformers")
    return [] if root is None else [root / name for name in _SHARED if (root / name).is_file()]


def _texts(files: Iterable[Path]) -> Iterator[str]:
    """Yields the texts of files and of the model code that they import."""
    seen: set[tuple[Path, str]] = set()
    todo = [(path, _WHOLE) for path in files]
    while todo:
        path, name = todo.pop()
        if (path, name) in seen:
            continue
        seen.add((path, name))
        text = _text(path) if name == _WHOLE else _definitions(path).get(name, "")
        yield text
        if name != _WHOLE:
            todo += [(path, other) for other in _definitions(path) if other in text]
        todo += [location for other, location in _imported(path).items() if other in text]


@functools.cache
def _definitions(path: Path) -> dict[str, str]:
    """Returns the source of a file's classes and functions by name, without decorators."""
    text = _text(path)
    starts = [*_DEFINITION.finditer(text)]
    ends = [each.start() for each in starts[1:]] + [len(text)]
    return {
        each.group(1): text[each.start() : end] for each, end in zip(starts, ends, strict=False)
    }


@functools.cache
def _imported(path: Path) -> dict[str, tuple[Path, str]]:
    """Maps names imported by a file from model files to (file, name there)."""
    found: dict[str, tuple[Path, str]] = {}
    for module, names in _IMPORT.findall(_text(path)):
        if (file := _file_of(module, path)) is None or file.stem in _COMMON_FILES:
            continue
        for name, _, own in (
            each.strip().partition(" as ") for each in names.strip("()").split(",")
        ):
            if name:
                found[own.strip() or name] = (file, name)
    return found


def _file_of(module: str, path: Path) -> Path | None:
    """Returns the model file that an import in `path` refers to; None for other files."""
    if module.startswith("vllm."):
        words = module.split(".")[1:]
        package = _package("vllm")
        if package is None or (words[0] != "models" and words[:2] not in _MODEL_FOLDERS):
            return None
        location = package.joinpath(*words)
    else:
        location = path.parent
        for _ in range(len(module) - len(module.lstrip(".")) - 1):
            location = location.parent
        location = location.joinpath(*filter(None, module.split(".")))
    file = location.with_suffix(".py")
    if not file.is_file():
        file = location / "__init__.py"
    shared = _package("transformers")
    outside = shared is not None and file.parent in (
        shared,
        shared / "utils",
        shared / "integrations",
    )
    return file if file.is_file() and not outside else None


@functools.cache
def _text(path: Path) -> str:
    return _COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace"))


def _reads(text: str, key: str) -> bool:
    """Whether code reads a key of the model's configuration (not one of vLLM's own)."""
    for match in re.finditer(_READ.format(key=re.escape(key)), text):
        if (owner := match.group(1)) is None:
            return True
        known = {owner, *re.findall(_ALIAS.format(name=owner), text, re.MULTILINE)}
        if known.isdisjoint(_vllm_config_names()):
            return True
    return False


@functools.cache
def _vllm_config_names() -> frozenset[str]:
    """Returns names of vLLM's own configurations, whose attributes are no keys of config.json."""
    package = _package("vllm")
    if package is None:
        return frozenset()
    texts = [_text(package / "config" / name) for name in ("vllm.py", "model.py")]
    found = {name for text in texts for name in _SETTINGS.findall(text)}
    return frozenset(found | {"vllm_config"})


@functools.cache
def _package(name: str) -> Path | None:
    """Returns a package's folder; None if it is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])
