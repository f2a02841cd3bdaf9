"""The tenants' part of a sheet: what was used on each account.

Goes in: the meter.  Comes out: values on a sheet.  The `tenant` label beside an `adapter` label
says whose adapter it is, by its name; these say who asked, which is another where a tenant may use
what is not its own.  Kept apart, so that there are as many series as tenants, and not as pairs.
"""

import time

from lorad.metrics import requests
from lorad.metrics.labels import Labelled, Series
from lorad.metrics.sheet import Sheet
from lorad.service.meter import Meter

PREFIX = "tenant_"


class TenantMetrics:
    """One a daemon; at most `limit` tenants have a label, the rest is summed up."""

    def __init__(self, limit: int) -> None:
        self._labelled = Labelled(limit)
        self._moved = requests.Moved()
        self._series = {name: Series() for name in requests.series({}, PREFIX)}

    def write(self, sheet: Sheet, meter: Meter) -> None:
        counts = dict(meter.tenants)
        moved = self._moved.since(counts)
        labelled = self._labelled.choose(
            counts.keys(), set(), set(), requests.uses(moved), time.monotonic()
        )
        raw = requests.series(moved, PREFIX)
        for name, series in self._series.items():
            series.fold(raw[name], labelled, counts.keys())
            sheet.puts(name, series)
