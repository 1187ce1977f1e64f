"""The daemon's log: one record for each event, as a line of JSON or for people. The audit log is another thing.

The library is Python's `logging`. Here is what events there are (`catalogue`), how they are told (`telling`), what they
look like (`shapes`), how they get out without anybody waiting for whoever reads them (`writing`), and what of a lease's
life is told (`chronicle`).
"""
