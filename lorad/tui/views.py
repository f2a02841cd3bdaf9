"""Which screens there are: one line each."""

from lorad.tui.overview import Overview
from lorad.tui.view import View

VIEWS: tuple[type[View], ...] = (Overview,)
