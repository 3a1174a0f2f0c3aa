# SPDX-License-Identifier: Apache-2.0
"""Containers for the samples of one scrape: ``metrics`` declares the metrics, ``collector`` sets the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from resctrlmond.exporter.metrics import Metric, Type

# A value of a label is cut to this length: an attribute can have 4096 characters.
MAX_LABEL = 256


class Families:
    """The families of one scrape, in the order of their first samples.

    ``with_start_times``: counters have start timestamps (``_created``), which OpenMetrics has and Prometheus text has
    not: there, they would be further gauges.
    """

    def __init__(self, *, with_start_times: bool) -> None:
        self._with_start_times = with_start_times
        self._families: dict[str, Family] = {}
        self._metrics: dict[str, Metric] = {}

    def counter(self, metric: Metric, labels: Sequence[str], value: float, start: float | None) -> None:
        """Add a sample of a counter that began at ``start`` (seconds since the epoch; None: unknown)."""
        family = self._family(metric)
        assert isinstance(family, CounterMetricFamily)
        family.add_metric(labels, value, created=start if self._with_start_times else None)

    def gauge(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a sample of a gauge."""
        family = self._family(metric)
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(labels, value)

    def figure(self, metric: Metric, labels: Sequence[str], value: float, start: float | None = None) -> None:
        """Add a sample of a counter, which began at ``start``, or of a gauge."""
        if metric.type is Type.GAUGE:
            self.gauge(metric, value, *labels)
        else:
            self.counter(metric, labels, value, start)

    def histogram(
        self, metric: Metric, labels: Sequence[str], buckets: Sequence[tuple[str, float]], total: float, start: float
    ) -> None:
        """Add a histogram: the number of values up to each bound, "+Inf" at last, and the ``total`` of all values."""
        family = self._family(metric)
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, buckets, total)
        if self._with_start_times:
            family.add_sample(f"{family.name}_created", dict(zip(metric.labels, labels, strict=True)), start)

    def info(self, metric: Metric, *labels: str) -> None:
        """Add a sample that has only labels. Empty ones are left out, which means the same to Prometheus."""
        family = self._family(metric)
        assert isinstance(family, InfoMetricFamily)
        named = {name: cut(text) for name, text in zip(metric.labels, labels, strict=True) if text}
        family.add_metric((), named)

    def gauges(self) -> Iterator[tuple[Metric, Mapping[str, str], float]]:
        """Return the samples of all gauges, with their labels."""
        for name, family in self._families.items():
            if (metric := self._metrics[name]).type is Type.GAUGE:
                for sample in family.samples:
                    yield metric, sample.labels, sample.value

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.sample)
        if family is None:
            family = self._families[metric.sample] = _new(metric)
            self._metrics[metric.sample] = metric
        return family


def cut(text: str) -> str:
    """Return the text with at most MAX_LABEL characters; a longer one ends in "…"."""
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def _new(metric: Metric) -> Family:
    name = metric.family
    match metric.type:
        case Type.COUNTER:
            return CounterMetricFamily(name, metric.help, labels=metric.labels, unit=metric.unit)
        case Type.GAUGE:
            return GaugeMetricFamily(name, metric.help, labels=metric.labels, unit=metric.unit)
        case Type.HISTOGRAM:
            return HistogramMetricFamily(name, metric.help, labels=metric.labels, unit=metric.unit)
        case Type.INFO:
            return InfoMetricFamily(name, metric.help)
