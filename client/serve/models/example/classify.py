"""Classify all test images with a server of the example's models, through shared memory.

`python -m gpulease.client.serve.models.example.classify unix:/tmp/models.sock`
"""

import sys
import time

import numpy as np

from gpulease.client.errors import GpuLeaseError
from gpulease.client.serve.models.example.digits import DIGITS, load_tests
from gpulease.client.serve.rpc import RpcClient


def main(address: str) -> None:
    """Print how many images were classified correctly, and how long a call took."""
    images, digits = load_tests()
    with RpcClient(address) as models:
        method_id = models.describe()["digits"]["method_id"]
        began = time.perf_counter()
        scores = [np.frombuffer(models.call(method_id, image).payload, "<f4") for image in images]
        took_s = time.perf_counter() - began
    predicted = np.stack(scores).reshape(-1, DIGITS).argmax(1)
    right = int((predicted == digits).sum())
    print(f"{right} of {len(digits)} right, {took_s / len(digits) * 1e6:.0f} us a call")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} unix:/tmp/models.sock")
    try:
        main(sys.argv[1])
    except GpuLeaseError as error:
        sys.exit(f"{type(error).__name__}: {error}")
