from gpulease.daemon.web.load_samples import MAX_SAMPLES, CardLoads, Loads, LoadSample

NS = 1_000_000_000
CARD = "GPU-1"


def sample(at_s: float, percent: int | None = 1) -> LoadSample:
    return LoadSample(int(at_s * NS), percent, None, 3)


def told(loads: Loads, now_s: float = 1000.0) -> list[float]:
    found: list[float] = loads.view(now_s)["cards"][CARD]["age_s"]
    return found


def test_what_is_unknown_stays_so() -> None:
    loads = Loads()
    assert loads.view(5)["cards"] == {}
    loads.take(
        CardLoads(
            CARD,
            (
                sample(999, None),
                sample(999.5, 0),
            ),
        )
    )
    assert loads.view(1000)["cards"][CARD] == {
        "age_s": [1.0, 0.5],
        "utilization_percent": [None, 0],
        "used_bytes": [None, None],
        "leased_bytes": [3, 3],
    }


def test_in_order_and_each_once_whatever_comes_first() -> None:
    loads = Loads()
    loads.take(CardLoads(CARD, (sample(30),)))
    loads.take(
        CardLoads(
            CARD,
            (
                sample(10),
                sample(20),
                sample(30),
            ),
        )
    )
    assert told(loads, 30) == [20, 10, 0]


def test_an_hour_is_kept_and_no_more() -> None:
    loads = Loads()
    for number in range(3):
        loads.take(CardLoads(CARD, tuple(sample(number * 3600 + at) for at in range(0, 3600, 10))))
    ages = told(loads, 3 * 3600)
    assert (len(ages), ages[0], ages[-1]) == (MAX_SAMPLES, 3600, 10)
    assert told(loads, 0)[0] == 0, "a clock that is behind makes no age less than none"
