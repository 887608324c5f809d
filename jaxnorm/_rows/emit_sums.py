"""Sums over rows: what each thread has, partial results of blocks, and the kernel that adds those up."""

from jaxnorm._rows.emit_memory import Memory
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.expressions import c_type, literal, words_of
from jaxnorm._rows.graph import Node
from jaxnorm._rows.plan import Plan
from jaxnorm._rows.rules import Input, Output, Program
from jaxnorm._rows.text import addresses, product

# Blocks of the finishing kernel that run at once on most GPUs; more of them take turns.
FINISH_BLOCKS = 256
# Partial results that a thread loads at once, so that it waits once for them.
FINISH_LOADS = 8


def finish_columns(program: Program, group_dims: int) -> int:
    """Columns of a block of the finishing kernel. Blocks have 1024 threads; fewer where groups of rows have sums."""
    results = sum(o.after for o in program.outputs)
    columns, most = 32, 32 if group_dims else 1024
    while columns < most and -(-program.width // columns) * results > FINISH_BLOCKS:
        columns *= 2
    return columns


def sums_end_here(program: Program, plan: Plan) -> bool:
    """Whether a block has all rows of its columns, and so computes the results of sums over rows by itself."""
    results = [o for o in program.outputs if o.after]
    if plan.grid != 1 or any(o.layout.columns is None for o in results):
        return False
    seen, stack = set(), [n for o in results for n in o.nodes]
    while stack:
        node = stack.pop()
        if node.op == "row_sum" and node.attr[1]:
            return False
        if node.number in seen or node.op == "row_sum":
            continue
        seen.add(node.number)
        if not node.after and (node.column or node.row):
            return False
        if node.after:
            stack += node.args
    return True


class Sums(Memory):
    """Sums over rows."""

    @property
    def _in_memory(self) -> bool:
        """Whether sums over rows stay in memory, because a thread has more columns than registers."""
        return self.plan.rounds > 1

    def _sums_to_zero(self):
        w, count = self.w, self.plan.slots * self.plan.vector
        for n in self.phases.row_sums:
            t = c_type(n.dtype)
            if n.attr[1]:
                w(f"{t} total_{n.number} = 0;")
            elif not self._in_memory:
                w(f"{t} total_{n.number}[{count}];")
                w(f"UNROLL for (int j = 0; j < {count}; ++j) total_{n.number}[j] = 0;")

    def _add_to_sums(self, u, inside):
        w = self.w
        valid = [self.row("valid", u)] if self.ragged else []
        condition = " && ".join([*valid, *([inside] if inside else [])])
        when = f"if ({condition}) " if condition else ""
        for n in self.phases.row_sums:
            for a in n.args:
                if n.attr[1]:
                    w(f"{when}total_{n.number} += {self.name(a, u)};")
                elif self._in_memory:
                    at = f"sums{n.number}[(u64)member * {self.program.width} + first + v]"
                    if self.plan.groups > 1:
                        raise AssertionError("sums in memory need a block for each row")
                    w(f"{when}{at} = {self.name(a, u)} + (turn ? {at} : 0);")
                else:
                    w(f"{when}total_{n.number}[{self._place()}] += {self.name(a, u)};")

    def _write_partial_sums(self):
        if not self.phases.row_sums:
            return
        self.w("")
        self.w("// partial results of sums over rows")
        self.w("let_next_begin();")
        for n in self.phases.row_sums:
            if n.attr[1]:
                self._write_sum_of_columns(n)
            elif not self._in_memory:
                self._write_sums(n)

    def _write_sum_of_columns(self, n):
        """Of a sum over rows and columns, each block writes one number."""
        w, t, total = self.w, c_type(n.dtype), f"total_{n.number}"
        with w.block():
            w(f"{t}* const parts = ({t}*)shared;")
            w("__syncthreads();")
            w(
                f"UNROLL for (int distance = 16; distance; distance /= 2) "
                f"{total} += __shfl_xor_sync(~0u, {total}, distance);"
            )
            w(f"if (lane_of_warp == 0) parts[warp] = {total};")
            w("__syncthreads();")
            with w.block("if (thread == 0)"):
                w(f"{t} sum = 0;")
                w(f"for (int q = 0; q < {self.plan.threads // 32}; ++q) sum += parts[q];")
                w(f"sums{n.number}[blockIdx.x] = sum;")

    def _write_sums(self, n):
        """Of a sum over rows, each block writes a row."""
        plan, w, t, width = self.plan, self.w, c_type(n.dtype), self.program.width
        if plan.groups == 1:
            self._write_total(n, f"sums{n.number}[(u64)member * {width} + first + v]")
            return
        with w.block():
            w(f"{t}* const parts = ({t}*)shared;")
            w("__syncthreads();")
            self._write_total(n, f"parts[group * {width} + first + v]")
            w("__syncthreads();")
            with w.block(f"for (int column = thread; column < {width}; column += {plan.threads})"):
                w(f"{t} sum = 0;")
                w(f"for (int g = 0; g < {plan.groups}; ++g) sum += parts[g * {width} + column];")
                w(f"sums{n.number}[(u64)member * {width} + column] = sum;")

    def _write_total(self, n, place):
        with self._over_slots(edges=False):
            with self.w.block(f"UNROLL for (int v = 0; v < {self.plan.vector}; ++v)"):
                inside = (
                    f"if ((u32)(first + v) < {self.program.width}u) " if self.plan.shifted else ""
                )
                self.w(f"{inside}{place} = total_{n.number}[{self._place()}];")


class Finish:
    """The kernel that adds up the partial results of sums over rows.

    A thread adds up some partial results of one column. The choice does not vary from run to run. With wide results, so
    few threads share a column that all blocks run at once.
    """

    def __init__(self, emitter: Sums):
        self.e, self.w = emitter, emitter.w
        self.program, self.plan = emitter.program, emitter.plan
        self.outputs = [o for o in self.program.outputs if o.after]
        self.columns = finish_columns(self.program, emitter.group_dims)

    def emit(self):
        w, e = self.w, self.e
        # Not __restrict__: loads must not move to before the wait.
        parameters = [f"const {c_type(n.dtype)}* sums{n.number}" for n in e.phases.row_sums]
        parameters += [f"char* __restrict__ out{o.number}" for o in self.outputs]
        parameters += [f"const char* __restrict__ in{n}" for n in e.used_inputs()]
        scalars = [
            "long long all_rows",
            "int chunks",
            "int groups",
            *(f"int d{k}" for k in range(len(e.sizes))),
        ]
        w("")
        w("// The sums over rows, from the partial results of the blocks.")
        with w.block(
            f'extern "C" __global__ void __launch_bounds__(1024) {e.kernel}_finish({", ".join(parameters + scalars)})'
        ):
            w("wait_for_launch_before();")
            w("const int thread = threadIdx.y * 32 + threadIdx.x, threads = 32 * blockDim.y;")
            widest = max(n.dtype.itemsize for n in e.phases.row_sums) // 4
            w(
                f"__shared__ {'u64' if widest > 1 else 'u32'} memory[1024];  // one sum after the other"
            )
            w(
                f"const u32 group_rows = {product(e.sizes[e.group_dims :]) if e.group_dims else '(u32)all_rows'};"
            )
            w("(void)group_rows;")
            for number, o in enumerate(self.outputs):
                with (
                    w.block(f"if (blockIdx.z == {number})"),
                    # A grid has fewer blocks along y than there may be groups.
                    w.block(
                        "for (int own = blockIdx.y; own < max_of(groups, 1); own += gridDim.y)"
                    ),
                ):
                    self._output(o)

    def _output(self, o: Output):
        w, e = self.w, self.e
        kept = sorted(o.layout.rows)
        if kept != list(range(len(kept))):
            raise NotARowProgram(
                f"result {o.number}",
                "keeps row dimensions of a sum that are not the outermost ones",
            )
        own = product(e.sizes[: len(kept)]) if kept else "1"
        w(f"const int own_groups = (int){own}, together = groups / max_of(own_groups, 1) * chunks;")
        w("const u32 row = own * (u32)(together / max_of(chunks, 1)) * group_rows;")
        w("(void)row;")
        for panel, root in enumerate(o.nodes):
            with w.block():
                self._panel(o, panel, root)

    def _panel(self, o, panel, root):
        w, e, width = self.w, self.e, self.program.width
        sums = [n for n in nodes_behind_sums(root) if n.op == "row_sum"]
        scalar = o.layout.columns is None
        across = 32 if scalar else self.columns
        w(f"const int x = thread % {across}, y = thread / {across}, shares = threads / {across};")
        w(f"const int column = blockIdx.x * {across} + x;")
        active = (
            "blockIdx.x == 0 && own < own_groups"
            if scalar
            else f"own < own_groups && column < {width}"
        )
        w(f"const bool active = {active};")
        for n in sums:
            self._add_up(n, scalar, across)
        with w.block(f"if (active && y == 0{' && x == 0' if scalar else ''})"):
            names: dict[Node, str] = {}

            def name(node, u=0):
                return literal(node.attr, node.dtype) if node.op == "literal" else names[node]

            for node in nodes_behind_sums(root):
                if node.op == "literal":
                    continue
                names[node] = f"{node.op}_{node.number}"
                if node.op == "row_sum":
                    continue
                if node.op == "input" and node.column:
                    i = self.program.inputs[node.attr[0]]
                    offset = addresses(self.program, i.layout, "row")
                    place = f"{offset} + {_column(i, node.attr[1] * width)}"
                    e._load_one(node, i, names[node], place)
                elif node.op == "iota":
                    w(
                        f"const {c_type(node.dtype)} {names[node]} = ({c_type(node.dtype)})(column + {node.attr});"
                    )
                elif node.column and not node.args:
                    raise NotARowProgram(
                        f"result {o.number}", f"needs `{node.op}` after a sum over rows"
                    )
                else:
                    e.row_value(node, 0, "row", name)
            size = o.dtype.itemsize
            words = ", ".join(words_of(o.dtype, [name(root)]))
            w(f"const u32 words[{max(1, size // 4)}] = {{{words}}};")
            offset = addresses(self.program, o.layout, "row")
            column = "" if scalar else f" + {_column(o, panel * width)}"
            w(f"store<{size}>(out{o.number} + ({offset}{column}) * {size}, words);")

    def _add_up(self, n, scalar, across):
        w, t, this = self.w, c_type(n.dtype), f"row_sum_{n.number}"
        cluster = self.plan.cluster
        count = f"together * {cluster}" if n.attr[1] and cluster > 1 else "together"
        w(f"{t} {this} = 0;")
        with w.block("if (active)"):
            if scalar:
                w(
                    f"for (int q = thread; q < {count}; q += threads) {this} += sums{n.number}[(u64)own * {count} + q];"
                )
            else:
                each = f"UNROLL for (int i = 0; i < {FINISH_LOADS}; ++i)"
                width, column = (1, "0") if n.attr[1] else (self.program.width, "column")
                w(
                    f"const {t}* from = sums{n.number} + ((u64)own * {count} + y) * {width} + {column};"
                )
                w(f"const int step = shares * {width};")
                turn = f"q += {FINISH_LOADS} * shares, from += {FINISH_LOADS} * step"
                with w.block(f"for (int q = y; q < {count}; {turn})"):
                    w(f"{t} some[{FINISH_LOADS}];")
                    w(f"{each} some[i] = q + i * shares < {count} ? from[i * step] : 0;")
                    w(f"{each} {this} += some[i];")
        with w.block():
            w(f"{t}* const parts = ({t}*)memory;")
            w("__syncthreads();")
            w(f"parts[thread] = {this};")
            w("__syncthreads();")
            with w.block("if (y == 0)"):
                w(f"{this} = 0;")
                w(f"for (int q = 0; q < shares; ++q) {this} += parts[q * {across} + x];")
                if scalar:
                    w(
                        f"for (int distance = 16; distance; distance /= 2) "
                        f"{this} += __shfl_xor_sync(~0u, {this}, distance);"
                    )


def _column(array: Input | Output, first: int) -> str:
    """Where an array has a column of the panel that begins there."""
    step = array.layout.step
    return f"{first} + column" if step == 1 else f"(u64)({first} + column) * {step}"


def nodes_behind_sums(root) -> list[Node]:
    """The nodes that a result needs behind the sums over rows, arguments first."""
    found: dict[Node, None] = {}

    def visit(node):
        if node not in found:
            if node.op != "row_sum":
                for a in node.args:
                    visit(a)
            found[node] = None

    visit(root)
    return list(found)
