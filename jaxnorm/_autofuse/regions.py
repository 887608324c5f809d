"""Where row programs are in a program: the elementwise code around each reduction along rows.

A region starts at a reduction along the last axis and takes its neighbours, forward and backward, as far as they are
elementwise on the same rows. Matrix products, convolutions, calls and control flow end it. A region is convex: nothing
outside of it stands between two of its equations, so that it can run as one call. What a region computes and others
use is a result of it. A later region computes such a result again where that moves fewer bytes than to write and to
read it: backward code then reads x, not what forward made of it.

Equal equations are one, and dead ones are gone, before regions are looked for.
"""

import collections
import itertools
from collections.abc import Iterator

import numpy as np

from jaxnorm._autofuse.costs import LEAST_BYTES
from jaxnorm._autofuse.flow import CUTS, Graph, Reduction
from jaxnorm._autofuse.region import Region, program_of
from jaxnorm._primitive.programs import source_line
from jaxnorm._rows import primitive
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.save import Flat

# Rows of fewer columns are left.
LEAST_COLUMNS = 8
# The most equations that a value is computed again with.
CONE = 64
# The longest rows that a fusion of XLA's reads once, reductions and what follows them.
XLA_COLUMNS = 8192
# How many reasons a report gives for the end of a region.
STOPS = 4

# What moves or converts elements.
_MOVES = {
    "broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze", "transpose",
}  # fmt: skip
# What is computed of parameters for each row again, because that costs next to nothing.
_CHEAP = {*_MOVES, "add", "add_any", "mul", "neg", "sub"}
# What costs too much arithmetic to be computed twice.
_COSTLY = {"random_bits", "threefry2x32"}
# What XLA does not compute once more for each reader.
_EXPENSIVE = {
    "acos", "cos", "div", "erf", "erf_inv", "exp", "exp2", "log", "log1p", "logistic", "pow", "sin",
    "tanh",
}  # fmt: skip
# What is left out, one attempt after the other, where rows cannot have all.
_ATTEMPTS = ("", "pieces of rows", "sums over rows")


