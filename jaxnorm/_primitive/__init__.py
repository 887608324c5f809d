"""How an operation becomes a JAX primitive; the only home of `jax._src` and of `jax.interpreters` beyond rules.

avals       abstract values: shapes, dtypes, where arrays live, and the manual axes along which they vary
arithmetic  the dtype that formulas add up in, and roundings that compilers keep
rules       what derivative and batching rules share
named       calls whose operands and results have names
define      primitives of a formula and, on platforms that have them, kernels; which of the two a call is lowered to
calls       FFI calls: which ones kernels take, results in place of operands
merge       two calls as one FFI call
partition   which devices share a call, how XLA learns that, and what each of them runs
programs    jaxprs: traced, run, pruned, and keyed by identity
"""
