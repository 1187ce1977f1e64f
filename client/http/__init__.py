"""Code that all HTTP servers of the client share: the server, paths of Unix sockets, settings files, error replies."""
