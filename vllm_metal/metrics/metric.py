# SPDX-License-Identifier: Apache-2.0
"""Metric: how a figure is shown in /metrics, written beside the field that holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram

#: A value as it is; what is added to a count; a count since the engine started; an observation.
Kind = Literal["gauge", "counter", "total", "histogram"]
_KEY = "metric"


@dataclass(frozen=True)
class Metric:
    """One metric of an engine."""

    kind: Kind
    name: str  # as Prometheus has it, without the `_total` of counters
    help: str
    label: tuple[str, str] | None = None  # name and value; beside the model's and the engine's
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram


def metric(
    kind: Kind,
    name: str,
    help: str,
    *,
    label: tuple[str, str] | None = None,
    buckets: tuple[float, ...] = (),
    default: Any = MISSING,
) -> Any:
    """A field of a dataclass of figures, and the metric that shows it. None leaves it as it was."""
    return field(default=default, metadata={_KEY: Metric(kind, name, help, label, buckets)})


def metrics_of(figures: type) -> dict[str, Metric]:
    """The metrics of a dataclass of figures, by field."""
    return {each.name: each.metadata[_KEY] for each in fields(figures) if _KEY in each.metadata}


class Shown:
    """The metrics of figures in Prometheus' registry."""

    def __init__(self, figures: type, labels: Sequence[str]) -> None:
        """Registers them.

        Args:
            figures: a dataclass whose fields are made with `metric`.
            labels: names that all of them have.
        """
        self._fields = metrics_of(figures)
        self._by_name: dict[str, Any] = {}
        for each in self._fields.values():
            if each.name not in self._by_name:
                names = (*labels, *(each.label or ())[:1])
                self._by_name[each.name] = _registered(each, names)

    def of(self, *labels: str) -> Callable[[object], None]:
        """Has all of them begin for the values of `labels`; returns what takes in figures."""
        takers = []
        for name, each in self._fields.items():
            series = self._by_name[each.name].labels(*labels, *(each.label or ())[1:])
            takers.append((name, _taker(each.kind, series)))

        def take(figures: object) -> None:
            for name, taker in takers:
                if (value := getattr(figures, name)) is not None:
                    taker(value)

        return take


def _registered(metric: Metric, labels: Sequence[str]) -> Gauge | Counter | Histogram:
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, labels, multiprocess_mode="mostrecent")
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, labels, buckets=metric.buckets)
    return Counter(metric.name, metric.help, labels)


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
