"""Which expressions are which operation: one `find` per family, which yields matches or raises Mismatch."""
