"""What a program computes between its row reductions."""

import functools

from jaxnorm._rows.graph import Node
from jaxnorm._rows.rules import Program


class Phases:
    """What a program computes between its row reductions.

    Attributes:
      order: all nodes that are needed, arguments first.
      reductions: for each phase, the reductions that end it.
      row_sums: the sums over rows.
      targets: for each phase, the nodes whose elements it must have.
    """

    def __init__(self, program: Program):
        self.program = program
        self.order = _in_order([n for o in program.outputs for n in o.nodes])
        reductions = [n for n in self.order if n.op == "reduce"]
        self.row_sums = [n for n in self.order if n.op == "row_sum"]
        #: how many leading row dimensions make groups, whose sums over rows stay apart
        self.group_dims = len(max((n.attr[0] for n in self.row_sums), key=len, default=()))
        levels = max((n.level for n in reductions), default=0)
        self.reductions = [[n for n in reductions if n.level == p + 1] for p in range(levels)] + [
            []
        ]
        self.targets = [[x for n in phase for x in n.args] for phase in self.reductions]
        self.wholes = [o for o in program.outputs if o.layout.columns is not None and not o.after]
        self.targets[-1] += [n for o in self.wholes for n in o.nodes]
        self.targets[-1] += [x for n in self.row_sums for x in n.args]

    @property
    def count(self) -> int:
        return len(self.targets)

    @functools.cached_property
    def cost(self) -> float:
        """Instructions for an element if nothing is computed twice."""
        return sum(n.cost for n in self.order if n.column)

    @property
    def loads(self) -> list[tuple[int, int, bool]]:
        """What has columns and is loaded: (number of an input, panel, whether backwards)."""
        return sorted({n.attr for n in self.order if n.op == "input" and n.column})

    def inputs(self, whole: bool) -> list[int]:
        """Numbers of the inputs that have columns: the ones with all rows, or the ones without."""
        inputs = self.program.inputs
        numbers = {n.attr[0] for n in self.order if n.op == "input"}
        return sorted(
            n for n in numbers if inputs[n].layout.columns is not None and inputs[n].whole == whole
        )

    def evaluated(self, keep) -> list[dict[Node, bool]]:
        """For each phase, the nodes that it needs, and whether each comes from registers."""
        first: dict[int, int] = {}
        phases = []
        for phase, targets in enumerate(self.targets):
            found: dict[Node, bool] = {}
            stack = [t for t in targets if t.column]
            while stack:
                node = stack.pop()
                if node in found:
                    continue
                found[node] = node.number in keep and node.number in first
                if not found[node]:
                    stack += [a for a in node.args if a.column]
            for node, loaded in found.items():
                if node.number in keep and not loaded:
                    first.setdefault(node.number, phase)
            phases.append(found)
        return phases


def _in_order(roots) -> list[Node]:
    found: dict[int, Node] = {}

    def visit(node):
        if node.number not in found:
            for other in (*node.args, *attr_nodes(node)):
                visit(other)
            found[node.number] = node

    for root in roots:
        visit(root)
    return list(found.values())


def attr_nodes(node) -> list[Node]:
    """Nodes that a node refers to besides its arguments."""
    attr = node.attr if isinstance(node.attr, tuple) else (node.attr,)
    return [a for a in attr if isinstance(a, Node)]
