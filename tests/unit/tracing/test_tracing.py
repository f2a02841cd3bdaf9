"""Tracing and its collector: batches arrive, and one that hangs or refuses delays nobody."""

import asyncio
import contextlib
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from engine.messages import SamplingParams
from lorad import config, config_sources
from lorad.config_sections import Otel
from lorad.errors import BadConfig, LoradError
from lorad.service.ask import Ask
from lorad.service.trace import Trace
from lorad.tracing import tracing
from lorad.tracing.tracing import Tracing


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No variable of the developer's, and the SDK's logger as it was."""
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    logger = logging.getLogger("opentelemetry")
    before = logger.level
    yield
    logger.setLevel(before)


class Collector(ThreadingHTTPServer):
    """OTLP over HTTP; `status` answers, after `gate` is open."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests, self.status = [], 200
        self.met, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def spans(self):
        for path, body in self.requests:
            assert path == "/v1/traces"
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {a.key: a.value.string_value for a in group.resource.attributes}
                for scope in group.scope_spans:
                    yield from ((span.name, resource) for span in scope.spans)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, body))
        self.server.met.set()
        self.server.gate.wait(30)
        with contextlib.suppress(OSError):
            self.send_response(self.server.status)
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def collector():
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.gate.set()
    for closing in [t for t in threading.enumerate() if t.name == "lorad-traces"]:
        closing.join(20)  # the one that hung: else the next test hears its last words
    server.shutdown()
    thread.join()
    server.server_close()


def of(endpoint, **more):
    return Tracing(Otel(endpoint=endpoint), base="tiny", instance="i1", **more)


def tell(traces, count=1):
    ask = Ask(model="sql", chat=True, sampling=SamplingParams())
    for _ in range(count):
        Trace(ask, 1.0, traces.take).end(2.0, LoradError("queue_full", "full"))


class Given:
    """An exporter that answers as it is told, one batch at a time."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.done = threading.Semaphore(0)

    def export(self, spans):
        answer = self.answers.pop(0)
        self.done.release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shutdown(self):
        pass


def test_spans_arrive_at_the_collector_with_who_sent_them(collector):
    traces = of(collector.url)
    tell(traces, 3)
    asyncio.run(traces.close(20))
    spans = list(collector.spans())
    assert [name for name, _ in spans] == ["chat"] * 3
    assert spans[0][1]["service.name"] == "lorad"
    assert spans[0][1]["service.instance.id"] == "i1"
    assert spans[0][1]["lorad.base"] == "tiny"


def test_the_path_may_be_written_out(collector):
    traces = of(f"{collector.url}/v1/traces")
    tell(traces)
    asyncio.run(traces.close(20))
    assert len(list(collector.spans())) == 1


def test_a_collector_that_hangs_delays_no_request_and_no_stop(collector, caplog):
    collector.gate.clear()
    traces = of(collector.url)
    tell(traces, 600)  # more than one batch: the first is on its way, and stays there
    assert collector.met.wait(20)
    tell(traces, 5000)  # and more than the queue: who would wait here would wait for the gate
    asyncio.run(traces.close(0.05))
    assert "took too long" in caplog.text
    assert not collector.gate.is_set()


def test_a_collector_that_is_not_there_is_told_of_once(caplog):
    given = Given(SpanExportResult.FAILURE, OSError("refused"), SpanExportResult.SUCCESS)
    telling = tracing._Telling(given, "http://there")
    with caplog.at_level(logging.INFO):
        telling.export([])
        with pytest.raises(OSError, match="refused"):
            telling.export([])
        telling.export([])
    words = [r.getMessage() for r in caplog.records if r.name.startswith("lorad.")]
    assert words == [
        "http://there takes no traces, which are dropped meanwhile",
        "http://there takes traces again",
    ]


def test_a_collector_that_refuses_ends_with_the_daemon(collector):
    collector.status = 400
    traces = of(collector.url)
    tell(traces)
    asyncio.run(traces.close(20))
    assert len(collector.requests) == 1


def test_a_trace_that_cannot_be_drawn_costs_no_request(caplog):
    traces = of("http://127.0.0.1:1", exporter=Given())
    traces.take(None)
    assert "could not be drawn" in caplog.text
    asyncio.run(traces.close(20))


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter"])
def test_a_missing_package_is_told_with_the_extra(monkeypatch, missing):
    for name in [n for n in sys.modules if n.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    tracing.check(Otel())  # nobody asks for it
    with pytest.raises(BadConfig, match=r"otel\.endpoint is set") as refused:
        of("http://127.0.0.1:4318")
    assert refused.value.hint == "pip install '.[otel]' in a checkout of lorad"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint", "127.0.0.1:4318"),
        ("endpoint", "http://user:secret@there"),
        ("endpoint", "http://there?key=secret"),
        ("sample", "1.5"),
        ("sample", "nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, key, value):
    (tmp_path / "config.json").write_text("{}")
    env = {"HOME": str(tmp_path), "LORAD_MODELS__BASE": str(tmp_path)}
    with pytest.raises(BadConfig, match=rf"otel\.{key}"):
        config_sources.load(None, {**env, f"LORAD_OTEL__{key.upper()}": value})


def test_off_is_the_default():
    assert config.Settings().otel.endpoint == ""
