"""What a schedule is, as data, and the devices that it is made for. Nothing here needs a GPU.

A row is cut into *slots*, vectors of `vector` columns that a thread loads at once. `lanes` threads share a row, each
with `slots` of it; a block holds several rows if lanes are few, a cluster of blocks holds one if they are not enough.
A row's data stay on chip between the phases of a program, which the row's reductions separate:

  registers   each thread loads its slots once (one tile of rows a block, or persistent blocks)
  ring        bulk copies fill stages of shared memory ahead of persistent blocks. A stage has a tile of rows, or part
              of one where rows are long: while one row is worked on, parts of the next one take the place of parts
              that its last phase has read
  stream      rows too long for the chip: each phase reads them again, which costs nothing where there is one phase

Of long rows several may be under way at once, each in a phase of its own: in clusters, and in groups of blocks anywhere
in the grid, which share few rows that are very long (`schedule_steps`). Rows that lie side by side, where the reduced
axis is not the last one, have schedules of their own (`schedule_strided`).
"""

import dataclasses

THREADS_MAX = 1024
REGISTERS = 65536  # of a multiprocessor
REGISTERS_MAX = 255  # of a thread


@dataclasses.dataclass(frozen=True)
class Device:
    """What a schedule must know of a GPU.

    Attributes:
      architecture: XY of sm_XY.
      multiprocessors: how many it has.
      shared_bytes: of shared memory that one block may have. A multiprocessor has 1024 more.
      name: for people.
      l2_bytes: of the L2 cache.
    """

    architecture: int = 90
    multiprocessors: int = 132
    shared_bytes: int = 227 * 1024
    name: str = "H100"
    l2_bytes: int = 50 << 20

    @property
    def clusters(self) -> bool:
        """Whether it has clusters and bulk copies."""
        return self.architecture >= 90


DEVICES = {
    80: Device(80, 108, 163 * 1024, "A100", 40 << 20),
    90: Device(),
    100: Device(100, 148, 227 * 1024, "B200", 126 << 20),
    120: Device(120, 170, 99 * 1024, "RTX 5090", 96 << 20),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule.

    Attributes:
      source: where a row's data stay: "registers", "ring" or "stream".
      vector: columns of a slot.
      lanes: threads that share a row, or a block's part of it.
      slots: slots of a row that a thread works on at once.
      threads: of a block.
      rounds: how often a thread works on so many slots of a row; above 1 in "stream", and in a ring whose stages have
        parts of rows.
      cluster: blocks that share a row.
      rows_at_once: rows that a group of `lanes` threads works on at once, so that they share column operands.
      passes: how often a group does so for a tile.
      stages: of the ring.
      blocks: for which a multiprocessor must have registers.
      persistent: whether blocks go from tile to tile, which sums over rows need.
      hoist: where column operands stay from row to row: in "registers", in "shared" memory, of which each thread reads
        what it has written itself, or "" if each row reads them again.
      hold_shared: whether each phase reads a ring's stage again, instead of holding it in registers.
      keep: numbers of the nodes whose values stay in registers from phase to phase; others are computed again.
      shifted: whether slots lie on the grid of the vectors in memory instead of beginning with the row: rows whose
        length is no multiple of the vector then still have aligned vectors.
      grid: how many times `cluster` blocks, which need not be a cluster, share rows and exchange what they have of them
        through global memory; 0 where no blocks do. All blocks of the grid run at once.
      lag: rows between the one that is in a phase and the one that is in the next phase; 0 where one row is under way.
        Else `threads` are `lanes` and the warps of the exchange.
      exchangers: where several rows are under way, warps for each exchange of a row.
      side: threads of a warp that have rows next to each other, where rows lie side by side (`schedule_strided`);
        otherwise 0.
    """

    source: str
    vector: int
    lanes: int
    slots: int
    threads: int
    rounds: int = 1
    cluster: int = 1
    rows_at_once: int = 1
    passes: int = 1
    stages: int = 0
    blocks: int = 1
    persistent: bool = False
    hoist: str = ""
    hold_shared: bool = False
    keep: frozenset = frozenset()
    shifted: bool = False
    side: int = 0
    grid: int = 0
    lag: int = 0
    exchangers: int = 0

    @property
    def clustered(self) -> bool:
        """Whether the blocks that share a row are a cluster."""
        return self.cluster > 1 and not self.grid

    @property
    def in_steps(self) -> bool:
        """Whether several rows are under way at once, each in a phase of its own (`emit_steps`)."""
        return self.lag > 0

    @property
    def groups(self) -> int:
        """Groups of lanes in a block, each with rows of its own."""
        return (
            self.threads // self.lanes
            if (self.lanes <= 32 and not self.in_steps) or self.side
            else 1
        )

    @property
    def warps(self) -> int:
        """Warps of a block that share a row."""
        return max(1, self.lanes * max(1, self.side) // 32)

    @property
    def parts(self) -> bool:
        """Whether a ring's stages have parts of rows, one for each round."""
        return self.source == "ring" and self.rounds > 1

    @property
    def rows_per_tile(self) -> int:
        return self.groups * self.rows_at_once * self.passes

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return min(REGISTERS_MAX, REGISTERS // (self.threads * self.blocks) // 8 * 8)

    def __str__(self) -> str:
        blocks = (
            f"{self.grid} times {self.cluster}" if self.grid else f"a cluster of {self.cluster}"
        )
        row = f"{blocks} blocks" if self.cluster > 1 else f"{self.lanes} threads"
        stages = f"{self.stages} stages" + (f" for {self.rounds} parts a row" if self.parts else "")
        held = {"ring": f"a ring of {stages}", "stream": "rows read in each phase"}.get(
            self.source, self.source
        )
        return (
            f"{row} a row, {self.slots} x {self.vector} columns a thread, {self.rows_per_tile} rows a tile, "
            f"{self.threads} threads a block, {self.blocks} blocks a multiprocessor, {held}"
            f"{f', {self.side} threads side by side' if self.side else ''}"
            f"{', persistent' if self.persistent else ''}{', shifted' if self.shifted else ''}"
            f"{f', {self.lag} rows from phase to phase' if self.in_steps else ''}"
        )
