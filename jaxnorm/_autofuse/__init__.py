"""What `jaxnorm.autofuse` is made of.

values     what a variable holds, as an expression whose shape, dtype and spelling have been taken out of the way
program    a jaxpr with the calls in it opened: who defines and who uses every variable
algebra    expressions as sums of products; statistics along axes
patterns   which expressions are which operation
costs      where an operation is worth its call; the measurements behind that
rewrite    checks of dtypes, uses and order; the rewritten jaxpr
report     what `explain` returns
"""
