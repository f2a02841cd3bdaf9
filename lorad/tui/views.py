"""Which screens there are: one line each."""

from lorad.tui.adapters import AdaptersView
from lorad.tui.cache import CacheView
from lorad.tui.event_log import EventsView
from lorad.tui.health import HealthView
from lorad.tui.overview import Overview
from lorad.tui.requests import RequestsView
from lorad.tui.tenants import TenantsView
from lorad.tui.view import View

VIEWS: tuple[type[View], ...] = (
    Overview,
    AdaptersView,
    RequestsView,
    CacheView,
    EventsView,
    TenantsView,
    HealthView,
)
