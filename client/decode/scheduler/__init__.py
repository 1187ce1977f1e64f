"""Decides what each step computes, from events and the time. No clock, no I/O."""
