"""Which nonces were used, and for how long that is remembered."""

from gpulease.daemon.capabilities.authority import MAX_STALE, NonceStore


def test_a_used_nonce_is_known_until_its_time_is_over() -> None:
    store = NonceStore()
    store.use(1, b"a", 100)
    assert store.is_used(1, b"a")
    assert not store.is_used(2, b"a")
    assert store.has_room(1, 100)
    assert store.is_used(1, b"a")
    store.has_room(1, 101)
    assert (store.is_used(1, b"a"), len(store)) == (False, 0)


def test_one_that_is_given_back_can_be_used_again() -> None:
    store = NonceStore()
    store.use(1, b"a", 100)
    store.give_back(1, b"a")
    assert not store.is_used(1, b"a")
    store.give_back(1, b"never used")
    store.use(1, b"a", 120)
    store.has_room(1, 100)
    assert store.is_used(1, b"a")
    store.has_room(1, 200)
    assert (store.is_used(1, b"a"), len(store)) == (False, 0)


def test_one_that_is_used_again_is_known_until_the_later_end() -> None:
    store = NonceStore()
    store.use(1, b"a", 100)
    store.give_back(1, b"a")
    store.use(1, b"a", 120)
    store.has_room(1, 110)
    assert store.is_used(1, b"a")


def test_what_is_used_and_given_back_for_ever_takes_no_room() -> None:
    store = NonceStore()
    store.use(2, b"kept", 50)
    for number in range(1000):
        store.use(1, b"%d" % (number % 7), 100 + number)
        store.give_back(1, b"%d" % (number % 7))
    assert len(store) <= MAX_STALE + 2
    assert store.is_used(2, b"kept")
    store.has_room(1, 51)
    assert not store.is_used(2, b"kept")
