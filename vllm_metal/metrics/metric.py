# SPDX-License-Identifier: Apache-2.0
"""Defines Metric, which declares next to a dataclass field how /metrics shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram

#: gauge: a value as it is; counter: an increment; total: a count since the engine started;
#: histogram: an observation.
Kind = Literal["gauge", "counter", "total", "histogram"]
_KEY = "metric"


@dataclass(frozen=True)
class Metric:
    """A Prometheus metric; metrics that differ only in `label` are labeled series of one metric."""

    kind: Kind
    name: str  # in Prometheus, without the `_total` of counters
    help: str
    label: tuple[str, str] | None = None  # name and value, in addition to model and engine
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram

    def field(self, default: Any = MISSING) -> Any:
        """Makes a dataclass field with this metric; a value of None leaves the metric unchanged."""
        return dataclass_field(default=default, metadata={_KEY: self})

    def registered(self, labels: Sequence[str]) -> Gauge | Counter | Histogram:
        """Registers the metric in Prometheus; label names are `labels`, then that of `label`."""
        names = (*labels, *(self.label or ())[:1])
        if self.kind == "gauge":
            return Gauge(self.name, self.help, names, multiprocess_mode="mostrecent")
        if self.kind == "histogram":
            return Histogram(self.name, self.help, names, buckets=self.buckets)
        return Counter(self.name, self.help, names)


class Shown:
    """Registered Prometheus metrics of a dataclass's fields."""

    def __init__(self, metrics: type, labels: Sequence[str]) -> None:
        """Registers the metrics of the fields made with `Metric.field`; all have `labels`."""
        every = ((each.name, each.metadata.get(_KEY)) for each in fields(metrics))
        self._fields: dict[str, Metric] = {name: metric for name, metric in every if metric}
        by_name = {metric.name: metric for metric in self._fields.values()}
        self._by_name: dict[str, Any] = {
            name: metric.registered(labels) for name, metric in by_name.items()
        }

    def of(self, *labels: str) -> Callable[[Mapping[str, Any]], None]:
        """Creates series with these label values; returns a function that records values."""
        recorders = []
        for name, metric in self._fields.items():
            series = self._by_name[metric.name].labels(*labels, *(metric.label or ())[1:])
            recorders.append((name, _recorder(metric.kind, series)))

        def record(metrics: Mapping[str, Any]) -> None:
            for name, recorder in recorders:
                if (value := metrics[name]) is not None:
                    recorder(value)

        return record


def _recorder(kind: Kind, series: Any) -> Callable[[float], None]:
    if kind == "total":
        return partial(_count_up_to, series, [0.0])
    simple: dict[Kind, str] = {"gauge": "set", "histogram": "observe", "counter": "inc"}
    take: Callable[[float], None] = getattr(series, simple[kind])
    return take


def _count_up_to(series: Counter, before: list[float], value: float) -> None:
    # `before` is a list of one number: the closure's state between calls.
    series.inc(value - before[0])
    before[0] = value
