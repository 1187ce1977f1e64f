"""The worker's sandbox: a worker may compute, and little else.

A worker runs a tenant's PTX through a third-party compiler, in a process with one context. An attacker who breaks out
of that compiler controls this process; the sandbox bounds the damage. Each measure is a mechanism of Linux and works
independently. The zygote tests each before it forks a worker, so the daemon reports measures that it has tested.
"""
