import pytest

from gpulease.daemon.web.app import without_names
from gpulease.daemon.web.view import Pseudonyms

NAMES = Pseudonyms(b"s" * 32)
ANN = NAMES.of_tenant("ann")


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ('a{tenant="ann"} 1', f'a{{tenant="{ANN}"}} 1'),
        ('a{card="GPU-1",tenant="ann",x="y"} 1.5', f'a{{card="GPU-1",tenant="{ANN}",x="y"}} 1.5'),
        ('a{tenant="other"} 1', 'a{tenant="other"} 1'),
        ('a{tenant=""} 1', 'a{tenant=""} 1'),
        ('a{subtenant="ann"} 1', 'a{subtenant="ann"} 1'),
        ('# HELP a of tenant="ann"', '# HELP a of tenant="ann"'),
        ("a 1", "a 1"),
        # Inside another label's value a quote is escaped, so nothing there looks like a label.
        (r'a{x="{tenant=\"ann\"",tenant="ann"} 1', rf'a{{x="{{tenant=\"ann\"",tenant="{ANN}"}} 1'),
    ],
)
def test_names_are_hidden(line: str, hidden: str) -> None:
    assert without_names(f"{line}\n{line}\n", NAMES) == f"{hidden}\n{hidden}\n"


def test_a_name_with_a_quote_is_hidden_whole() -> None:
    text = without_names(r'a{tenant="an\"n, \\",x="1"} 2', NAMES)
    assert text.startswith('a{tenant="tenant ')
    assert text.endswith('",x="1"} 2')
    assert "n," not in text
