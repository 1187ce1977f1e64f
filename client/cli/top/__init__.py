"""`gpulease top`: a live view of cards and leases.

Most modules work without a terminal and a daemon: `sample` computes lines from two samples, `columns` orders and
formats these lines, `view` handles keys, and `frame` lays out a screen. `readings` asks the daemon. Only `screen` uses
curses.
"""
