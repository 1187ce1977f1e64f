"""The page of a decode server, and the demonstration that fills it."""
