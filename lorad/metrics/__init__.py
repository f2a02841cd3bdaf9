"""Prometheus metrics of the daemon; `metrics.Metrics` is the owner, `table` the list of names."""
