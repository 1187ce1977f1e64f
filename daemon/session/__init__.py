"""The session worker: one process, one lease, one context; all of it ends with the process."""
