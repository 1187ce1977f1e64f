"""The HTTP server that wings share, the paths of their Unix sockets, and the file that describes their models."""
