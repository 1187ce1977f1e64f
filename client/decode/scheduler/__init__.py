"""Decides what each step computes: events and the time in, decisions out; no clock, no I/O."""
