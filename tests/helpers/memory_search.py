"""`python -m helpers.memory_search KEY_FILE SECRETS_FILE PID...`: finds processes that have a private key, or secrets.

It is a separate process, so that its own copies of the secrets are in none of the processes that it searches. It prints
two lines. The first has `key` and the ids of the processes with the private number of an ECDSA key, as OpenSSL stores
it, or with the key file's text. The second has `secrets` and the ids of those with a traffic secret of a connection,
from a file of SSLKEYLOGFILE.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key


def readable(pid: str) -> Iterator[bytes]:
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, permissions = line.split()[:2]
            if "r" not in permissions or "[v" in line:
                continue
            low, high = (int(number, 16) for number in span.split("-"))
            try:
                memory.seek(low)
                yield memory.read(high - low)
            except OSError:
                continue


def main(key_file: str, secrets_file: str, pids: list[str]) -> None:
    key = load_pem_private_key(Path(key_file).read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    number = key.private_numbers().private_value.to_bytes(32, "big")
    # Search for the number in either byte order, and for a part of the key file's text.
    wanted = {"key": [number, number[::-1], Path(key_file).read_bytes().splitlines()[2][:40]]}
    secrets = [line.split() for line in Path(secrets_file).read_text().splitlines() if not line.startswith("#")]
    wanted["secrets"] = [bytes.fromhex(secret) for label, _, secret in secrets if label.endswith("TRAFFIC_SECRET_0")]
    assert wanted["secrets"]
    for kind, patterns in wanted.items():
        holders = [pid for pid in pids if any(pattern in piece for piece in readable(pid) for pattern in patterns)]
        print(kind, *holders)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
