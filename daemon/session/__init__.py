"""The session worker: one process, one lease, one context; the end of the process is the end of all of it."""
