"""The lease core: a pure state machine for leases, regions, submits and the pool of warm contexts.

`LeaseTable.handle(event, now_ns)` returns the effects to execute, in order. The core does no I/O, reads no clock and
draws no random numbers. An effect that takes time is answered by a later event.
"""
