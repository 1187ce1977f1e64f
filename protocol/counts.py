"""Texts for a number of things: "1 lease", "2 leases"."""


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 lease" or "2 leases".

    Args:
        number: The number of things.
        one: The noun in the singular, perhaps with an adjective.
        many: The noun in the plural; "" for `one` with an s.
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"
