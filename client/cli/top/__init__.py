"""`gpulease top`: a live view of cards and leases.

All but two modules work without a terminal or a daemon: `sample` computes lines from two samples, `columns` orders and
formats them, `view` handles keys, `frame` lays out a screen. `readings` asks the daemon, and only `screen` uses curses.
"""
