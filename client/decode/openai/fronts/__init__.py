"""HTTP in processes of its own: fronts accept connections and write streams, the decoder's process computes."""
