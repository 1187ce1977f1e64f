"""`gpulease top`: a live view of cards and leases.

All but two modules work without a terminal or a daemon: `sample` makes lines of two readings, `columns` orders and
words them, `view` handles keys, `frame` lays a screen out. `readings` asks the daemon, and `screen` alone uses
curses.
"""
