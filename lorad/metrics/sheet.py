"""Sheet: one scrape's families, filled metric by metric and then read once by prometheus-client.

Goes in: values under names of the table, their labels in the table's order.  Comes out: `collect`,
as prometheus-client's registry calls it.  Every name of the table is there, with or without a
value.  KeyError for a name that is not, ValueError for other labels: our own faults.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.histogram import Histogram
from lorad.metrics.metric import PREFIX, Metric
from lorad.metrics.table import METRICS, NAMES, OF_ENGINES, OF_REPLICAS

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
#: Adapter label -> tenant label.
TenantOf = Callable[[str], str]
#: Adapter label as it is counted -> as it is shown, and its model label.
ModelOf = Callable[[str], tuple[str, str]]


class Sheet(Collector):
    """`tenant_of`: beside each adapter label there is one of its tenant.  `model_of`: so there is
    of its model, and what is of one engine has one too: that of `model`, which is set ahead.
    `replicas`: what is of one engine has a label of `replica` too, set ahead as well."""

    def __init__(
        self,
        tenant_of: TenantOf | None = None,
        model_of: ModelOf | None = None,
        *,
        replicas: bool = False,
    ) -> None:
        self._tenant_of, self._model_of, self._replicas = tenant_of, model_of, replicas
        self.model = self.replica = ""
        self._families = {m.name: _family(m, self._labels(m)) for m in METRICS}

    def put(self, name: str, value: float, *labels: str) -> None:
        """A counter's or gauge's value; `name` without the prefix."""
        metric, family = self._of(name)
        assert not isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
        family.add_metric(self._values(metric, labels), value)

    def puts(self, name: str, rows: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """One value for each (labels, value)."""
        for labels, value in rows:
            self.put(name, value, *labels)

    def observe(self, name: str, histogram: Histogram, *labels: str) -> None:
        """A histogram as it stands."""
        self.buckets(name, histogram.bounds, histogram.counts, histogram.total, *labels)

    def buckets(
        self,
        name: str,
        bounds: Sequence[float],
        counts: Sequence[float],
        total: float,
        *labels: str,
    ) -> None:
        """A histogram of `counts` between `bounds`, missing ones at the end being 0."""
        metric, family = self._of(name)
        assert isinstance(family, HistogramMetricFamily), f"{name} is no histogram"
        counts = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
        above = [*map(floatToGoString, bounds), "+Inf"]
        cumulated = list(zip(above, accumulate(counts), strict=True))
        family.add_metric(self._values(metric, labels), cumulated, total)

    def collect(self) -> Iterator[Family]:
        yield from self._families.values()

    def _of(self, name: str) -> tuple[Metric, Family]:
        full = name if ":" in name else PREFIX + name
        return NAMES[full], self._families[full]

    def _labels(self, metric: Metric) -> tuple[str, ...]:
        adapter, labels = "adapter" in metric.labels, metric.labels
        if self._tenant_of is not None and adapter:
            labels = (*labels, "tenant")
        if self._model_of is not None and (adapter or metric.name in OF_ENGINES):
            labels = (*labels, "model")
        if self._replicas and metric.name in OF_REPLICAS:
            labels = (*labels, "replica")
        return labels

    def _values(self, metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}")
        if "adapter" not in metric.labels:
            return (*labels, *self._whose(metric)) if metric.name in OF_ENGINES else labels
        at = metric.labels.index("adapter")
        more = [] if self._tenant_of is None else [self._tenant_of(labels[at])]
        if self._model_of is not None:
            adapter, model = self._model_of(labels[at])
            labels, more = (*labels[:at], adapter, *labels[at + 1 :]), [*more, model]
        return (*labels, *more)

    def _whose(self, metric: Metric) -> tuple[str, ...]:
        """Of which engine it is, where there are several."""
        model = () if self._model_of is None else (self.model,)
        return (*model, self.replica) if self._replicas and metric.name in OF_REPLICAS else model


def _family(metric: Metric, labels: tuple[str, ...]) -> Family:
    match metric.type:
        case "counter":
            return CounterMetricFamily(metric.name, metric.help, labels=labels)
        case "gauge":
            return GaugeMetricFamily(metric.name, metric.help, labels=labels)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.help, labels=labels)
