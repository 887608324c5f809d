"""What `jaxnorm.autofuse` is made of.

values     what a variable holds, as an expression whose shape, dtype and spelling have been taken out of the way
program    a jaxpr with the calls in it opened: who defines and who uses every variable
algebra    expressions as sums of products; statistics along axes
patterns   which expressions are which operation
costs      where an operation is worth its call; the measurements behind that
rewrite    checks of dtypes, uses and order; the rewritten jaxpr
flow       equations as regions of rows see them; which run before which
regions    where row programs are; what they and XLA move
region     a row program's equations, inputs and results
grown      the program with its regions as row programs
bodies     programs inside of equations: loops, branches, shard_map
order      an order in which a program can run
report     what `explain` returns
"""