class Finder:
    """Finds the regions of a program.

    Attributes:
      regions: that become kernels, in the order of their first equation.
      left: (region, reason) of those that do not.
      plain: equations that run by themselves: those that no region has, and what is computed again for them.
    """

    def __init__(self, flat: Flat):
        self.flat, self.graph = flat, Graph(flat)
        self.regions: list[Region] = []
        self.left: list[tuple[Region, str]] = []
        self.plain: set[int] = set()
        self._taken: set[int] = set()
        self._refusals: dict[int, str] = {}  # by program
        for i, rows in self._seeds():
            if i not in self._taken:
                self._start(i, rows)
        self._compute_again()
        self._decide()

    def _seeds(self) -> Iterator[tuple[int, Reduction]]:
        """Reductions along rows first: they may take sums over rows, joined pieces and random bits with them."""
        known = [(i, e) for i, e in enumerate(self.graph.equations) if e.kind.known]
        reductions = [(i, e.kind.reductions[0]) for i, e in known if e.kind.reductions]
        yield from ((i, r) for i, r in reductions if r.along_row)
        yield from ((i, r) for i, r in reductions if not r.along_row)
        yield from ((i, e.kind.rows) for i, e in known if e.kind.joins)
        yield from ((i, e.kind.rows) for i, e in known if e.kind.draws)
        yield from ((i, e.kind.rows) for i, e in known if e.kind.is_long)

    def _start(self, seed: int, reduction: Reduction) -> None:
        if reduction.columns < LEAST_COLUMNS or reduction.rows < 2:
            return
        # What rows cannot have together shows in the whole program alone. Less is tried then.
        for without in _ATTEMPTS:
            members, ends = self._grow(seed, reduction, without)
            region = Region(reduction.shape, reduction.columns, sorted(members), ends=ends)
            self._set_inputs(region)
            self._set_results([region])
            reason = self._refusal(region)
            if not reason or without == _ATTEMPTS[-1]:
                self._taken |= members
                self.graph.order.unite(members)
                if reason:
                    self.left.append((region, reason))
                else:
                    self.regions.append(region)
                return

    def _grow(
        self, seed: int, reduction: Reduction, without: str
    ) -> tuple[set[int], tuple[int, ...]]:
        """The members of a region, and the equations that ended it."""
        graph, order = self.graph, self.graph.order
        members, before, after = {seed}, order.before[seed], order.after[seed]
        # A neighbour that stays outside, and the equation for which it does.
        stops: dict[int, int] = {}
        outside: set[int] = set()  # neighbours that can never be members
        border = [seed]  # members that may have neighbours which are none
        grown = True
        while grown:
            grown, new = False, []
            for i in dict.fromkeys(itertools.chain.from_iterable(map(graph.neighbours, border))):
                if i in members or i in outside:
                    continue
                barred = (before & order.after[i]) | (after & order.before[i])
                between = None
                if not barred and self._may_fit(i, reduction):
                    between = order.between(i, members)
                if between is None:
                    first = barred & -barred
                    stops[i] = order.barriers[first.bit_length() - 1] if barred else i
                    outside.add(i)
                    continue
                added = sorted({i, *between})
                inside = members.union(added)
                blocks = (k for k in added if not self._fits(k, inside, reduction, without))
                blocking = next(blocks, None)
                if blocking is not None:
                    stops[i] = blocking
                    if not self._may_fit(blocking, reduction):
                        outside.add(i)
                    continue
                for k in added:
                    before |= order.before[k]
                    after |= order.after[k]
                new += added
                members.update(added)
                grown = True
            border = [
                m for m in sorted((*border, *new)) if not members.issuperset(graph.neighbours(m))
            ]
        ends = dict.fromkeys(k for i, k in stops.items() if i not in members)
        return self._trimmed(members, seed), tuple(ends)

    def _may_fit(self, i: int, reduction: Reduction) -> bool:
        """Whether an equation is one of a region's rows, if the region has what else it needs for that."""
        equation = self.graph.equations[i]
        return (
            i not in self._taken
            and equation.kind.known
            and (
                equation.kind.sums_rows
                or all(
                    self.graph.size(v) <= 8 * reduction.columns or self._is_of_rows(v, reduction)
                    for v in equation.node.outputs
                )
            )
        )

    def stops(self, region: Region) -> tuple[str, ...]:
        """What ended a region, and where."""
        found: dict[str, None] = {}
        for i in region.ends:
            eqn = self.graph.equations[i].node.eqn
            line = source_line(eqn)
            found[f"{eqn.primitive.name}{f' ({line})' if line else ''}"] = None
        return tuple(found)[:STOPS]

    def _fits(self, i: int, members: set[int], reduction: Reduction, without: str) -> bool:
        """Whether an equation is one of a region's rows."""
        graph, equation = self.graph, self.graph.equations[i]
        rows, columns = reduction.rows, reduction.columns
        if not self._may_fit(i, reduction):
            return False
        if equation.kind.sums_rows:
            # A sum over rows is of what the region has, and nothing of the region is computed from it.
            inside = all(
                any(n in members for n in (*graph.users[v], graph.producer.get(v, i)) if n != i)
                for v in equation.reads
            )
            same = all(r.rows * r.columns == rows * columns for r in equation.kind.reductions)
            return without != "sums over rows" and inside and same
        if any((r.rows, r.columns) != (rows, columns) for r in equation.kind.reductions):
            return False
        if any(n in members and graph.equations[n].kind.sums_rows for n in graph.needs[i]):
            return False
        if without and equation.kind.names & {*CUTS, "transpose"}:
            return False
        return all(
            self._is_of_rows(v, reduction) or self._is_of_columns(v, i, members, columns)
            for v in equation.node.outputs
        )

    def _is_of_rows(self, value: int, view: Reduction | Region) -> bool:
        """Whether an array has a number for each row of a view, or pieces of rows."""
        count, rest = divmod(self.graph.size(value), view.rows)
        if rest or count != 1:
            return not rest and view.columns <= 8 * count <= 64 * view.columns
        long = tuple(n for n in self.graph.aval(value).shape if n != 1)
        return long == view.shape or len(long) == 1

    def _is_of_columns(self, value, i, members, columns) -> bool:
        """Whether an array is parameters that the region alone needs, for next to no work."""
        graph = self.graph
        return (
            graph.size(value) <= 8 * columns
            and graph.equations[i].kind.names <= _CHEAP
            and value not in graph.results
            and members.issuperset(graph.users[value])
        )

    def _trimmed(self, members: set[int], seed: int) -> set[int]:
        """Without what only moves or converts at the border, unless fewer bytes are read or written so."""
        graph, changed = self.graph, True
        while changed:
            changed = False
            for i in sorted(members - {seed}):
                equation = graph.equations[i]
                if not equation.kind.names <= _MOVES or len(equation.reads) != 1:
                    continue
                (source,), (result,) = equation.reads, equation.node.outputs
                less = graph.nbytes(source) - graph.nbytes(result)
                first = graph.producer.get(source) not in members
                last = members.isdisjoint(graph.users[result])
                if (first and less >= 0) or (last and less <= 0):
                    members.remove(i)
                    changed = True
        return members

    def _refusal(self, region: Region) -> str:
        """Sets a region's program. Returns why rows cannot run it, or ""."""
        region.program = program_of(self.graph, region)
        key = id(region.program)  # equal regions have one program, which the graph keeps
        if key not in self._refusals:
            try:
                primitive.check(region.program, row_sums=True)
                self._refusals[key] = ""
            except NotARowProgram as error:
                self._refusals[key] = str(error).removeprefix("fuse: ")
        return self._refusals[key]

    # ---- inputs and results ----

    def _set_inputs(self, region: Region) -> None:
        """Sets what a region reads: what none of its equations makes. Its kernel makes numbers of literals itself."""
        graph = self.graph
        region.inputs = self._inputs({*region.nodes, *region.again})
        makers = {v: graph.producer.get(v) for v in region.inputs}
        numbers = [graph.numbers[i] for i in makers.values() if i in graph.numbers]
        if numbers:
            region.again = sorted({*region.again}.union(*numbers))
            region.inputs = [v for v, i in makers.items() if i not in graph.numbers]

    def _set_results(self, regions: list[Region]) -> None:
        """Sets the results of regions: what others read of what their equations make."""
        graph = self.graph
        owned = {i for r in regions for i in r.nodes}
        read = {v for r in regions for v in r.inputs}
        for region in regions:
            region.results = [
                v
                for i in region.nodes
                for v in graph.equations[i].node.outputs
                if v in read or v in graph.results or not owned.issuperset(graph.users[v])
            ]

    def _inputs(self, members: set[int]) -> list[int]:
        equations = [self.graph.equations[i] for i in sorted(members)]
        made = set(itertools.chain.from_iterable(e.node.outputs for e in equations))
        read = itertools.chain.from_iterable(e.reads for e in equations)
        return [v for v in dict.fromkeys(read) if v not in made]

    def _compute_again(self) -> None:
        """Lets regions compute what earlier code would have to write for them."""
        readers = self._readers()
        for region in self.regions:
            whole = [v for v in region.inputs if self._is_whole(v, region)]
            tried: set[int] = set()
            while untried := [v for v in whole if v not in tried]:
                v = max(untried, key=self.graph.nbytes)
                tried.add(v)
                cone = self._cone(v, region, readers)
                if not cone:
                    continue
                again = {*region.again, *cone}
                inputs = self._inputs({*region.nodes, *again})
                # Of a longer array, no more than the piece is read.
                new = sum(
                    min(self.graph.nbytes(u), self.graph.nbytes(v))
                    for u in inputs
                    if u not in region.inputs
                )
                others = any(r is not region for r in readers[v])
                if v not in inputs and new < self.graph.nbytes(v) * (1 if others else 2):
                    readers[v].remove(region)
                    for u in inputs:
                        if u not in region.inputs:
                            readers.setdefault(u, []).append(region)
                    region.again = sorted(again)
                    self._set_inputs(region)
                    whole = [v for v in region.inputs if self._is_whole(v, region)]
        self._set_results(self.regions)

    def _readers(self) -> dict[int, list]:
        """What reads a value from memory: regions; None for code that no region has.

        XLA computes elementwise code again where it is read, but not what a region has made.
        """
        graph = self.graph
        apart = {i for r in self.regions for i in r.nodes}
        readers: dict[int, list] = {v: [None] for v in graph.results}
        for i, equation in enumerate(graph.equations):
            for v in equation.reads if i not in apart else ():
                if not equation.kind.known or graph.producer.get(v) in apart:
                    readers.setdefault(v, []).append(None)
        for region in self.regions:
            for v in region.inputs:
                readers.setdefault(v, []).append(region)
        return readers

    def _cone(self, value: int, region: Region, readers: dict[int, list]) -> set[int]:
        """The equations that compute a value from what is in memory, and from numbers of rows; empty if rows cannot."""
        graph, cone, front = self.graph, set(), [value]
        while front:
            v = front.pop()
            i = graph.producer.get(v)
            if i in cone:
                continue
            if i is None or not graph.equations[i].kind.known:
                if v == value:
                    return set()
                continue
            equation = graph.equations[i]
            if v != value:
                others = any(r is not region for r in readers.get(v, ()))
                if v in region.inputs or others or graph.size(v) <= region.rows:
                    continue
            of_rows = all(self._is_of_rows(u, region) for u in equation.node.outputs)
            if (
                not of_rows
                or equation.kind.sums_rows
                or equation.kind.names & _COSTLY
                or len(cone) > CONE
            ):
                return set()
            cone.add(i)
            front += equation.reads
        return cone

    def _products(self, value: int) -> int:
        """Matrix products that read a value."""
        users = (self.graph.equations[u].node.eqn for u in self.graph.users[value])
        return sum(eqn.primitive.name == "dot_general" for eqn in users)

    def _is_whole(self, value: int, region: Region) -> bool:
        return 8 * self.graph.size(value) >= region.rows * region.columns

    # ---- which regions are worth it ----

    def _decide(self) -> None:
        found = [region for region in self.regions if region.results]
        self._pack(found)
        alone = [r for r in found if r.again and self._refusal(r)]
        for region in alone:
            region.again = []
            self._set_inputs(region)
        if alone:
            self._set_results(found)
            self._pack(found)
        self.regions = []
        before: dict[tuple, int] = {}  # equal regions have one program
        for region in found:
            reason = self._refusal(region)
            region.bytes = self._moved(region)
            key = id(region.program), tuple(map(self._products, region.results))
            if key not in before:
                before[key] = self._bytes_of_xla(region)
            region.before = before[key]
            region.is_long = self._is_long(region, found)
            as_little = region.before == region.bytes and not self._keeps_less(region)
            if not reason and as_little and not region.is_long:
                reason = "XLA reads as little"
            if not reason and region.bytes < LEAST_BYTES:
                reason = f"it moves {region.bytes:,} bytes; its kernel would take longer to launch"
            if reason:
                self.left.append((region, reason))
            elif len(region.nodes) > 1 or not self._is_call(region):
                self.regions.append(region)
        # What a region that is left made for others, it makes still; what another was to compute again, it may need.
        self._set_results(self.regions)
        self._leave_to_xla()
        self._pack([r for r in self.regions if r.gains])
        for region in self.regions:
            region.program = program_of(self.graph, region)
            region.bytes = self._moved(region)

    def _pack(self, kernels: list[Region]) -> None:
        """Eight booleans to a byte, where kernels alone hand them on."""
        packed = self._masks(kernels)
        for region in self.regions:
            region.packed = packed.intersection((*region.inputs, *region.results))
        if any(self._refusal(r) for r in kernels if r.packed):
            for region in kernels:
                region.packed = frozenset()

    def _masks(self, kernels: list[Region]) -> frozenset[int]:
        """Booleans of all elements that some kernels make, and that nothing but these kernels reads."""
        graph = self.graph
        members = {i for r in kernels for i in r.nodes}
        others = {v for r in self.regions if r not in kernels for v in r.inputs}
        return frozenset(
            v
            for r in kernels
            for v in r.results
            if graph.aval(v).dtype == bool
            and self._is_whole(v, r)
            and v not in graph.results
            and v not in others
            and members.issuperset(graph.users[v])
            and self.plain.isdisjoint(graph.users[v])
        )

    def _moved(self, region: Region) -> int:
        """Bytes that a region's kernel reads and writes."""
        values = (*region.inputs, *region.results)
        packed = region.packed
        return sum(
            -(-self.graph.nbytes(v) // 8) if v in packed else self.graph.nbytes(v) for v in values
        )

    def _leave_to_xla(self) -> None:
        """Lets XLA compute what only elementwise code reads, where it reads fewer bytes for that."""
        graph = self.graph
        apart = {i for r in self.regions for i in r.nodes}
        self.plain = {i for i in range(len(graph.equations)) if i not in apart}
        read = {v for r in self.regions for v in r.inputs} | graph.results
        for region in self.regions:

            def is_left(v, region=region):
                users = [u for u in graph.users[v] if u not in apart]
                known = all(
                    graph.equations[u].kind.known and not graph.equations[u].kind.depth
                    for u in users
                )
                return v not in read and known and self._is_whole(v, region)

            left = list(filter(is_left, region.results))
            there = {*region.inputs, *(v for v in region.results if v not in left)}
            cones = {v: self._cone_of_region(v, region, there) for v in left}
            left = [v for v in left if cones[v]]
            again = set().union(*cones.values())
            equations = [graph.equations[i] for i in again]
            made = {v for e in equations for v in e.node.outputs}
            needed = {v for e in equations for v in e.reads if v not in made}
            whole = sum(self.graph.nbytes(v) for v in needed if self._is_whole(v, region))
            if left and whole < 2 * sum(map(self.graph.nbytes, left)):
                self.plain |= again
                kept = {*needed, *region.results} - set(left)
                region.results = [
                    v for i in region.nodes for v in graph.equations[i].node.outputs if v in kept
                ]

    def _cone_of_region(self, value: int, region: Region, there: set[int]) -> set[int]:
        """The equations of a region that compute a value from what is in memory, and from numbers of rows.

        None of them if one is no elementwise code, or costs too much to be computed twice.
        """
        graph, again, front = self.graph, set(), [value]
        while front:
            i = graph.producer[front.pop()]
            if i in again:
                continue
            equation = graph.equations[i]
            costly = equation.kind.depth or equation.kind.sums_rows or equation.kind.names & _COSTLY
            if costly or i not in region.nodes:
                return set()
            again.add(i)
            front += [v for v in equation.reads if v not in there and graph.size(v) > region.rows]
        return again

    def _is_call(self, region: Region) -> bool:
        """Whether it is one call, as of an operation of jaxnorm's, which has a kernel."""
        return len(self.graph.equations[region.nodes[0]].kind.operations) > 1

    def _keeps_less(self, region: Region) -> bool:
        """Whether the derivative of a region may keep or read less than that of its equations."""
        equations = (self.graph.equations[i] for i in region.nodes)
        return any(e.kind.depth or e.kind.draws for e in equations)

    def _is_long(self, region: Region, regions: list[Region]) -> bool:
        """Whether XLA's code takes longer than its bytes: at most two 16-bit arrays, and a long function of them.

        XLA may fuse such code with the product that makes its operand, if no other code reads the operand.
        """
        graph = self.graph
        long = any(graph.equations[i].kind.is_long for i in region.nodes)
        if not long or region.before != region.bytes:
            return False
        inputs = {v for v in region.inputs if self._is_whole(v, region)}
        results = {v for v in region.results if self._is_whole(v, region)}
        if sum(map(self.graph.nbytes, (*inputs, *results))) > 4 * region.rows * region.columns:
            return False
        return any(u not in region.nodes for v in inputs for u in graph.users[v]) or any(
            r is not region and not inputs.isdisjoint(r.inputs) for r in regions
        )

    def _bytes_of_xla(self, region: Region) -> int:
        """Bytes that XLA moves, at least: one pass for each level of reductions, and one for sums over rows.

        A fusion of XLA's ends at a reduction whose result is spread along the row again. What several fusions need is
        computed in each of them. One array of all elements that is read, one that is written, and a sum and an extreme
        value along rows between them are a single fusion if rows are short and no other code reads the sum or the
        extreme value. Pieces of rows that cost something to compute are written before they are joined. What joins
        pieces alone is computed once for each product.
        """
        graph = self.graph
        inputs = {v for v in region.inputs if self._is_whole(v, region)}
        large = [v for v in region.results if self._is_whole(v, region)]
        level: dict[int, int] = {}
        reads: dict[int, frozenset] = {v: frozenset((v,)) for v in inputs}
        passes: dict[tuple[int, bool], set] = collections.defaultdict(set)
        costly: set[int] = set()
        pieces = 0
        for i in sorted({*region.nodes, *region.again}):
            equation = graph.equations[i]
            at = max((level.get(v, 0) for v in equation.reads), default=0)
            read = frozenset().union(*(reads.get(v, frozenset()) for v in equation.reads))
            if equation.kind.sums_rows:
                passes[at, True] |= read
            for step in range(equation.kind.depth):
                passes[at + step, False] |= read
            if equation.kind.joins and costly & set(equation.reads):
                pieces += sum(self.graph.nbytes(v) for v in equation.reads if v not in inputs)
            at += equation.kind.depth
            if equation.kind.names & _EXPENSIVE or costly & set(equation.reads):
                costly.update(equation.node.outputs)
            for v in equation.node.outputs:
                level[v] = at
                reads[v] = read if self._is_whole(v, region) else frozenset()
                if v in large:
                    passes[at, False] |= read
        alone = len(large) == len(region.results) == 1 and not any(
            over_rows for _, over_rows in passes
        )
        sums = sum(
            r.along_row and not r.extreme
            for i in region.nodes
            for r in graph.equations[i].kind.reductions
        )
        read = sum(np.dtype(graph.aval(v).dtype).kind not in "biu" for v in inputs)
        together = alone and region.columns <= XLA_COLUMNS and sums <= 1 and read <= 1
        whole = [inputs] if together else passes.values()
        few = (v for v in region.inputs if v not in inputs)
        if all(graph.equations[i].kind.joins for i in region.nodes):
            products = max(map(self._products, region.results))
            pieces += max(0, products - 1) * sum(map(self.graph.nbytes, region.results))
        return (
            2 * pieces
            + sum(self.graph.nbytes(v) for read in whole for v in read)
            + sum(map(self.graph.nbytes, few))
            + sum(map(self.graph.nbytes, region.results))
        )
