# SPDX-License-Identifier: Apache-2.0
"""Grafana can load the dashboard, which shows every alert's metric."""

import json
import subprocess
from itertools import combinations

import pytest
from deploy.npm import install
from deploy.queries import DASHBOARD, dashboard, metrics_of, panel_queries, rules

#: A TypeScript program is made from JSON; TypeScript takes an enum of strings as its strings.
PROGRAM = """\
import type { Dashboard } from
  "./node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen";
type Plain<T> = T extends string ? `${T}` : T extends (infer E)[] ? Plain<E>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
export const dashboard: Plain<Dashboard> = """
OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext")
RESOLUTION = ("--moduleResolution", "bundler")


def compiled(text, folder):
    """Returns the compiler's findings in a dashboard."""
    (folder / "dashboard.ts").write_text(PROGRAM + text)
    command = ["node_modules/.bin/tsc", *OPTIONS, *RESOLUTION, "dashboard.ts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.slow  # 60 MB to fetch
def test_it_is_of_grafanas_published_schema(tmp_path):
    install(tmp_path, "@grafana/schema@13.2.3", "typescript@7.0.2")
    text = DASHBOARD.read_text()
    assert compiled(text, tmp_path) == ""
    for right, wrong in (('"gridPos"', '"gridpos"'), ('"palette-classic"', '"palette"')):
        assert "error" in compiled(text.replace(right, wrong), tmp_path)


def test_panels_have_a_place_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [panel["gridPos"] for panel in panels]
    assert all(cell["x"] + cell["w"] <= 24 for cell in cells)
    for one, other in combinations(cells, 2):
        beside = any(
            first[at] + first[size] <= second[at]
            for at, size in (("x", "w"), ("y", "h"))
            for first, second in ((one, other), (other, one))
        )
        assert beside, (one, other)


def test_every_panel_names_its_data_source_and_server():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            assert (
                panel["datasource"]
                == target["datasource"]
                == {
                    "type": "prometheus",
                    "uid": "${datasource}",
                }
            )
            assert target["expr"].count('instance=~"$instance"') == len(metrics_of(target["expr"]))


def test_what_an_alert_is_about_has_a_panel():
    shown = {_base(name) for _, query in panel_queries() for name in metrics_of(query)}
    for rule in rules("alert"):
        name = metrics_of(rule["expr"])[0]
        assert _base(name) in shown or name == "llm_time_to_first_token_seconds", rule["alert"]
    assert "vllm:time_to_first_token_seconds" in shown


def _base(name):
    """Removes the suffix that a metric's kind adds."""
    return name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")


def test_costs_have_panels():
    shown = {name for _, query in panel_queries() for name in metrics_of(query)}
    for rule in rules("record"):
        if "cost_per_million" in rule["record"] or "tenant" in rule["record"]:
            assert rule["record"] in shown


def test_it_is_laid_out_as_grafana_exports_it():
    assert DASHBOARD.read_text() == json.dumps(dashboard(), indent=2) + "\n"
