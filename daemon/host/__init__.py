"""Wrappers of Linux features for the daemon: processes, threads, channels, descriptors, sockets and memory."""
