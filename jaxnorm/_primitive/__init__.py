"""How an operation becomes a JAX primitive; the only home of `jax._src` and of `jax.interpreters` beyond rules.

avals.py      abstract values: shapes, dtypes, where arrays live, and the manual axes along which they vary
arithmetic.py the dtype that formulas add up in, and roundings that compilers keep
rules.py      what derivative and batching rules share
define.py     primitives of a formula and, on platforms that have them, kernels; which of the two a call is lowered to
calls.py      FFI calls: which ones kernels take, their scratch, results in place of operands
merge.py      two calls as one FFI call
partition.py  which devices share a call, how XLA learns that, and what each of them runs
programs.py   jaxprs: traced, run, pruned, and keyed by identity
"""
