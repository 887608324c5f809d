"""Orders of equations: what stands between some, after others have become one."""

import random

import pytest

from jaxnorm._autofuse.order import Order, in_order


def reachable(edges, united, start):
    """What edges lead to from some equations; united ones stand for each other."""
    found, stack = set(), list(start)
    while stack:
        i = stack.pop()
        for member in united.get(i, {i}):
            for n in edges[member]:
                new = united.get(n, {n}) - found
                found |= new
                stack += new
    return found


@pytest.mark.parametrize("seed", range(40))
def test_order(seed):
    """Against a search of all paths."""
    drawn = random.Random(seed)
    count = drawn.choice((2, 8, 40))
    needs = [
        sorted(drawn.sample(range(max(0, i - 6), i), min(i, drawn.choice((0, 1, 1, 2)))))
        for i in range(count)
    ]
    users = [[i for i in range(count) if n in needs[i]] for n in range(count)]
    barriers = sorted(drawn.sample(range(count), count // 4))
    order, united = Order(needs, barriers), {}

    def between(i, others):
        before, after = (reachable(edges, united, {i}) for edges in (needs, users))
        behind, ahead = (reachable(edges, united, others) for edges in (users, needs))
        return ((before & behind) | (after & ahead)) - others - {i}

    for _ in range(30):
        free = [n for n in range(count) if n not in united]
        if len(free) < 2:
            break
        i, first = drawn.sample(free, 2)
        group = {first}
        for n in drawn.sample(free, min(len(free), 3)):
            inside = {n} | between(n, group)
            if inside.isdisjoint(united):
                group |= inside
        if i not in group:
            assert order.between(i, group) == between(i, group)
            for bits, edges in ((order.before, needs), (order.after, users)):
                made = {order.barriers[k] for k in range(len(barriers)) if bits[i] >> k & 1}
                assert made == reachable(edges, {}, {i}).intersection(barriers)
        if len(group) > 1:
            order.unite(group)
            united.update(dict.fromkeys(group, group))
        places = {n: order._place[n] for n in range(count)}
        assert sorted(places.values()) == list(range(count))
        for n in range(count):
            assert all(places[m] < places[n] for m in needs[n] if m not in united.get(n, ()))
    assert len(united) or count == 2 or not any(needs)


def test_far_apart():
    """What would take long to find is not found."""
    chain = [[i - 1] if i else [] for i in range(20000)]
    assert Order(chain, []).between(19999, {0}) is None
    assert Order(chain, []).between(500, {0}) == set(range(1, 500))


def test_in_order():
    needs = {1: set(), 2: {3}, 3: {1}, 4: {5}, 5: {4}}
    assert in_order(needs, lambda key: key) == [1, 3, 2]
