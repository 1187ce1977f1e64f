"""What the node counts, for Prometheus: the families there are, what fills them, and their text. No I/O, no clock."""
