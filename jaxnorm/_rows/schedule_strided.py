"""Schedules for rows that lie side by side: their columns are a step apart in memory.

So are the columns where an axis in the middle is reduced. A thread has `rows_at_once` rows that are neighbours and
every `lanes`-th of their columns: it loads what a column has of these rows at once. `side` threads of a warp have rows
next to each other, so that together they read whole pieces of memory. Rows stay in registers. A cluster of blocks
shares rows that are too long for one block, or that would fill a multiprocessor alone: while some blocks of it load and
store, others compute.
"""

import dataclasses

from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.graph import Node
from jaxnorm._rows.kept import with_kept
from jaxnorm._rows.plan import REGISTERS, REGISTERS_MAX, THREADS_MAX, Plan
from jaxnorm._rows.schedule_blocks import SMALL_BLOCK
from jaxnorm._rows.shared_memory import shared_bytes
from jaxnorm._rows.traits import BUSY_INSTRUCTIONS, Traits

# Rows of a thread, at most: each has values of its own, which take registers and are exchanged one by one.
ROWS_MAX = 4
# Bytes that the threads side by side read of a column: whole lines of memory where that leaves blocks small, at least
# as many as memory gives at once.
LINE, PIECE, SECTOR = 128, 64, 32
# Words of rows in a thread's registers: where threads share rows, where one or two threads have a row, where there are
# sums over rows (so many that several rows are on their way), and in blocks of the most threads.
WORDS, WORDS_ALONE, WORDS_SUMS, WORDS_OF_LARGEST = 64, 44, 48, 32
# Words of rows, and columns of a row, that a thread of a small block in a cluster has.
WORDS_OF_CLUSTER, COLUMNS_OF_CLUSTER = 128, 32
# Instructions for an element, in all phases, from which on one value of each element stays in registers too.
KEPT_INSTRUCTIONS = 30
THREADS = 256  # of a block, where that is enough
REGISTERS_OTHER = 26  # for addresses, counters and intermediate results


def strided_plan(traits: Traits) -> Plan:
    """The plan for a program whose rows lie side by side."""
    return _Strided(traits).plan()


