"""The page in a browser, at three widths and in two colour schemes, and what each screen must show."""

import base64
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.client.console.tables import seconds_text, size_text
from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.load_samples import MAX_SAMPLES, SAMPLE_S, CardLoads, LoadSample
from gpulease.protocol.opcodes import Phase
from gpulease.protocol.time_units import NS_PER_S
from helpers.browser import Browser, lacks_browser
from helpers.leaks import SHARED_PROCESSES
from helpers.screens import CONTRAST, CUT, look_at
from helpers.waiting import wait_until
from helpers.web_rig import CARD, GIB, Scene, WebRig, card, lease

pytestmark = pytest.mark.skipif(bool(lacks_browser()), reason=lacks_browser())

TOKEN = "0123456789abcdef0123456789ABCDEF"
OTHER = CARD[:-1] + "2"
GAP = range(300, 340)
"""Numbers of samples that are missing."""


def history(*, is_told: bool) -> list[LoadSample]:
    now_ns = time.monotonic_ns()
    found = []
    for number in range(MAX_SAMPLES):
        if number not in GAP:
            at_ns = now_ns - int((MAX_SAMPLES - 1 - number) * SAMPLE_S * NS_PER_S)
            percent = round(50 + 45 * math.sin(number / 17)) if is_told else None
            used = int((30 + 12 * math.sin(number / 40)) * GIB) if is_told else 0
            found.append(LoadSample(at_ns, percent, used, (44 if number > 200 else 36) * GIB))
    return found


def five_leases() -> Scene:
    name = "a-tenant-with-a-name-as-long-as-names-may-be-" + "x" * 18
    leases = [
        lease(0xA1 << 120, "ann", size_bytes=20 * GIB, allocated_bytes=13 * GIB, remaining_ms=4_800_000),
        lease(0xA2 << 120, "ann", size_bytes=4 * GIB, state="pending", remaining_ms=0),
        lease(0xB1 << 120, name, size_bytes=8 * GIB, allocated_bytes=2 * GIB, remaining_ms=20_000, phase="warning"),
        lease(0xC1 << 120, "carol", size_bytes=10 * GIB, state="draining", cause="expired", remaining_ms=0),
        lease(0xD1 << 120, "dora", size_bytes=6 * GIB, state="fenced", cause="revoked", remaining_ms=0),
    ]
    cards = [
        card(held_bytes=50 * GIB, fenced_bytes=6 * GIB, warm_bytes=GIB, warm_contexts=2, available_bytes=20 * GIB),
        card(uuid=OTHER, index=1, name="embedded CPU card", capacity_bytes=6 * GIB, available_bytes=6 * GIB),
    ]
    loads = [CardLoads(CARD, tuple(history(is_told=True))), CardLoads(OTHER, tuple(history(is_told=False)))]
    return Scene(cards, leases, loads=loads)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("web") / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


# A browser, a web process and a new window each take longer than most tests, so they share them.


@pytest.fixture(scope="module")
def shared_rig(token_file: Path) -> Iterator[WebRig]:
    with WebRig(five_leases(), token_file) as rig:
        yield rig


@pytest.fixture
def scene(shared_rig: WebRig) -> Scene:
    """What the shared web process shows. Events and a fleet would stay, so their tests have a web process each."""
    vars(shared_rig.scene).update(vars(five_leases()))
    return shared_rig.scene


@pytest.fixture
def rig(token_file: Path) -> Iterator[WebRig]:
    """A web process of this test alone."""
    with WebRig(five_leases(), token_file) as rig:
        yield rig


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        SHARED_PROCESSES.add(browser.pid)
        yield browser
        SHARED_PROCESSES.remove(browser.pid)


