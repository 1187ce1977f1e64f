"""Tables in Markdown that are made from the code, between `<!-- name -->` and `<!-- end of name -->`."""

from collections.abc import Mapping, Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = (titles, ["---"] * len(titles), *rows)
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """Return a document with these tables, by name, in their places. Raises ValueError if a table has no place."""
    for name, made in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the document must have {begin.strip()} and {end}")
        text = f"{before}{begin}\n{made}\n\n{end}{after}"
    return text
