"""Traces of a real daemon: what a request was, and a collector that hangs when the daemon stops."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: `tests/unit/tracing` says the same of parts.
pytestmark = pytest.mark.late

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.server.gate.wait(60)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def collector():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads, server.bodies, server.gate = True, [], threading.Event()
        server.gate.set()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.gate.set()
        server.shutdown()


def spans(body):
    message = ExportTraceServiceRequest.FromString(body)
    found = [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
    return {span.name: span for span in found}


def test_requests_are_traced_and_a_collector_that_hangs_holds_up_neither_them_nor_the_stop(
    make_daemon, collector, poll, monkeypatch
):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    daemon = make_daemon()
    daemon.configure(f'[otel]\nendpoint = "http://127.0.0.1:{collector.server_port}"\n')
    daemon.start()
    daemon.upload("acme/sql", 1)
    with daemon.http() as http:
        body = daemon.body("acme/sql", 8)
        answer = http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    assert answer.status_code == 200
    poll(lambda: collector.bodies, lambda: f"a batch of spans:\n{daemon.tail()}")
    found = spans(collector.bodies[0])
    root = found["text_completion acme/sql"]
    assert root.trace_id.hex() == TRACE
    given = {a.key: a.value for a in root.attributes}
    assert given["lorad.rev"].string_value == answer.headers["x-lorad-rev"]
    assert given["gen_ai.usage.output_tokens"].int_value == 8
    assert found.keys() >= {"lorad.queue", "lorad.prefill", "lorad.decode"}
    assert all(root.start_time_unix_nano <= s.start_time_unix_nano for s in found.values())
    assert all(s.end_time_unix_nano <= root.end_time_unix_nano for s in found.values())

    collector.gate.clear()
    assert daemon.ask("acme/sql", 4).status_code == 200
    poll(lambda: len(collector.bodies) == 2, "a batch that hangs")
    assert daemon.ask("tiny", 4).status_code == 200
    assert daemon.stop() == 0  # not by what the collector does
    assert not collector.gate.is_set()
    assert "took too long" in daemon.tail()