def signed_in(page: Browser, url: str) -> Browser:
    """Return the page, opened by an operator."""
    look_at(page, 1280, "light")
    page.open(url)
    if page.run("return sessionStorage.getItem('gpulease-token')") != TOKEN:
        page.run("sessionStorage.setItem('gpulease-token', arguments[0])", TOKEN)
        page.open(url)
    page.wait_for("#totals", "5 leases of 4 tenants")
    drawn = "return document.querySelector('.plot .line.used').getAttribute('d')?.length > 0"
    wait_until(lambda: page.run(drawn), "the plots are drawn")
    page.complaints()
    return page


@pytest.fixture
def browser(chromium: Browser, shared_rig: WebRig, scene: Scene) -> Browser:
    """The page of the shared web process."""
    return signed_in(chromium, shared_rig.url)


@pytest.fixture
def own_page(chromium: Browser, rig: WebRig) -> Browser:
    """The page of the test's own web process."""
    return signed_in(chromium, rig.url)


def keep_screen(browser: Browser, path: Path) -> None:
    """Store a screenshot of the whole page, whatever its height."""
    box = browser.run("const e = document.documentElement; return [e.scrollWidth, e.scrollHeight]")
    clip = {"x": 0, "y": 0, "width": box[0], "height": box[1], "scale": 1}
    found = browser.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(found["data"]))


def test_what_is_parked_since_when_and_the_hosts_memory(scene: Scene, browser: Browser) -> None:
    memory = "document.querySelector('#total-parked').closest('div')"
    assert browser.run(f"return {memory}.checkVisibility()") is False
    parked = {"phase": "parked", "parked_for_ms": 75_000, "off_bytes": 20 * GIB}
    scene.leases[0]["park"] = parked
    scene.cards[0] |= {"parked_bytes": 20 * GIB, "park_host_bytes": 20 * GIB, "park_host_limit_bytes": 80 * GIB}
    browser.wait_for("#total-parked", f"{size_text(20 * GIB)} of {size_text(80 * GIB)}")
    assert browser.run(f"return {memory}.checkVisibility()") is True
    assert browser.run("return document.querySelector('#parked-meter').value") == 0.25
    wait_until(lambda: any("parked for 1 min" in text for text in browser.texts("tbody tr")), "the lease is parked")
    assert any("20 GiB of it parked" in text for text in browser.texts(".sum"))


SHOWN = "return [...document.querySelectorAll(arguments[0])].filter(one => one.checkVisibility()).length"


@pytest.mark.exhaustive
def test_screens_and_that_nothing_is_cut(browser: Browser, tmp_path: Path) -> None:
    for scheme in ("light", "dark"):
        for width in (390, 768, 1440):
            look_at(browser, width, scheme)
            keep_screen(browser, tmp_path / f"page-{width}-{scheme}.png")
            assert browser.run("return document.documentElement.scrollWidth") <= width
            matters = "tbody .leased, tbody .used, tbody .word, tbody .seconds, .revoke, .id"
            # A wide table shortens texts that are longer than their column, and shows them in full under the pointer.
            assert browser.run(CUT, matters + (", tbody .tenant" if width < 1000 else "")) == []
            # There are five leases. Two have remaining time, and three can be revoked.
            for of, count in ((".tenant", 5), (".leased", 5), (".used", 5), (".revoke", 3)):
                assert browser.run(SHOWN, f"tbody {of}") == count, (width, of)
            times = [text for text in browser.texts("tbody .seconds") if text[:1].isdigit()]
            assert len(times) == 2
            faint = browser.run(CONTRAST)
            assert not faint, (width, scheme, faint)
    assert browser.complaints() == []


@pytest.mark.exhaustive
def test_what_a_plot_shows_of_an_hour(browser: Browser) -> None:
    paths = "return [...document.querySelectorAll('.plot .line.used')].map(one => one.getAttribute('d'))"
    busy, memory, untold, embedded = browser.run(paths)
    for line in (busy, memory, embedded):
        assert line.count("M") == 2, "a gap is a gap"
    assert untold == "", "what is unknown is not drawn, as zero neither"
    assert browser.run(SHOWN, "p.untold") == 1
    labels = browser.run(
        "return [...document.querySelectorAll('.plot svg')].map(one => one.getAttribute('aria-label'))"
    )
    assert labels[0].startswith("GPU utilisation over the last hour: ")
    assert labels[2] == "GPU utilisation over the last hour: unknown"
    assert browser.texts(".plot .y")[1].split("\n") == ["79 GiB", "39.5 GiB", "0 B"]


