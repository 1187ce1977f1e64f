"""The session worker: one process with one lease and one context, all of which end with the process."""
