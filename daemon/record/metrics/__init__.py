"""Metrics for Prometheus: the families, the counters and gauges behind them, and their text. No I/O, no clock."""
