"""The tenants' part of a sheet: what was used on each account.

Goes in: the meter.  Comes out: values on a sheet.  The `tenant` label beside an `adapter` label
says whose adapter it is, by its name; these say who asked, which is another where a tenant may use
what is not its own.  Kept apart, so that there are as many series as tenants, and not as pairs.
"""

import time
from collections.abc import Mapping

from lorad.metrics.labels import Key, Labelled, Series
from lorad.metrics.sheet import Sheet
from lorad.service.meter import Meter

SERIES = ("tenant_requests_total", "tenant_prompt_tokens_total", "tenant_generation_tokens_total")


class TenantMetrics:
    """One a daemon; at most `limit` tenants have a label, the rest is summed up."""

    def __init__(self, limit: int) -> None:
        self._labelled = Labelled(limit)
        self._series = {name: Series() for name in SERIES}

    def write(self, sheet: Sheet, meter: Meter) -> None:
        counts = dict(meter.tenants)
        uses = {name: float(c.sequences) for name, c in counts.items()}
        labelled = self._labelled.choose(counts, set(), set(), uses, time.monotonic())
        raw: dict[str, Mapping[Key, float]] = {
            "tenant_requests_total": {
                (name, reason): number
                for name, c in counts.items()
                for reason, number in dict(c.finished).items()
            },
            "tenant_prompt_tokens_total": {(n,): c.prompt_tokens for n, c in counts.items()},
            "tenant_generation_tokens_total": {(n,): c.generated_tokens for n, c in counts.items()},
        }
        for name, series in self._series.items():
            series.fold(raw[name], labelled, counts)
            sheet.puts(name, series)
