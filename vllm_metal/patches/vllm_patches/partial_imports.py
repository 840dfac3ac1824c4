# SPDX-License-Identifier: Apache-2.0
"""Some modules of vLLM's, imported without the rest of it.

vLLM's planning of the KV cache is arithmetic, yet an import of it takes ten seconds: it brings
torch's compiler, transformers, and most of vLLM. A command that only plans imports it here in two.
"""

# Remove when vLLM's planning of a cache imports only what it uses. Read against vLLM 0.33.

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: The modules that are imported as they are, by root; a name that ends in a dot stands for a
#: package and all that is in it. All others of these roots are hollow.
_WHOLE: Mapping[str, Collection[str]] = {
    "vllm": (
        "vllm.config.attention",
        "vllm.config.cache",
        "vllm.config.fault_tolerance",
        "vllm.config.model",
        "vllm.config.parallel",
        "vllm.config.scheduler",
        "vllm.config.utils",
        "vllm.distributed.utils",  # which layers a rank has
        "vllm.envs",
        "vllm.exceptions",
        "vllm.logger",
        "vllm.logging_utils.",
        "vllm.platforms",
        "vllm.platforms.interface",
        "vllm.plugins",
        "vllm.sampling_params",
        "vllm.utils.",
        "vllm.v1.attention.backends.registry",
        "vllm.v1.core.kv_cache_planning",
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.core.single_type_kv_cache_manager",
        "vllm.v1.hisparse.layout",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.kv_cache_layout",
        "vllm.v1.kv_cache_spec_registry",
        "vllm.v1.serial_utils",
    ),
    # mlx-lm's modules of models; the package itself imports generation, and with it tokenizers.
    "mlx_lm": (
        "mlx_lm._version",
        "mlx_lm.kernels.",
        "mlx_lm.models.",
        "mlx_lm.utils",
    ),
    "transformers": (),
}
#: Functions that vLLM's planning calls, and what they say in a process without workers.
_SAID: Mapping[str, Callable[[], Any]] = {
    "vllm.config.get_current_vllm_config_or_none": lambda: None,
    "vllm.distributed.parallel_state.is_global_first_rank": lambda: True,
    "vllm.distributed.parallel_state.is_local_first_rank": lambda: True,
}


def plan_only() -> None:
    """Makes every module of vLLM's that planning does not need a hollow one, in this process.

    Whatever is taken from a hollow module is a class of that name, for annotations and as a base;
    whoever calls it, or reads an attribute of it, gets an error that names it. So nothing is
    computed without what it depends on. No engine can be made in the process afterwards. Where
    vLLM is imported already, nothing changes.
    """
    if "vllm" not in sys.modules:
        sys.meta_path.insert(0, _StubFinder())


class _Missing(type):
    """A name of a hollow module."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise ImportError(f"{cls.__module__}.{cls.__name__} is not imported where vLLM only plans")

    def __getattr__(cls, name: str) -> Any:
        if name == "__get_pydantic_core_schema__":
            return lambda source, handler: {"type": "any"}
        raise AttributeError(f"{cls.__module__}.{cls.__name__} is a stub and has no {name}")


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        said = _SAID.get(f"{self.__name__}.{name}")
        return said or _Missing(name, (), {"__module__": self.__name__})


class _StubFinder:
    """Finds hollow modules, and leaves those of _WHOLE to Python's own finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        whole = _WHOLE.get(name.partition(".")[0])
        if whole is None or any(
            f"{name}.".startswith(each) if each.endswith(".") else name == each for each in whole
        ):
            return None
        found = PathFinder.find_spec(name, path)
        if found is None:
            return None
        hollow = ModuleSpec(name, self, origin=found.origin)  # type: ignore[arg-type]
        hollow.submodule_search_locations = found.submodule_search_locations
        return hollow

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module hollow."""
