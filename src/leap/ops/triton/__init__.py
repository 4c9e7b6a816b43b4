"""The Triton backend: ops for graphics processors, and the same code interpreted on the CPU.

The formulas are at the heads of the files in `kernels`. As in the native backend, each op is a
custom op of torch, so that a compiler sees one op, and says which calls it takes. Triton itself is
imported when the first of them runs.
"""
