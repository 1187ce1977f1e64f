"""HTTP in separate processes: the fronts accept connections and write streams, and the decoder's process computes."""
