"""The broker: the daemon's main process, which decides which tenant may use what, and until when. It never uses CUDA.

`service` starts it, `control_connection` and `handlers` serve peers, `runtime` executes the lease table's decisions.
One event loop runs everything and never blocks: threads read files, poll cards and write to the disk.
"""
