"""How a lease's id is written."""


def lease_text(lease_id: int) -> str:
    """A lease id as people, records and the command line write it."""
    return f"{lease_id:032x}"
