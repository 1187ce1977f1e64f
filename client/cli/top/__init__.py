"""`gpulease top`: a live view of cards and leases.

What is shown is worked out without a terminal: `sample` makes lines of two readings, `columns` orders and words them,
`view` takes keys, `frame` lays a screen out. `readings` asks the daemon, `screen` alone knows curses.
"""
