"""Two small kernels that demonstrations and measurements launch."""

from importlib.resources import files


def transform_ptx() -> bytes:
    """Return PTX with `scale` and `bias`, compiled by nvcc from the transform.cu of the vectors."""
    return files("gpulease.client.console").joinpath("transform.ptx").read_bytes()
