"""CUDA expressions: of nodes, given the expressions of their arguments; of elements in words of memory, and back."""

import math

import numpy as np

from jaxnorm._rows.graph import AS_ELEMENT, BOOL, DOUBLE, FLOAT, Node, stored

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "u32",
    "int64": "long long",
    "uint64": "u64",
}

_OPERATORS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
}

# CUDA's names of functions that jax.lax calls differently. The float32 function has an f at its end.
_FUNCTIONS = {
    "erf_inv": "erfinv",
    "round_to_even": "rint",
    "round_from_zero": "round",
    "abs": "fabs",
    "rem": "fmod",
}
_SAME_NAME = """acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 floor lgamma log log1p
    nextafter pow rsqrt sin sinh sqrt tan tanh""".split()


def c_type(dtype) -> str:
    return C_TYPES[np.dtype(dtype).name]


def literal(value, dtype) -> str:
    dtype = np.dtype(dtype)
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype.kind == "f":
        wide = "64" if dtype == DOUBLE else ""
        if math.isnan(value):
            return f"NOT_A_NUMBER{wide}"
        if dtype == FLOAT:
            value = float(stored(value, FLOAT))
        if math.isinf(value):
            return f"INFINITE{wide}" if value > 0 else f"(-INFINITE{wide})"
        text = repr(value)
        text = text if "." in text or "e" in text else text + "."
        return f"({text}{'' if wide else 'f'})" if value < 0 else f"{text}{'' if wide else 'f'}"
    suffix = {"int64": "ll", "uint64": "ull", "uint32": "u"}.get(dtype.name, "")
    if dtype.kind == "i" and value == np.iinfo(dtype).min:
        return f"(({c_type(dtype)})({value + 1}{suffix} - 1))"
    return (
        f"(({c_type(dtype)}){value}{suffix})"
        if value < 0 or dtype.itemsize < 4
        else f"{value}{suffix}"
    )


def expression(node: Node, args: list[str], fast: bool) -> str:
    """The value of a node.

    Args:
      node: not a leaf.
      args: expressions of its arguments.
      fast: whether results are rounded to 16 bits, so that functions of an element may have an error of a few ulp.
    """
    op, dtype = node.op, node.dtype
    given = node.args[0].dtype if node.args else dtype
    floating = given.kind == "f"
    quick = fast and dtype == FLOAT and (node.column or node.attr == AS_ELEMENT)
    if op in ("add", "sub", "mul"):
        sign = {"add": "+", "sub": "-", "mul": "*"}[op]
        if floating:
            return f"({args[0]} {sign} {args[1]})"
        # In unsigned numbers, so that overflow wraps.
        wide = "u64" if dtype.itemsize == 8 else "u32"
        return f"({c_type(dtype)})(({wide}){args[0]} {sign} ({wide}){args[1]})"
    if op in _OPERATORS:
        text = f"({args[0]} {_OPERATORS[op]} {args[1]})"
        return f"({c_type(dtype)}){text}" if dtype not in (BOOL,) and dtype.itemsize < 4 else text
    if op == "not":
        return f"(!{args[0]})" if dtype == BOOL else f"({c_type(dtype)})(~{args[0]})"
    if op == "neg":
        return (
            f"(-{args[0]})"
            if floating
            else f"({c_type(dtype)})(0u - ({'u64' if dtype.itemsize == 8 else 'u32'}){args[0]})"
        )
    if op == "div":
        if not floating:
            return f"divide<{c_type(dtype)}>({args[0]}, {args[1]})"
        return f"__fdividef({args[0]}, {args[1]})" if quick else f"({args[0]} / {args[1]})"
    if op in ("max", "min"):
        if dtype == BOOL:
            return f"({args[0]} {'||' if op == 'max' else '&&'} {args[1]})"
        return f"{op}_{'nan' if floating else f'of<{c_type(dtype)}>'}({args[0]}, {args[1]})"
    if op == "select":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if op == "convert":
        return _conversion(given, dtype, args[0])
    if op == "round":
        return _rounding(node.attr, args[0])
    if op == "bitcast":
        return _reinterpretation(given, dtype, args[0])
    if op == "sign":
        return f"sign_of<{c_type(dtype)}>({args[0]})"
    if op == "is_finite":
        return f"({args[0]} - {args[0]} == {literal(0, given)})"
    if op == "integer_pow":
        return f"integer_power<{c_type(dtype)}>({args[0]}, {node.attr})"
    if op == "abs" and not floating:
        return (
            f"({c_type(dtype)})({args[0]} < 0 ? 0u - (u64){args[0]} : (u64){args[0]})"
            if dtype.kind == "i"
            else args[0]
        )
    if op == "rem" and not floating:
        return f"remainder_of<{c_type(dtype)}>({args[0]}, {args[1]})"
    if op == "pow" and not floating:
        return f"integer_power<{c_type(dtype)}>({args[0]}, (int){args[1]})"
    if op == "shift_left":
        return f"shift_left<{c_type(dtype)}>({args[0]}, {args[1]})"
    if op in ("shift_right_logical", "shift_right_arithmetic"):
        kind = "u" if op == "shift_right_logical" else ""
        as_type = C_TYPES[f"{kind}int{8 * dtype.itemsize}"]
        return (
            f"({c_type(dtype)})shift_right<{as_type}>(({as_type}){args[0]}, ({as_type}){args[1]})"
        )
    if op in ("population_count", "clz"):
        return _bit_count(op, dtype, args[0])
    if op in ("exp", "tanh", "logistic") and quick:
        return f"fast_{op}({args[0]})"
    if op == "logistic":
        one = literal(1, dtype)
        return f"({one} / ({one} + exp{'f' if dtype == FLOAT else ''}(-{args[0]})))"
    if op in _SAME_NAME or op in _FUNCTIONS:
        return f"{_FUNCTIONS.get(op, op)}{'f' if dtype == FLOAT else ''}({', '.join(args)})"
    raise AssertionError(f"no expression for {op}")


