"""Rows of which several are under way at once: the loop over rows, and the exchange within a cluster or a grid.

The first warps of a block compute, the last ones exchange. In one step the computing warps put a row through its last
phase, a later row through the phase before that one, and so on, and the newest row through its first phase. For each
stage of the ring, which is a row that is under way, shared memory has the partial results of warps, the results of
reductions, and these barriers:

  filled    bulk copies have filled the stage
  summed    of each exchange: all computing warps have written their partial results
  known     of each exchange: an exchanging warp has written the results of its reductions
  received  of each exchange in a cluster: the partial results of all blocks are there
  readers   all computing warps have ended the row's last phase; the stage and its other memory are then the next row's
"""

import abc
import functools
import math

from jaxnorm._rows.emit_reductions import Reductions
from jaxnorm._rows.emit_sums import Sums, nodes_behind_sums, sums_end_here
from jaxnorm._rows.expressions import accumulator, c_type, expression, words_of
from jaxnorm._rows.graph import BOOL
from jaxnorm._rows.plan import Plan
from jaxnorm._rows.rules import Program, compute_dtype
from jaxnorm._rows.shared_memory import (
    POST_WORDS,
    exchanged_words,
    posts_of_row,
    row_loads,
    steps_memory,
)


class Steps(Sums, Reductions, abc.ABC):
    """The rows of a group of blocks, which is a cluster or anywhere in the grid."""

    def __init__(self, program: Program, plan: Plan, kernel: str):
        super().__init__(program, plan, kernel)
        #: whether a block writes results of sums over rows by itself
        self.direct = sums_end_here(program, plan)
        if plan.in_steps:
            self.shared = steps_memory(program, plan)
            self.words = exchanged_words(self.phases)
            self.row_loads = row_loads(program, self.phases)
            self.row_count = math.prod(program.row_sizes)

    # ---- of the kernel's other parts ----

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Emits what all rows share."""

    @abc.abstractmethod
    def _row_numbers(self) -> None:
        """Emits the numbers and addresses of a row."""

    @abc.abstractmethod
    def _phase(self, number: int) -> None:
        """Emits a phase."""

    # ---- the loop over rows ----

    @property
    def _warps(self) -> int:
        """Warps that compute."""
        return self.plan.lanes // 32

    def _ring(self):
        if not self.plan.in_steps:
            super()._ring()
            return
        plan, w, levels = self.plan, self.w, self.levels
        stages = plan.stages
        w(f"u64* const filled = (u64*)(shared + {self.shared.barriers});")
        w(f"u64* const readers = filled + {stages};")
        w(f"u64* const summed = filled + {2 * stages};  // {stages} for each exchange")
        w(f"u64* const known = filled + {(2 + levels) * stages};")
        if plan.clustered:
            w(f"u64* const received = filled + {(2 + 2 * levels) * stages};")
        self._define_fetch()
        with w.block("if (thread == 0)"):
            with w.block(f"for (int stage = 0; stage < {stages}; ++stage)"):
                w("barrier_init(filled + stage, 1);")
                w(f"barrier_init(readers + stage, {self._warps});")
                with w.block(f"for (int exchange = 0; exchange < {levels}; ++exchange)"):
                    w(f"barrier_init(summed + exchange * {stages} + stage, {self._warps});")
                    w(f"barrier_init(known + exchange * {stages} + stage, 1);")
                    if plan.clustered:
                        w(f"barrier_init(received + exchange * {stages} + stage, 1);")
            w("barriers_ready();")
        w("cluster_sync();" if plan.clustered else "__syncthreads();")
        self._fetch_first_stages()

    def _rows_in_steps(self):
        plan, w = self.plan, self.w
        w("const int turns = (tiles - chunk + chunks - 1) / chunks;")
        if self.row_loads:
            self._load_for_rows()
        with w.block(f"if (warp >= {self._warps})"):
            w(f"const int helper = warp - {self._warps};")
            for level in range(self.levels):
                with w.block(f"if (helper / {plan.exchangers} == {level})"):
                    self._exchanging_warp(level)
            w("return;")
        self._prepare()
        steps = f"turns + {plan.lag * self.levels}"
        with w.block(f'_Pragma("unroll 1") for (int step = 0; step < {steps}; ++step)'):
            # The oldest row first: it leaves its stage to the newest one.
            for number in reversed(range(self.phases.count)):
                self._step_of_phase(number)
        if self.direct:
            self._write_results_of_sums()
        else:
            self._write_partial_sums()

    def _load_for_rows(self):
        """Loads what is one number for a row: in each phase of each row, all threads would wait for it."""
        w, done = self.w, set(self.done)
        w(f"u32* const of_rows = (u32*)(shared + {self.shared.rows});")
        with w.block(f"for (int turn = thread; turn < turns; turn += {self.plan.threads})"):
            w("const int tile = chunk + turn * chunks;")
            self._row_numbers()
            self._row_values(lambda n: n.level == 0, "values of the row")
            for place, n in enumerate(self.row_loads):
                value = self.name(n)
                word = f"__float_as_uint({value})" if n.floating else f"(u32){value}"
                w(f"of_rows[{place * self.row_count} + row] = {word};")
        w("__syncthreads();")
        self.done = done

    def _step_of_phase(self, number):
        plan, w = self.plan, self.w
        delay, done = number * plan.lag, set(self.done)
        with w.block(f"if ((u32)(step - {delay}) < (u32)turns)"):
            w(f"const int turn = step - {delay}, tile = chunk + turn * chunks;")
            self._row_numbers()
            if number == 0:
                self._wait_for_stage("turn")
            else:
                self._use_stage("turn")
            self._row_pointers()
            for place, n in enumerate(self.row_loads):
                word, c = f"of_rows[{place * self.row_count} + row]", c_type(n.dtype)
                value = f"__uint_as_float({word})" if n.floating else f"({c}){word}"
                w(f"const {c} {self.name(n)} = {value};")
                self.done.add(n)
            self._row_values(lambda n: n.level == 0, "values of the row")
            self._load_rows()
            self._wait_for_results(number)
            self._phase(number)
            if number == self.levels:
                self._store_row_results()
                self._release_stage("turn")
        self.done = done

    def _stage(self) -> str:
        return f"turn % {self.plan.stages}"

    def _barrier(self, which, level) -> str:
        return f"{which} + {level * self.plan.stages} + {self._stage()}"

    def _parity(self) -> str:
        return f"(turn / {self.plan.stages}) & 1"

    def _results(self) -> str:
        return f"(u32*)(shared + {self.shared.known}) + {self._stage()} * {sum(self.words)}"

    def _parts(self, level) -> str:
        first = f"({self._stage()} * {sum(self.words)} + {sum(self.words[:level])}) * {self._warps}"
        return f"(u32*)(shared + {self.shared.parts}) + {first}"

    def _wait_for_results(self, number):
        """Declares the results of all reductions that end before a phase."""
        w = self.w
        if number == 0:
            return
        w(f"barrier_wait({self._barrier('known', number - 1)}, {self._parity()});")
        w(f"const u32* const results = {self._results()};")
        place = 0
        for reductions in self.phases.reductions[:number]:
            for n in reductions:
                value = f"*(const {c_type(accumulator(n))}*)(results + {place})"
                value = f"{value} != 0" if n.dtype == BOOL else f"({c_type(n.dtype)}){value}"
                w(f"const {c_type(n.dtype)} {self.name(n)} = {value};")
                self.done.add(n)
                place += 1

    # ---- the exchange ----

    def _exchange_warps(self, number, reductions, maxima, partials):
        """Hands a warp's partial results to the warp that exchanges them."""
        if not self.plan.in_steps:
            super()._exchange_warps(number, reductions, maxima, partials)
            return
        w = self.w
        with w.block("if (lane_of_warp == 0)"):
            w(f"u32* const parts = {self._parts(number)};")
            for place, n in enumerate(reductions):
                w(f"parts[{place * self._warps} + warp] = *(u32*)&{self._acc(n, 0)};")
            w(f"barrier_arrive({self._barrier('summed', number)});")

    def _exchanging_warp(self, level):
        """Combines the partial results of a block's warps, and then of all blocks that share the row."""
        plan, w, blocks = self.plan, self.w, self.plan.cluster
        reductions = self.phases.reductions[level]
        maxima = self._maxima(reductions)
        helper = (
            f"for (int turn = helper % {plan.exchangers}; turn < turns; turn += {plan.exchangers})"
        )

        def part(array, count, n, u, q) -> str:
            place = reductions.index(n) * count
            return f"((const {c_type(accumulator(n))}*)({array} + {place}))[{q}]"

        with w.block(f'_Pragma("unroll 1") {helper}'):
            w(f"const u32* const parts = {self._parts(level)};")
            if blocks > 1:
                w(f"u32* const gathered = {self._gathered(level)};")
            for n in reductions:
                self._declare_accumulator(n, 0)
            w(f"barrier_wait({self._barrier('summed', level)}, {self._parity()});")
            of_warps = functools.partial(part, "parts", self._warps)
            self._add_parts_together(
                reductions, maxima, self._warps, self._warps * blocks, of_warps
            )
            words = [f"*(u32*)&{self._acc(n, 0)}" for n in reductions]
            if blocks > 1:
                if plan.grid:
                    self._exchange_posts(level, reductions, words)
                else:
                    known = self._known_counts(reductions, blocks)
                    sent = {k: words[k] for k, n in enumerate(reductions) if n not in known}
                    self._exchange_in_cluster(level, sent)
                of_blocks = functools.partial(part, "gathered", blocks)
                # In a grid, a lane adds up the parts that it has copied itself. Moments also read the first part.
                lanes = 32 if plan.grid else None
                self._add_parts_together(reductions, maxima, blocks, blocks, of_blocks, lanes)
            with w.block("if (lane_of_warp == 0)"):
                w(f"u32* const results = {self._results()} + {sum(self.words[:level])};")
                for place, word in enumerate(words):
                    w(f"results[{place}] = {word};")
                w(f"barrier_arrive({self._barrier('known', level)});")
            if plan.grid:
                self._clear_posts(level)

    def _gathered(self, level) -> str:
        """Where the partial results of all blocks begin.

        Blocks of a cluster send them to a place of the row's stage. In a grid a warp copies them from the posts to a
        place of its own.
        """
        sets = self.shared.gathered_sets
        place = f"({level * sets} + turn % {sets}) * {self.shared.gathered_words}"
        return f"(u32*)(shared + {self.shared.gathered}) + {place}"

    def _exchange_in_cluster(self, level, words):
        """Sends a block's results, by their places, to all blocks of the cluster, and waits for all blocks' results.

        The places of row r are written again for row r + stages. A block that sends for that row has ended the step
        before, and so has the results of row r + stages - lag - 1 of the same exchange. Each block gave its part of
        these results when it had the results of row r, because there are more than 2 x lag stages. So each block has
        read the places of row r. A block ends when it has the results of its last row, and nothing is sent to it then.
        """
        w, blocks = self.w, self.plan.cluster
        received = self._barrier("received", level)
        w(f"if (lane_of_warp == 0) barrier_expect({received}, {4 * blocks * len(words)}u);")
        with w.block(f"if (lane_of_warp < {blocks})"):
            for place, word in words.items():
                w(
                    f"cluster_send(gathered + {place * blocks} + rank, lane_of_warp, {word}, {received});"
                )
        w(f"barrier_wait({received}, {self._parity()});")

    def _exchange_posts(self, level, reductions, words):
        """Writes a block's results where all blocks of the grid read them, and reads the results of all blocks.

        A post (exchange.cuh) has two of them.
        """
        w, blocks = self.w, self.plan.cluster
        posts, first = -(-len(reductions) // POST_WORDS), posts_of_row(self.words[:level])
        w("const u64 row = (u64)first_row + (u32)(chunk + turn * chunks);")
        w(
            f"char* const own_posts = posts + (row * {posts_of_row(self.words)} + {first}) * {16 * blocks};"
        )
        with w.block("if (lane_of_warp == 0)"):
            for post in range(posts):
                low, high = [*words, "0u"][POST_WORDS * post :][:POST_WORDS]
                w(f"post_write(own_posts + ({post * blocks} + rank) * 16, to_u64({low}, {high}));")
        self._gather(reductions, posts)
        w("__syncwarp();")

    def _clear_posts(self, level):
        """Counts this block as one that has read a row's posts. The last one removes their tags.

        The low bits of the tag of the row's first post are the count.
        """
        w, blocks = self.w, self.plan.cluster
        posts = -(-self.words[level] // POST_WORDS)
        w("const int left_before = lane_of_warp == 0 ? post_count(own_posts) : 0;")
        with w.block(f"if (__shfl_sync(~0u, left_before, 0) == {blocks - 1})"):
            w(
                f"for (int q = lane_of_warp; q < {posts * blocks}; q += 32) post_clear(own_posts + q * 16);"
            )

    def _gather(self, reductions, posts):
        """Reads the posts of all blocks, all of a lane's posts at once, until all are there."""
        w, blocks = self.w, self.plan.cluster
        of_lane = -(-blocks // 32)
        w(f"u64 found[{of_lane}][{posts}] = {{}};")
        w(f"bool missing[{of_lane}], any;")
        each = f"UNROLL for (int i = 0; i < {of_lane}; ++i)"
        w(f"{each} missing[i] = lane_of_warp + 32 * i < {blocks};")
        with w.block("do"):
            w("any = false;")
            with w.block(each):
                w("bool there = true;")
                for post in range(posts):
                    place = f"own_posts + ({post * blocks} + lane_of_warp + 32 * i) * 16"
                    w(f"there &= post_read({place}, missing[i], found[i][{post}]);")
                w("missing[i] = !there;")
                w("any |= missing[i];")
        # If lanes went on by themselves, the warp would diverge.
        w.lines[-1] += " while (!__all_sync(~0u, !any));"
        with w.block(each), w.block(f"if (lane_of_warp + 32 * i < {blocks})"):
            for place, _ in enumerate(reductions):
                post, high = divmod(place, POST_WORDS)
                word = f"(u32)(found[i][{post}]{' >> 32' if high else ''})"
                w(f"gathered[{place * blocks} + lane_of_warp + 32 * i] = {word};")

    # ---- results of sums over rows ----

    def _write_results_of_sums(self):
        plan, w, width = self.plan, self.w, self.program.width
        outputs = [o for o in self.program.outputs if o.after]
        if not outputs:
            return
        roots = [n for o in outputs for n in o.nodes]
        nodes = {n: None for root in roots for n in nodes_behind_sums(root) if n.after}
        w("")
        w("// results of sums over rows")
        with self._over_slots(edges=False):
            for o in outputs:
                for panel in range(len(o.nodes)):
                    w(f"{c_type(compute_dtype(o.dtype))} result{o.number}_{panel}[{plan.vector}];")
            with w.block(f"UNROLL for (int v = 0; v < {plan.vector}; ++v)"):
                for n in nodes:
                    total = n.op == "row_sum"
                    value = (
                        f"total_{n.number}[{self._place()}]"
                        if total
                        else expression(n, [self.name(a) for a in n.args], self.fast)
                    )
                    w(f"const {c_type(n.dtype)} {self.name(n)} = {value};")
                for o in outputs:
                    for panel, n in enumerate(o.nodes):
                        w(f"result{o.number}_{panel}[v] = {self.name(n)};")
            for o in outputs:
                size = o.dtype.itemsize
                for panel in range(len(o.nodes)):
                    values = [f"result{o.number}_{panel}[{v}]" for v in range(plan.vector)]
                    words, held = (
                        f"words{o.number}_{panel}",
                        ", ".join(words_of(o.dtype, values)),
                    )
                    w(f"const u32 {words}[{max(1, plan.vector * size // 4)}] = {{{held}}};")
                    to = f"out{o.number} + ({panel * width}ll + first) * {size}"
                    w(f"store<{plan.vector * size}>({to}, {words});")
