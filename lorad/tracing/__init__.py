"""OpenTelemetry traces of requests, where `otel.endpoint` asks for them."""
