"""The broker's side of workers: how they are forked, watched, scrubbed and taken over, and their bytes proved free."""
