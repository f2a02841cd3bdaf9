"""Tracing: ended requests → spans → the collector at `otel.endpoint`, by OTLP over HTTP.

Goes in: the settings, Traces.  Comes out: batches, sent by a thread of the SDK's own, from a queue
of bounded length: a collector that is slow, silent or away costs spans, and no request any time.
The SDK's own variables apply beside the settings, above all `OTEL_EXPORTER_OTLP_HEADERS` for a
collector that wants a key, and `OTEL_BSP_*`.  Knows nothing of what a span holds.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lorad import __version__
from lorad.config_sections import Otel
from lorad.errors import BadConfig
from lorad.service.threads import on_thread
from lorad.service.trace import PoolTrace, Trace
from lorad.tracing import names

log = logging.getLogger(__name__)

#: A collector has so long to take a batch, all attempts together.
EXPORT_SECONDS = 5.0
#: And what is left at a stop goes within so long, or not at all.
FLUSH_SECONDS = 2.0
PATH = "/v1/traces"


def check(otel: Otel) -> None:
    """Raises BadConfig, which names the extra, unless what `otel` asks for is installed."""
    if not otel.endpoint:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        message = f"otel.endpoint is set, and traces need {error.name or 'packages'}: {error}"
        raise BadConfig(message, hint="pip install '.[otel]' in a checkout of lorad") from error


class Tracing:
    """`take` every request's trace, then `close`.  Raises BadConfig where a package is missing.

    `exporter` stands in for the one of OTLP in tests.
    """

    def __init__(self, otel: Otel, *, base: str, instance: str, exporter: Any = None) -> None:
        check(otel)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        from lorad.tracing.spans import Spans

        # Each failure would be a line, with a traceback at times: `_Telling` has one for all.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = {
            names.SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or names.SERVICE,
            names.SERVICE_VERSION: __version__,
            names.SERVICE_INSTANCE: instance,
            names.BASE: base,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(otel.sample)),
            resource=Resource.create(resource),
            shutdown_on_exit=False,  # it would wait half a minute for a collector that hangs
        )
        self._exporter = _Telling(exporter or _otlp(otel.endpoint), otel.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._spans = Spans(self._provider.get_tracer(names.SERVICE, __version__), base)

    def take(self, trace: Trace) -> None:
        """On the event loop.  Never raises: a request is worth more than its trace."""
        try:
            self._spans.draw(trace)
        except Exception:
            log.exception("a trace could not be drawn")

    def take_pooled(self, trace: PoolTrace) -> None:
        """The same of a request for vectors or scores."""
        try:
            self._spans.draw_pooled(trace)
        except Exception:
            log.exception("a trace could not be drawn")

    async def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what is left, for `seconds` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await on_thread(self._provider.shutdown, "lorad-traces")
            return
        self._exporter.shutdown()  # no more attempts
        log.warning("the collector of traces took too long: those of the last seconds are lost")


def _otlp(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)


class _Telling:
    """An exporter that says once that it fails, and once that it works again."""

    def __init__(self, inner: Any, endpoint: str) -> None:
        self._inner, self._endpoint, self._failing = inner, endpoint, False

    def export(self, spans: Sequence[Any]) -> Any:
        """On the SDK's thread.  Whatever comes of it, the batch is done with."""
        try:
            result = self._inner.export(spans)
        except Exception as error:
            self._note(False, f": {error}")
            raise
        self._note(result.name == "SUCCESS")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _note(self, well: bool, why: str = "") -> None:
        if self._failing and well:
            log.info("%s takes traces again", self._endpoint)
        elif not well and not self._failing:
            log.warning("%s takes no traces, which are dropped meanwhile%s", self._endpoint, why)
        self._failing = not well
