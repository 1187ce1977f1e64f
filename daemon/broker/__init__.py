"""The broker: the daemon's main process, which decides who may have what, until when. One event loop, and no CUDA.

`service` starts it, `control_connection` and `handlers` serve peers, `runtime` executes what the lease table decides.
The loop never blocks: files, cards and the disk are asked in threads.
"""
