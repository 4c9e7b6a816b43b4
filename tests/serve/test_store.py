"""A store keeps what was used last, within its limit."""

from leap.serve.store import Store


def test_the_store_lets_go_of_what_was_used_longest_ago():
    store = Store(10)
    assert store.put("a", 1, 4) and store.put("b", 2, 4)
    assert store.get("a") == 1
    assert store.put("c", 3, 4)
    assert (store.get("b"), store.get("a"), store.n_bytes, len(store)) == (None, 1, 8, 2)
    assert not store.put("d", 4, 11) and store.get("d") is None
    assert store.drop("a") and not store.drop("a") and store.n_bytes == 4
