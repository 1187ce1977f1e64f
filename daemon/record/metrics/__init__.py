"""Metrics for Prometheus: the families, the values of counters and gauges, and the text. No I/O, no clock."""
