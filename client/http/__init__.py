"""Code that the client's HTTP servers share: the server, paths of Unix sockets, settings files, error replies."""
