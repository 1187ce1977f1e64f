"""The worker's sandbox: what a worker may do besides computing, which is next to nothing.

A worker runs a tenant's PTX through a compiler that is not ours, in a process that holds one context. Whoever breaks
out of that compiler is in this process: these modules decide what it is worth then. Each measure stands by itself and
is one of Linux's own; the zygote tries each before it forks a worker, so that what is told of them is what was seen.
"""
