"""Row programs: functions whose reductions run along rows, compiled to one CUDA kernel.

equations   a jaxpr without calls and dead code
view        which dimension is the row's columns, which ones number the rows
graph       nodes: one number per element, per row, per column or at all
rules       what each operation of jax.lax is in the graph
algebra     the same results with fewer reductions and instructions; draws compares random bits instead of numbers
schedule    which threads do what, as data
emit        the CUDA text, over machine.cuh, exchange.cuh and functions.cuh. emit_kernel, emit_strided and
            emit_steps are kinds of kernels; emit_memory, emit_reductions and emit_sums their parts
call        what the launcher is told
launcher    compiles and launches (ffi/launcher)
save        what a forward pass keeps for the backward one
primitive   the JAX primitive and its rules
local       what each of several devices runs
explain     what a fused function costs, for people
tune        measures schedules on the user's GPU
"""
