"""The native backend: ops in C++, from the library that src/native/build.py compiles.

The formulas are at the heads of its files. Here each op is a custom op of torch around one call of
the library, so that a compiler sees one op, and says which calls it takes.
"""
