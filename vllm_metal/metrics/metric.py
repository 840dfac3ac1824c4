# SPDX-License-Identifier: Apache-2.0
"""Metric: how a figure is shown in /metrics, written beside the field that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram

#: A value as it is; what is added to a count; a count since the engine started; an observation.
Kind = Literal["gauge", "counter", "total", "histogram"]
_KEY = "metric"


@dataclass(frozen=True)
class Metric:
    """One metric of an engine; fields whose metrics differ in `label` alone are series of one."""

    kind: Kind
    name: str  # as Prometheus has it, without the `_total` of counters
    help: str
    label: tuple[str, str] | None = None  # name and value; beside the model's and the engine's
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram

    def field(self, default: Any = MISSING) -> Any:
        """A field of a dataclass of figures, shown by this metric. None leaves it as it was."""
        return dataclass_field(default=default, metadata={_KEY: self})

    def registered(self, labels: Sequence[str]) -> Gauge | Counter | Histogram:
        """Makes it in Prometheus' registry, with labels before its own."""
        names = (*labels, *(self.label or ())[:1])
        if self.kind == "gauge":
            return Gauge(self.name, self.help, names, multiprocess_mode="mostrecent")
        if self.kind == "histogram":
            return Histogram(self.name, self.help, names, buckets=self.buckets)
        return Counter(self.name, self.help, names)


class Shown:
    """The metrics of figures in Prometheus' registry."""

    def __init__(self, figures: type, labels: Sequence[str]) -> None:
        """Registers them.

        Args:
            figures: a dataclass whose fields are made with `Metric.field`.
            labels: names that all of them have.
        """
        every = ((each.name, each.metadata.get(_KEY)) for each in fields(figures))
        self._fields: dict[str, Metric] = {name: metric for name, metric in every if metric}
        by_name = {metric.name: metric for metric in self._fields.values()}
        self._by_name: dict[str, Any] = {
            name: metric.registered(labels) for name, metric in by_name.items()
        }

    def of(self, *labels: str) -> Callable[[Mapping[str, Any]], None]:
        """Has all begin for the values of `labels`; returns what takes in figures, by field."""
        takers = []
        for name, metric in self._fields.items():
            series = self._by_name[metric.name].labels(*labels, *(metric.label or ())[1:])
            takers.append((name, _taker(metric.kind, series)))

        def take(figures: Mapping[str, Any]) -> None:
            for name, taker in takers:
                if (value := figures[name]) is not None:
                    taker(value)

        return take


def _taker(kind: Kind, series: Any) -> Callable[[float], None]:
    """What one value does to a series."""
    if kind == "total":
        return partial(_count_up_to, series, [0.0])
    simple: dict[Kind, str] = {"gauge": "set", "histogram": "observe", "counter": "inc"}
    take: Callable[[float], None] = getattr(series, simple[kind])
    return take


def _count_up_to(series: Counter, before: list[float], value: float) -> None:
    series.inc(value - before[0])
    before[0] = value