def apart(layout, row_sizes, count: int) -> int | None:
    """Elements between neighbours among `count` rows, from a multiple of it on: 0, 1, or None if that differs."""
    strides, found, expected = dict(layout.strides), None, 1
    for k in reversed(range(len(row_sizes))):
        if count == 1:
            break
        size = row_sizes[k]
        if not isinstance(size, int) or (size % count and count % size):
            return None
        step = strides.get(k, 0)
        distance = min(step, 1)
        if step not in (0, expected) or found not in (None, distance):
            return None
        found, expected, count = distance, expected * size, max(1, count // size)
    return found or 0


def rows_of_a_vector(layout, row_sizes, most: int) -> int:
    """How many neighbouring rows of an array can be loaded at once, from a multiple of their size on."""
    while most > 1 and not _is_vector(layout, row_sizes, most):
        most //= 2
    return most


def _is_vector(layout, row_sizes, count) -> bool:
    distance = apart(layout, row_sizes, count)
    if distance != 1:
        return distance == 0
    strides, inner = dict(layout.strides), 1
    steps = [layout.step] if layout.columns is not None else []
    for k in reversed(range(len(row_sizes))):
        if inner < count:
            inner *= row_sizes[k]
        elif k in strides:
            steps.append(strides[k])
    try:
        return all(step % count == 0 for step in steps)
    except Exception:  # symbols that cannot be compared
        return False


class _Strided:
    """The choice of a plan, for one program on one device."""

    def __init__(self, traits: Traits):
        self.program, self.device, self.asked = traits.program, traits.device, traits.asked
        self.phases = traits.phases
        sizes = [d.itemsize for d in traits.dtypes]
        self.largest = max(sizes, default=4)
        self.smallest = min((n for n in sizes if n > 1), default=self.largest)
        self.rows = self._rows_at_once()
        loads = {n.attr for n in self.phases.order if n.op == "input" and n.column}
        inputs = [self.program.inputs[number] for number, _, _ in loads]
        self.words = sum(max(1, self.rows * i.dtype.itemsize // 4) for i in inputs if i.whole)
        self.words += sum(n.dtype.itemsize // 4 for n in self.phases.row_sums if not n.attr[1])
        phases = self.phases.evaluated(frozenset())
        cost = sum(n.cost for phase in phases for n in phase)
        self.kept_words = self.rows if len(phases) > 1 and cost > KEPT_INSTRUCTIONS else 0
        self.work, self.busy = traits.work, traits.busy

    def _rows_at_once(self) -> int:
        wanted = max(1, min(ROWS_MAX, 16 // self.largest))
        most = self.asked.get("rows_at_once", wanted)
        arrays = [i for i in self.program.inputs.values() if i.layout.columns is not None]
        layouts = [a.layout for a in (*arrays, *self.phases.wholes)]
        return min(
            [rows_of_a_vector(a, self.program.row_sizes, most) for a in layouts], default=most
        )

    def _side(self, nbytes: int) -> int:
        """Threads that together read so many bytes of a column."""
        return max(1, min(32, nbytes // (self.rows * self.smallest)))

    def plan(self) -> Plan:
        if self.asked.get("source") == "stream" and not self.phases.row_sums:
            return self._stream()
        if "side" in self.asked or "lanes" in self.asked or "cluster" in self.asked:
            return self._as_asked()
        for side, lanes, threads, cluster, words in self._shapes():
            if self._slots(lanes, cluster) * (self.words + self.kept_words) <= words:
                return self._made(side, lanes, threads, cluster)
        if self.phases.row_sums:
            reason = f"of {self.program.width} columns that lie side by side are too long for sums over rows"
            raise NotARowProgram("rows", reason)
        return self._stream()

    def _as_asked(self) -> Plan:
        side, cluster = self.asked.get("side", self._side(PIECE)), self.asked.get("cluster", 1)
        lanes = self.asked.get("lanes", max(1, THREADS // side))
        side, threads = self._team(side, lanes)
        together = cluster > 1 or self.phases.row_sums
        return self._made(side, lanes, side * lanes if together else threads, cluster)

    @staticmethod
    def _team(side, lanes) -> tuple[int, int]:
        """(side, threads) for so many lanes: the threads that share rows are at least a warp, at most a block."""
        side = max(side, 32 // lanes)
        while side > 1 and side * lanes > THREADS_MAX:
            side //= 2
        return side, (side * lanes if side * lanes > 32 else SMALL_BLOCK)

    def _slots(self, lanes, cluster) -> int:
        return -(-self.program.width // (lanes * cluster))

    def _shapes(self):
        """(side, lanes, threads, cluster, words of rows that a thread may have), the best one first."""
        if self.phases.row_sums:
            yield from self._shapes_of_sums()
            return
        line, piece = self._side(LINE), self._side(PIECE)
        for lanes in (1, 2):
            if 32 // lanes >= piece:
                yield 32 // lanes, lanes, SMALL_BLOCK, 1, WORDS_ALONE
        # Where loads and stores wait for instructions, small blocks take turns.
        shapes = [(line, SMALL_BLOCK if self.busy else THREADS, WORDS), (piece, THREADS, WORDS)]
        if self.work > BUSY_INSTRUCTIONS[0]:
            shapes = [(line, THREADS, WORDS // 2), *shapes]
        for side, most, words in shapes:
            for threads in self._sizes(side, SMALL_BLOCK, most):
                yield side, threads // side, threads, 1, words
        if self.phases.count == 1:
            return  # to read a part of a row at a time costs nothing
        if not self.busy:
            yield piece, 2 * THREADS // piece, 2 * THREADS, 1, WORDS
        words = min(WORDS_OF_CLUSTER, COLUMNS_OF_CLUSTER * (self.words + self.kept_words))
        yield from self._shapes_of_long_rows(SMALL_BLOCK, words)

    def _shapes_of_sums(self):
        """Shapes where there are sums over rows, for which each block stays for many rows."""
        words = WORDS if self.kept_words else WORDS_SUMS
        for side in dict.fromkeys((self._side(LINE), self._side(PIECE))):
            for threads in self._sizes(side, 64, THREADS):
                yield side, threads // side, threads, 1, words
        yield from self._shapes_of_long_rows(THREADS, words)

    def _shapes_of_long_rows(self, threads, words):
        """Clusters of blocks with so many threads, which have so many words; larger blocks in clusters, and alone."""
        piece = self._side(PIECE)
        if self.device.clusters:
            for cluster in (2, 4, 8):
                yield piece, threads // piece, threads, cluster, words
            for larger in (THREADS, 2 * THREADS):
                yield piece, larger // piece, larger, 8, WORDS
        for side in (piece, self._side(SECTOR)):
            for larger, words in ((2 * THREADS, WORDS), (THREADS_MAX, WORDS_OF_LARGEST)):
                yield side, larger // side, larger, 1, words

    def _sizes(self, side, least, most) -> list[int]:
        """Sizes of blocks. Those with which the fewest threads have a slot less come first."""
        width = self.program.width
        sizes = [n for n in range(least, most + 1, 32) if n // side > 1]
        waste = {n: -(-width // (n // side)) * (n // side) / width for n in sizes}
        return sorted(sizes, key=lambda n: (waste[n] > 1.07, waste[n] if waste[n] > 1.07 else n))

    def _stream(self) -> Plan:
        """Each phase reads rows again, which the L2 cache has if all blocks together have few rows at a time."""
        side = self.asked.get("side", self._side(SECTOR if self.phases.count > 1 else LINE))
        lanes = self.asked.get("lanes", max(1, 2 * THREADS // side))
        side, threads = self._team(side, lanes)
        slots = self.asked.get("slots", max(1, 16 // max(1, self.words)))
        slots = max(1, min(slots, -(-self.program.width // lanes)))
        rounds = -(-self.program.width // (lanes * slots))
        return self._made(side, lanes, threads, 1, slots, rounds, "stream")

    def _made(
        self, side, lanes, threads, cluster, slots=None, rounds=1, source="registers"
    ) -> Plan:
        if slots is None:
            slots = self._slots(lanes, cluster)
        plan = Plan(
            source=source,
            vector=1,
            lanes=lanes,
            slots=slots,
            threads=threads,
            rounds=rounds,
            cluster=cluster,
            rows_at_once=self.rows,
            persistent=bool(self.phases.row_sums),
            side=side,
        )
        blocks = self.asked.get("blocks") or self._blocks(plan)
        return with_kept(self.program, self.phases, dataclasses.replace(plan, blocks=blocks)).plan

    def _blocks(self, plan) -> int:
        """As many blocks as there are registers for."""
        registers = min(REGISTERS_MAX, -(-self._registers(plan) // 8) * 8)
        shared = shared_bytes(self.program, plan) + 1024
        most = min(32, 2048 // plan.threads, (self.device.shared_bytes + 1024) // shared)
        return max(1, min(most, REGISTERS // (registers * plan.threads)))

    def _registers(self, plan) -> int:
        """About how many registers a thread needs."""
        of_rows = 0
        for number, nodes in enumerate(self.phases.evaluated(frozenset())):
            values: set[Node] = {
                a for n in nodes for a in n.args if a.row and not a.column and a.op != "literal"
            }
            of_rows = max(of_rows, len(values) + len(self.phases.reductions[number]))
        held = 0 if plan.source == "stream" else self.kept_words
        return (
            REGISTERS_OTHER + plan.slots * (self.words + held) + plan.rows_at_once * (of_rows + 2)
        )
