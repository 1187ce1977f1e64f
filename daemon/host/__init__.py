"""Wrappers for Linux features that the daemon uses: processes, threads, channels, descriptors, sockets and memory."""
