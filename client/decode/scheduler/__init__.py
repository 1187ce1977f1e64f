"""Decides what each step computes, from events and the time. It reads no clock and does no I/O."""
