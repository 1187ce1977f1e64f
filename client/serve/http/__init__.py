"""HTTP for all servers of `client.serve`: sockets, connection limits, the guard, problems, event streams."""
