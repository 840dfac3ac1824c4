# SPDX-License-Identifier: Apache-2.0
"""Metric: one metric of ours in /metrics; of figures it stands beside the field that it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

#: A value as it is; what is added to a count; a count since the engine started; an observation.
Kind = Literal["gauge", "counter", "total", "histogram"]
_KEY = "metric"


@dataclass(frozen=True)
class Metric:
    """One metric. Two figures whose metrics differ in `known` alone are series of one metric."""

    kind: Kind
    name: str  # as Prometheus has it, without the `_total` of counters
    help: str
    labels: tuple[str, ...] = ()  # names; beside those of the model and the engine, of figures
    #: Values of the only label, whose series are there from the start, for a rate sees nothing of a
    #: series' first value. Of a figure: the one that it counts in.
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram

    def field(self) -> Any:
        """A field of a dataclass of figures, shown by this metric. None leaves it as it was."""
        return dataclass_field(metadata={_KEY: self})

    def registered(
        self, labels: Sequence[str] = (), registry: CollectorRegistry = REGISTRY
    ) -> Gauge | Counter | Histogram:
        """Makes it in a registry.

        Args:
            labels: names that it has before its own.
            registry: which has none of its name.
        """
        names = (*labels, *self.labels)
        if self.kind == "gauge":
            return Gauge(
                self.name, self.help, names, registry=registry, multiprocess_mode="mostrecent"
            )
        if self.kind == "histogram":
            return Histogram(self.name, self.help, names, registry=registry, buckets=self.buckets)
        return Counter(self.name, self.help, names, registry=registry)


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

    def of(self, *labels: str) -> Callable[[object], None]:
        """Has all of them begin for the values of `labels`; returns what takes in figures."""
        takers = []
        for name, metric in self._fields.items():
            series = self._by_name[metric.name].labels(*labels, *metric.known)
            takers.append((name, _taker(metric.kind, series)))

        def take(figures: object) -> None:
            for name, taker in takers:
                if (value := getattr(figures, name)) is not None:
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
