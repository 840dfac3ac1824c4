# SPDX-License-Identifier: Apache-2.0
"""Reports which platform vLLM chooses, and which names of vLLM differ from what we rely on."""

from importlib.metadata import entry_points

from vllm_metal.device.child import say


def main() -> None:
    say(stage="importing vLLM")
    say(plugins=[f"{p.name} ({p.value})" for p in entry_points(group="vllm.platform_plugins")])
    from vllm.platforms import current_platform

    chosen = type(current_platform)
    say(platform=f"{chosen.__module__}.{chosen.__qualname__}")
    say(stage="looking for what the plugin uses of vLLM")
    from vllm_metal.vllm_patches.probe import probe

    say(changed=[str(finding) for finding in probe()])


if __name__ == "__main__":
    main()
