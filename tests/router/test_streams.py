"""`Readers`: counts the readers of a batcher's streams by tenant."""

from collections import Counter

from penstock.router.streams import Readers


class NotIterable(Counter[str]):
    """Fails when its entries are iterated over: with ten thousand entries that takes a quarter of a millisecond."""

    def items(self) -> object:  # type: ignore[override]
        raise AssertionError("all are looked at")


def test_adding_and_removing_readers_does_not_iterate_over_all_tenants() -> None:
    readers = Readers()
    readers.counts = NotIterable()
    for tenant in ("a", "b", "b"):
        readers.add(tenant)
    readers.remove("b")
    assert dict(readers.counts) == {"a": 1, "b": 1}
    readers.remove("a")
    assert dict(readers.counts) == {"b": 1}
    assert not readers.none.is_set()
    readers.remove("b")
    assert not readers.counts
    assert readers.none.is_set()
