"""An order in which a program can run."""

import heapq
from collections.abc import Callable, Mapping


def in_order(needs: Mapping[int, set[int]], position: Callable[[int], float]) -> list[int]:
    """The keys, each behind the keys that it needs, and else by their position; fewer if some need each other."""
    waiting = {key: set(needed) for key, needed in needs.items()}
    users: dict[int, list[int]] = {}
    for key, needed in waiting.items():
        for n in needed:
            users.setdefault(n, []).append(key)
    ready = [(position(key), key) for key, needed in waiting.items() if not needed]
    heapq.heapify(ready)
    order = []
    while ready:
        _, key = heapq.heappop(ready)
        order.append(key)
        for user in users.get(key, ()):
            waiting[user].discard(key)
            if not waiting[user]:
                heapq.heappush(ready, (position(user), user))
    return order
