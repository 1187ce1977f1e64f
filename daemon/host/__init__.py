"""What Linux offers for processes, threads, descriptors and memory."""
