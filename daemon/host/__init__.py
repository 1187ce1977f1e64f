"""Wrappers of what the daemon needs of Linux: processes, threads, channels, descriptors, sockets and memory."""
