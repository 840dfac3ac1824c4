# SPDX-License-Identifier: Apache-2.0
"""Imports some modules of vLLM without the rest of it.

vLLM's KV cache planning is arithmetic, yet importing it takes ten seconds: it pulls in torch's
compiler, transformers and most of vLLM. Here a command that only plans imports it in two.
"""

# Remove when vLLM's planning of a cache imports only what it uses. Read against vLLM 0.33.

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: Modules that are really imported, by root package; a trailing dot means a package with all its
#: modules. All other modules of these roots are stubs.
_IMPORTED: Mapping[str, Collection[str]] = {
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
    # mlx-lm's model modules; the package itself imports generation, and with it tokenizers.
    "mlx_lm": (
        "mlx_lm._version",
        "mlx_lm.kernels.",
        "mlx_lm.models.",
        "mlx_lm.utils",
    ),
    "transformers": (),
}
#: Functions that vLLM's planning calls, and their results in a process without workers.
_RESULTS: Mapping[str, Callable[[], Any]] = {
    "vllm.config.get_current_vllm_config_or_none": lambda: None,
    "vllm.distributed.parallel_state.is_global_first_rank": lambda: True,
    "vllm.distributed.parallel_state.is_local_first_rank": lambda: True,
}


def plan_only() -> None:
    """Makes every vLLM module that planning does not need a stub, in this process.

    A name from a stub is a class, for annotations and as a base; calling it, or reading an
    attribute of it, raises an error that names it. No engine can be made in the process afterwards.
    If vLLM is already imported, nothing changes.
    """
    if "vllm" not in sys.modules:
        sys.meta_path.insert(0, _StubFinder())


class _Missing(type):
    # A name of a stub module.

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise ImportError(f"{cls.__module__}.{cls.__name__} is not imported where vLLM only plans")

    def __getattr__(cls, name: str) -> Any:
        if name == "__get_pydantic_core_schema__":  # pydantic then accepts any value of a stub type
            return lambda source, handler: {"type": "any"}
        raise AttributeError(f"{cls.__module__}.{cls.__name__} is a stub and has no {name}")


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        result = _RESULTS.get(f"{self.__name__}.{name}")
        found = result or _Missing(name, (), {"__module__": self.__name__})
        setattr(self, name, found)  # the same class next time
        return found


class _StubFinder:
    """Finds stub modules, and leaves those of _IMPORTED to Python's own finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        imported = _IMPORTED.get(name.partition(".")[0])
        if imported is None or any(
            f"{name}.".startswith(each) if each.endswith(".") else name == each for each in imported
        ):
            return None
        found = PathFinder.find_spec(name, path)
        if found is None:
            return None
        stub = ModuleSpec(name, self, origin=found.origin)  # type: ignore[arg-type]
        stub.submodule_search_locations = found.submodule_search_locations
        return stub

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty."""
