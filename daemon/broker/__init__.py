"""The broker: who may have what, until when. One event loop that never blocks, and no CUDA."""