@pytest.mark.exhaustive
def test_sizes_and_times_are_the_command_lines(browser: Browser) -> None:
    sizes = [0, 1, 1023, 1024, 1536, 10**6, 10**7, GIB - 1, GIB, 3 * GIB // 2, 79 * GIB, 12345678901, 999 * GIB]
    spans = [0, 0.04, 4.2, 9.96, 59.94, 59.99, 60, 61.7, 200, 3599.9, 3600, 7500, 86399, 200_000]
    script = """
        return import('/format.js').then(words => [arguments[0].map(words.size), arguments[1].map(words.span)]);
    """
    assert browser.run(script, sizes, spans) == [
        [size_text(one) for one in sizes],
        [seconds_text(one) for one in spans],
    ]


@pytest.mark.exhaustive
def test_a_tenants_colour_is_its_names(browser: Browser, scene: Scene) -> None:
    def colours() -> dict[str, str]:
        script = (
            "return [...document.querySelectorAll('tbody tr')].map(row => [row.querySelector('.tenant').textContent,"
        )
        script += " getComputedStyle(row.querySelector('.key')).getPropertyValue('--own')])"
        return {str(name): str(colour) for name, colour in browser.run(script)}

    before = colours()
    assert len({before[name] for name in ("ann", "carol", "dora")}) == 3
    scene.leases = [lease(7, "aaa"), *(one for one in scene.leases if one["tenant"] in ("ann", "dora"))]
    browser.wait_for("#totals", "4 leases of 3 tenants")
    assert {name: colours()[name] for name in ("ann", "dora")} == {name: before[name] for name in ("ann", "dora")}


@pytest.mark.exhaustive
def test_twenty_tenants_have_twenty_colours(browser: Browser, scene: Scene) -> None:
    scene.leases = [lease(number << 100, f"tenant-{number}") for number in range(1, 21)]
    browser.wait_for("#totals", "20 leases of 20 tenants")
    script = "const all = [...document.querySelectorAll('tbody .key, .bar > button')];"
    script += "return all.map(one => getComputedStyle(one).getPropertyValue('--own'))"
    assert len(set(browser.run(script))) == 20


@pytest.mark.exhaustive
def test_regions_are_in_the_bar_in_their_shares(browser: Browser, scene: Scene) -> None:
    parent = 0xA1 << 120
    scene.leases += [
        lease(number, "ann", parent=f"{parent:032x}", size_bytes=size * GIB) for number, size in ((1, 5), (2, 10))
    ]
    browser.wait_for("tbody", "5 GiB")
    shares = """
        const strip = [...document.querySelectorAll('.bar .regions')].find(one => one.checkVisibility());
        const width = strip.getBoundingClientRect().width;
        return [...strip.children].map(one => Math.round(20 * one.getBoundingClientRect().width / width));
    """
    assert browser.run(shares) == [5, 10, 5], "of twenty: two regions and what is in none"
    title = browser.run("return document.querySelector('.bar > button:has(.regions:not([hidden]))').title")
    assert title == "ann, 20 GiB, 13 GiB used, active, region of 5 GiB, region of 10 GiB"


@pytest.mark.exhaustive
def test_an_event_names_id_size_and_card(own_page: Browser, rig: WebRig) -> None:
    browser, scene = own_page, rig.scene
    scene.leases.append(lease(0xE1 << 120, "ann", parent=f"{0xA1 << 120:032x}", size_bytes=3 * GIB))
    browser.wait_for("tbody", "3 GiB")
    for lease_id in (0xC1 << 120, 0xE1 << 120):
        rig.tell(lease_id, Phase.WARNING)
    browser.wait_for("#events", "ann was warned")
    assert browser.texts("#events .of") == ["e1000000region of 3 GiB on GPU 0", "c100000010 GiB on GPU 0"]


@pytest.mark.exhaustive
def test_a_list_that_is_cut_says_how_many_rows_are_left(browser: Browser, scene: Scene) -> None:
    scene.leases = [lease(number << 100, "ann") for number in range(1, 31)]
    browser.wait_for("#totals", "30 leases of 1 tenant")
    below = (
        "const card = document.querySelector('.card'), end = card.querySelector('.scroller').getBoundingClientRect();"
    )
    below += (
        "return [...card.querySelectorAll('tbody tr')].filter(row => row.getBoundingClientRect().bottom > end.bottom)"
    )
    left = browser.run(f"{below}.length")
    assert left > 0
    assert browser.texts(".card:first-child .more") == [f"{left} more rows below. Show all 30"]
    browser.run("document.querySelector('.more button').click()")
    assert browser.run(f"{below}.length") == 0
    assert browser.texts(".card:first-child .more")[0].strip() == "Show fewer"


@pytest.mark.exhaustive
def test_plots_span_what_was_sampled(browser: Browser) -> None:
    assert browser.texts(".plot .x")[1].split("\n") == ["60 min", "45", "30", "15", "now"]
    minutes = Scene()
    now_ns = time.monotonic_ns()
    samples = [LoadSample(now_ns - number * 10 * NS_PER_S, 50, GIB, GIB) for number in range(60, -1, -1)]
    minutes.loads = [CardLoads(CARD, tuple(samples))]
    with WebRig(minutes) as other:
        browser.open(other.url)
        browser.wait_for(".plot .x", "12 min")
        assert browser.texts(".plot .x")[0].split("\n") == ["12 min", "9", "6", "3", "now"]
        label = browser.run("return document.querySelector('.plot svg').getAttribute('aria-label')")
        assert label.startswith("GPU utilisation over the last 12 minutes: ")


HISTORY_FIRST = """
const ask = window.fetch;
let taken;
const isTaken = new Promise((resolve) => (taken = resolve));
window.fetch = async (path, options) => {
  if (path.endsWith("/events")) await isTaken;
  const answer = await ask(path, options);
  if (path.endsWith("/history")) {
    answer.json = async () => {
      setTimeout(taken);
      return Response.prototype.json.call(answer);
    };
  }
  return answer;
};
"""
"""Makes a page receive the history before it knows of any card."""


@pytest.mark.exhaustive
def test_plots_span_what_was_sampled_whichever_comes_first(browser: Browser, shared_rig: WebRig) -> None:
    script = browser.devtools("Page.addScriptToEvaluateOnNewDocument", source=HISTORY_FIRST)
    browser.open(shared_rig.url)
    browser.wait_for("#totals", "5 leases of 4 tenants")
    browser.devtools("Page.removeScriptToEvaluateOnNewDocument", **script)
    assert browser.texts(".plot .x")[1].split("\n") == ["60 min", "45", "30", "15", "now"]


@pytest.mark.exhaustive
def test_the_filter_and_copying_an_id(own_page: Browser, rig: WebRig) -> None:
    browser = own_page

    def shown() -> list[str]:
        script = "return [...document.querySelectorAll('tbody .tenant')].filter(one => one.checkVisibility())"
        return [str(text) for text in browser.run(f"{script}.map(one => one.textContent)")]

    for phase in (Phase.GRACE, Phase.TEARDOWN, Phase.ENDED):
        rig.tell(0xC1 << 120, phase, "expired")
    browser.wait_for("#events", "ended, expired")
    assert browser.texts("#events .tenant") == ["carol"], "one event an end"
    browser.press("/ANN")
    assert shown() == ["ann", "ann"]
    assert browser.run("return document.querySelectorAll('.bar > .out').length") == 3
    assert browser.texts("#events .tenant") == []
    browser.press("\ue00c")
    assert len(shown()) == 5
    browser.press("d1000000")
    assert shown() == ["dora"]
    browser.press("\ue00c")
    # A headless browser has its own clipboard, for pages that may write to it.
    browser.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.run("document.querySelector('tbody [data-copies^=a1]').click()")
    browser.wait_for("#copied", f"Copied {0xA1 << 120:032x}")
    assert browser.run("return navigator.clipboard.readText()") == f"{0xA1 << 120:032x}"


@pytest.mark.exhaustive
def test_an_operator_drains_and_clears_a_fence(browser: Browser, scene: Scene) -> None:
    def do(opener: str, says: str) -> str:
        browser.run(f"document.querySelector('{opener}').click()")
        said = browser.text("#act-dialog")
        browser.run("document.getElementById('act-do').click()")
        browser.wait_for("#act-told", says)
        browser.press("\ue007")
        assert not browser.run("return document.getElementById('act-dialog').open"), "Enter closes it"
        return said

    assert "6 GiB of GPU 0 could not be proved free" in do(".clear", "2 fenced slices were cleared.")
    assert scene.cleared == [CARD]
    assert "Minutes until the remaining leases are ended" in do(
        "#drain-begin", "5 leases are left, and will end within"
    )
    for one in scene.cards:
        one["drain_left_ms"] = 600_000
    browser.wait_for("#drain-text", "This host is being drained: it grants no leases, and the remaining leases end in")
    do("#drain-end", "it grants leases.")
    assert scene.drained == [600_000, None]
    browser.run("document.querySelector('#drain-begin').click()")
    browser.run("const field = document.getElementById('act-input'); field.value = '-1'; field.focus()")
    browser.run("document.getElementById('act-do').click()")
    assert browser.text("#act-told")
    assert scene.drained == [600_000, None], "what makes no sense is not sent"


@pytest.mark.exhaustive
def test_who_is_no_operator_has_nothing_to_press(browser: Browser, shared_rig: WebRig) -> None:
    browser.run("sessionStorage.clear()")
    browser.open(shared_rig.url)
    browser.wait_for("#totals", "5 leases of 4 tenants")
    found: Any = browser.run(
        "return [...document.querySelectorAll('main button, header button')]"
        ".filter(one => one.checkVisibility() && !one.closest('.bar')).map(one => one.id || one.className)"
    )
    assert set(found) == {"names", "copy"}


@pytest.mark.exhaustive
def test_a_fleet_is_shown_with_its_horizon_and_names(own_page: Browser, rig: WebRig) -> None:
    browser, scene = own_page, rig.scene
    assert browser.run("return document.getElementById('fleet').hidden"), "a node without a fleet shows none"
    rig.notify_page(FleetMembership("gpu1", 0, 0))
    browser.wait_for("#fleet-horizon", "not joined")
    rig.notify_page(FleetMembership("gpu1", boot_ns() + 3600 * NS_PER_S, 1))
    browser.wait_for("#fleet-horizon", "59 min")
    assert (browser.text("#fleet-node"), browser.text("#fleet-names")) == ("gpu1", "none")
    assert browser.text("#fleet-fenced") == "1 time"
    left = browser.text("#fleet-horizon")
    wait_until(lambda: browser.text("#fleet-horizon") != left, "it is counted down")
    name = "<b>a-name-as-long-as-names-may-be-" + "x" * 31
    scene.leases = [lease(1, "ann", name=name, epoch=41), lease(2, "bob", name="model-b", epoch=42)]
    browser.wait_for("#fleet-names", f"{name} (epoch 41), model-b (epoch 42)")
    for width in (390, 1440):
        look_at(browser, width, "light")
        assert browser.run("return document.documentElement.scrollWidth") <= width
    rig.notify_page(FleetMembership("gpu1", boot_ns() - 1, 1))
    browser.wait_for("#fleet-horizon", "cut off from etcd")
    assert not browser.run(CONTRAST)
    browser.run("document.getElementById('names').click()")
    wait_until(lambda: browser.text("#fleet-names") == "2", "without the token it says how many")
    assert browser.complaints() == []