def _conversion(source, dtype, x) -> str:
    if dtype == BOOL:
        return f"({x} != {literal(0, source)})"
    if source.kind == "f" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        lowest, highest = (literal(float(v), source) for v in (info.min, info.max))
        limits = ", ".join(literal(v, dtype) for v in (info.min, info.max))
        return f"to_integer<{c_type(dtype)}, {c_type(source)}>({x}, {lowest}, {highest}, {limits})"
    return f"(({c_type(dtype)}){x})"


def _rounding(name, x) -> str:
    if name.startswith("float8"):
        return f"from_{name}(to_{name}({x}))"
    return f"round_to_{name}({x})"


def _reinterpretation(source, dtype, x) -> str:
    if source == FLOAT:
        return f"({c_type(dtype)})__float_as_uint({x})"
    if dtype == FLOAT:
        return f"__uint_as_float((u32){x})"
    if source == DOUBLE:
        return f"({c_type(dtype)})__double_as_longlong({x})"
    if dtype == DOUBLE:
        return f"__longlong_as_double((long long){x})"
    return f"(({c_type(dtype)}){x})"


def _bit_count(op, dtype, x) -> str:
    bits = 8 * dtype.itemsize
    word = f"({C_TYPES[f'uint{bits}']}){x}"
    if op == "population_count":
        return f"({c_type(dtype)})__popcll({word})"
    return f"({c_type(dtype)})(__clzll({word}) - {64 - bits})"


# ---- elements and words ----


def element(dtype, words: str, v: str) -> str:
    """Element number `v` of a vector of a stored dtype, which lies in `words`."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    if dtype.name in ("bfloat16", "float16"):
        word = f"{words}[{v} / 2]"
        return f"({v} % 2 ? high_{dtype.name}({word}) : low_{dtype.name}({word}))"
    if size == 8:
        low, high = f"{words}[2 * ({v})]", f"{words}[2 * ({v}) + 1]"
        return (
            f"to_double({low}, {high})"
            if dtype == DOUBLE
            else f"({c_type(dtype)})to_u64({low}, {high})"
        )
    if size == 4:
        word = f"{words}[{v}]"
        return f"__uint_as_float({word})" if dtype == FLOAT else f"({c_type(dtype)}){word}"
    per_word = 4 // size
    word = f"({words}[{v} / {per_word}] >> ({8 * size} * ({v} % {per_word})))"
    if dtype.name.startswith("float8"):
        return f"from_{dtype.name}({word} & 255u)"
    if dtype == BOOL:
        return f"(({word} & 255u) != 0)"
    return f"({c_type(dtype)}){word}"


def words_of(dtype, values: list[str]) -> list[str]:
    """The words that hold a vector of these values in a stored dtype."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    if size == 8:
        as_long = "__double_as_longlong" if dtype == DOUBLE else "(u64)"
        return [
            part
            for x in values
            for part in (f"(u32){as_long}({x})", f"(u32)((u64){as_long}({x}) >> 32)")
        ]
    if size == 4:
        return [f"__float_as_uint({x})" if dtype == FLOAT else f"(u32){x}" for x in values]
    per_word = 4 // size
    chunks = [values[i : i + per_word] for i in range(0, len(values), per_word)]
    if dtype.name in ("bfloat16", "float16"):
        return [f"pack_{dtype.name}({c[0]}, {c[1] if len(c) > 1 else '0.f'})" for c in chunks]
    if dtype.name.startswith("float8"):
        pairs = [[*c, "0.f", "0.f", "0.f"][:4] for c in chunks]
        pack = f"pack_{dtype.name}"
        return [
            f"{pack}({a}, {b})" + (f" | {pack}({c}, {d}) << 16" if len(values) > 2 else "")
            for a, b, c, d in pairs
        ]
    unsigned = "(u32)(unsigned char)" if size == 1 else "(u32)(unsigned short)"
    return [
        " | ".join(
            f"({unsigned}({x}) << {8 * size * i})" if i else f"{unsigned}({x})"
            for i, x in enumerate(c)
        )
        for c in chunks
    ]


# ---- reductions ----


def accumulator(node: Node) -> np.dtype:
    """The dtype in which a reduction is accumulated: for booleans and short integers, int."""
    if node.dtype.kind == "f" or node.dtype.itemsize >= 4:
        return node.dtype
    return np.dtype(np.int32 if node.dtype.kind != "u" else np.uint32)


def identity(node: Node) -> str:
    """What a reduction of nothing is."""
    kind, dtype = node.attr[0], accumulator(node)
    if kind == "max":
        return (
            literal(-math.inf, dtype) if dtype.kind == "f" else literal(np.iinfo(dtype).min, dtype)
        )
    if kind == "min":
        return (
            literal(math.inf, dtype) if dtype.kind == "f" else literal(np.iinfo(dtype).max, dtype)
        )
    return literal(1 if kind in ("product", "and") else 0, dtype)


def combined(node: Node, a: str, b: str) -> str:
    """Two partial results of a reduction as one."""
    kind, dtype = node.attr[0], accumulator(node)
    if kind in ("max", "min"):
        return (
            f"{kind}_nan({a}, {b})"
            if dtype.kind == "f"
            else f"{kind}_of<{c_type(dtype)}>({a}, {b})"
        )
    return f"({a} {({'product': '*', 'or': '|', 'and': '&'}).get(kind, '+')} {b})"
