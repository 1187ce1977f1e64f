"""The daemon's log: one line for each event, as JSON or for people. The audit log is another.

The library is Python's `logging`. `catalogue` lists the events; `writer` formats them as lines, and writes the lines
without waiting for their reader. `record/lease_log` logs the lives of leases.
"""
