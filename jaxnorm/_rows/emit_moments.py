"""The mean and the sum of squares about it of 16-bit elements, in one exchange.

A warp, a block: each knows of its elements the count n, the mean m and M = sum((x - m)^2). Several of them become one
about an origin o, which is the mean of the first one. With d = m - o,

  s = sum(n d),  q = sum(M + n d^2),  and of all elements the mean is o + s / sum(n), and M is q - s^2 / sum(n).

A warp treats its elements in the same way: each one has n = 1, m = x and M = 0. The nearer the origin is to the mean,
the fewer digits the difference loses. So a warp's origin is the middle one of three elements. Until a step ends, the
accumulators of a mean and of its squares are s and q.
"""

from jaxnorm._rows.emit_memory import Memory
from jaxnorm._rows.expressions import accumulator, c_type


class Moments(Memory):
    """Reductions "count", "mean" and "squares_about_mean".

    The attribute of a mean has its count, and the attribute of a sum of squares has its mean.
    """

    def _origin(self, mean, u) -> str:
        return self.row(f"origin_{mean.number}", u)

    def _declare_accumulator(self, n, u, start=""):
        self.w(f"{c_type(accumulator(n))} {self._acc(n, u)}{start};")
        if n.attr[0] == "mean":
            self.w(f"float {self._origin(n, u)} = 0.f;")

    @staticmethod
    def _moments(reductions):
        """[(count, mean, sum of squares), ...] of a phase."""
        squares = [n for n in reductions if n.attr[0] == "squares_about_mean"]
        return [(n.attr[1].attr[1], n.attr[1], n) for n in squares]

    # ---- how many columns each has ----

    @property
    def _even(self) -> bool:
        """Whether all threads have as many elements of a row."""
        return self.whole_rounds and not self.plan.shifted

    def _are_known(self, sharers) -> bool:
        """Whether the plan says how many columns each of so many sharers of a row has."""
        return sharers == 1 or self._even

    def _columns(self, count, sharers) -> str:
        """How many columns each of so many sharers of a row has."""
        known = self._are_known(sharers)
        return f"{self.program.width // sharers}.f" if known else f"(float){count}"

    def _known_counts(self, reductions, sharers):
        """The counts that nobody has to add up for so many sharers of a row."""
        known = self._are_known(sharers)
        return [count for count, *_ in self._moments(reductions)] if known else []

    # ---- the first step: a warp ----

    def _added(self, n, x, u) -> str:
        """What an element adds to a reduction."""
        kind = n.attr[0]
        if kind == "count":
            return "1"
        if kind == "mean":
            self.w(f"if ({self._is_first}) {self._origin(n, u)} = {self._first(x)};")
            return f"({x} - {self._origin(n, u)})"
        if kind == "squares_about_mean":
            return f"square({x} - {self._origin(n.attr[1], u)})"
        return f"({c_type(accumulator(n))}){x}"

    @property
    def _share_origin(self) -> bool:
        """Whether the lanes of a warp have an origin in common: each of them has an element in its first slot."""
        plan = self.plan
        fewest = min(self.part, self.slots - (plan.cluster - 1) * self.part)
        # Lanes with an end of the row have a loop over elements of their own.
        return fewest >= plan.lanes and not (plan.shifted and plan.rounds > 1)

    @property
    def _is_first(self) -> str:
        """Whether an element is the first one that a thread has of a row."""
        outside = self.plan.shifted and not self._share_origin
        first = "k == 0 && (v == 0 || first + v == 0)" if outside else "k == 0 && v == 0"
        return f"round == 0 && {first}" if self.plan.rounds > 1 else first

    def _first(self, x) -> str:
        """The origin of a thread's elements, given the first of them."""
        lanes = self._lanes_of_warp
        if self._share_origin and lanes < 3:
            x = self._of_lane(x, 0)
        elif self._share_origin:
            # One of three may be rare, or outside of the row.
            x = f"middle_of({', '.join(self._of_lane(x, k * lanes // 3) for k in range(3))})"
        return f"finite_or_zero({x})"

    def _threads_to_origin(self, reductions):
        """Moves what threads know to the first lane's mean, unless they have an origin in common already."""
        for count, mean, squares in [] if self._share_origin else self._moments(reductions):
            for u in self.rows:
                part, origin, n = self._acc(mean, u), self._origin(mean, u), self._acc(count, u)
                self._end_step(mean, squares, u, _inverse(n))
                self.w(f"{origin} = finite_or_zero({self._of_lane(part, 0)});")
                with self.w.block():
                    self.w(f"const float distance = {part} - {origin};")
                    self.w(f"{part} = (float){n} * distance;")
                    self.w(f"{self._acc(squares, u)} += {part} * distance;")

    # ---- the other steps ----

    def _add_parts_of_moments(self, reductions, u, sharers, read, loop):
        """Adds up what parts know, of which so many share a row, about the mean of the first one: a loop over `q`."""
        w = self.w
        known = self._are_known(sharers)
        for count, mean, squares in self._moments(reductions):
            origin, part, of_squares = (
                self._origin(mean, u),
                self._acc(mean, u),
                self._acc(squares, u),
            )
            n = "" if known else read(count, u, "q")
            w(f"{origin} = finite_or_zero({read(mean, u, 0)});")
            w(f"{part} = {of_squares} = 0.f, {self._acc(count, u)} = 0;")
            with w.block(loop):
                w(f"const float distance = {read(mean, u, 'q')} - {origin};")
                w(f"const float moved = {self._columns(n, sharers)} * distance;")
                w(f"{part} += moved, {of_squares} += {read(squares, u, 'q')} + moved * distance;")
                if not known:
                    w(f"{self._acc(count, u)} += {n};")

    def _end_moments(self, reductions, sharers):
        """Ends a step. So many of its results share a row."""
        for count, mean, squares in self._moments(reductions):
            for u in self.rows:
                n, known = self._acc(count, u), self._are_known(sharers)
                share = f"1.f / {self._columns(n, sharers)}" if known else _inverse(n)
                self._end_step(mean, squares, u, share)

    def _end_step(self, mean, squares, u, share):
        sums = f"{self._acc(mean, u)}, {self._acc(squares, u)}"
        self.w(f"mean_and_squares({self._origin(mean, u)}, {share}, {sums});")


def _inverse(count) -> str:
    """1 / count. What has no columns has sums of 0."""
    return f"reciprocal_fast((float)max_of({count}, 1))"
