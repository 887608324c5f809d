"""The dimensions of arrays along which operations cut, join, reverse or look up."""


def cut_dimensions(equation) -> list[int]:
    """The dimensions along which an equation moves elements."""
    params = equation.params
    match equation.primitive:
        case "slice":
            limits = zip(params["start_indices"], params["limit_indices"], strict=True)
            sizes = equation.inputs[0].aval.shape
            return [i for i, (s, n) in enumerate(zip(limits, sizes, strict=True)) if s != (0, n)]
        case "split":
            return [params["axis"]]
        case "concatenate":
            return [params["dimension"]]
        case "pad":
            return [i for i, config in enumerate(params["padding_config"]) if any(config)]
        case _:
            return list(params["dimensions"])


def label_dimension(equation) -> int:
    """The dimension of its operand along which a gather or scatter looks elements up; the last one if it is not one."""
    numbers = equation.params["dimension_numbers"]
    gather = equation.primitive == "gather"
    looked_up = numbers.start_index_map if gather else numbers.scatter_dims_to_operand_dims
    return looked_up[0] if len(looked_up) == 1 else len(equation.inputs[0].aval.shape) - 1


def looks_into_one(equation) -> bool:
    """Whether a gather or scatter looks whole arrays up, with one index, along a dimension of size 1."""
    numbers, gather = equation.params["dimension_numbers"], equation.primitive == "gather"
    looked_up = numbers.start_index_map if gather else numbers.scatter_dims_to_operand_dims
    shape, index = (v.aval.shape for v in equation.inputs[:2])
    if len(looked_up) != 1 or numbers.operand_batching_dims or not all(map(is_one, index)):
        return False
    if gather:
        return is_one(shape[looked_up[0]]) and tuple(equation.params["slice_sizes"]) == shape
    rest = tuple(n for i, n in enumerate(shape) if i not in numbers.inserted_window_dims)
    return is_one(shape[looked_up[0]]) and equation.inputs[2].aval.shape == rest


def check_label(equation):
    """The dimension numbers of a gather or scatter, which must be of one element of each row."""
    numbers = equation.params["dimension_numbers"]
    shape, labels = (v.aval.shape for v in equation.inputs[:2])
    column = label_dimension(equation)
    batching = numbers.operand_batching_dims
    if equation.primitive == "gather":
        looked_up, dropped = numbers.start_index_map, numbers.collapsed_slice_dims
        of_rows = numbers.start_indices_batching_dims
        one = all(n <= 1 for n in equation.params["slice_sizes"])
    else:
        looked_up, dropped = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        of_rows = numbers.scatter_indices_batching_dims
        one = True
    last = len(shape) - 1
    if column != last and not batching:
        raise equation.refuse(
            "looks up rows by their numbers, and rows share nothing. Compute it outside of the fused function; one "
            "element of each row is jnp.take_along_axis(x, labels[..., None], axis=-1)"
        )
    rest = all(i in batching or is_one(n) for i, n in enumerate(shape) if i != column)
    alone = [n for i, n in enumerate(labels) if column == last or i not in of_rows]
    one_label = labels[-2:] == (1, 1) if column == last else all(map(is_one, alone))
    if not (looked_up == dropped == (column,) and one and rest and one_label):
        raise equation.refuse(
            "must take one element of each row: jnp.take_along_axis(x, labels[..., None], axis=-1)"
        )
    return numbers


def is_one(n) -> bool:
    return isinstance(n, int) and n == 1
