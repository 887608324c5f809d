"""Orders in which a program can run."""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

# What stands between equations is looked for from both sides, among more and more equations.
SEARCHED = 32, 128, 512, 2048


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


class Order:
    """An order of equations, each behind those that it needs, in which united ones stand together.

    Attributes:
      barriers: equations that are never united with others.
      before, after: the barriers that must run before or after an equation, as bits.
    """

    def __init__(self, needs: Sequence[Collection[int]], barriers: Sequence[int]):
        # What is directly before and behind each one; united ones have theirs together.
        self._needs: list[set[int]] = list(map(set, needs))
        self._users: list[set[int]] = [set() for _ in needs]
        for i, needed in enumerate(needs):
            for n in needed:
                self._users[n].add(i)
        self._order = list(range(len(needs)))
        self._place = list(range(len(needs)))
        self._united: dict[int, Collection[int]] = {}
        self.barriers = barriers
        bit = {i: 1 << number for number, i in enumerate(barriers)}
        self.before, self.after = [0] * len(needs), [0] * len(needs)
        for i, needed in enumerate(needs):
            for n in needed:
                self.before[i] |= self.before[n] | bit.get(n, 0)
        for i in reversed(range(len(needs))):
            for n in needs[i]:
                self.after[n] |= self.after[i] | bit.get(i, 0)

    def between(self, i: int, others: set[int]) -> set[int] | None:
        """The equations that must run after one of `others` and before i, or the other way round.

        None if too many would have to be looked at.
        """
        here, places = self._place[i], [self._place[n] for n in others]
        behind = self._paths(others, {i}, (min(places), here))
        ahead = self._paths({i}, others, (here, max(places)))
        return None if behind is None or ahead is None else behind | ahead

    def _paths(
        self, earlier: set[int], later: set[int], window: tuple[int, int]
    ) -> set[int] | None:
        """What stands on paths from earlier equations to later ones, between two places; None if that is not found."""
        if window[1] - window[0] < 2:
            return set()
        sides = (earlier, later, self._users), (later, earlier, self._needs)
        for limit in SEARCHED:
            for start, ends, edges in sorted(sides, key=lambda side: len(side[0])):
                reached = self._reached(start, ends, edges, window, limit)
                if reached is not None:
                    return self._leading(reached, ends, edges)
        return None

    def _reached(self, start, ends, edges, window, limit) -> set[int] | None:
        """What edges lead to within a window of places, up to the ends; None if that is too much."""
        (first, last), place = window, self._place
        reached, stack = set(), list(start)
        while stack:
            for n in edges[stack.pop()]:
                if (
                    n not in reached
                    and first < place[n] < last
                    and n not in ends
                    and n not in start
                ):
                    reached.add(n)
                    stack.append(n)
            if len(reached) > limit:
                return None
        return reached

    def _leading(self, reached, ends, edges) -> set[int]:
        """Those among the reached equations from which edges lead to the ends."""
        found: set[int] = set()
        for n in sorted(reached, key=self._place.__getitem__, reverse=edges is self._users):
            if not found.isdisjoint(edges[n]) or not ends.isdisjoint(edges[n]):
                found.update(self._united.get(n, (n,)))
        return found

    def unite(self, members: set[int]) -> None:
        """Makes equations one, with nothing between them: what one needs, all need."""
        places = [self._place[n] for n in members]
        first, last = min(places), max(places)
        window = self._order[first : last + 1]
        reached = self._reached(members, set(), self._users, (first, last), len(window)) or ()
        behind = {i for n in reached for i in self._united.get(n, (n,))}
        earlier = [i for i in window if i not in behind and i not in members]
        inside = [i for i in window if i in members]
        later = [i for i in window if i in behind]
        self._order[first : last + 1] = order = [*earlier, *inside, *later]
        for place, i in enumerate(order, first):
            self._place[i] = place
        for edges in (self._needs, self._users):
            together = set().union(*(edges[i] for i in members)) - members
            for i in members:
                edges[i] = together
        self._united.update(dict.fromkeys(members, members))
