"""Modules that are found as `deltazoo.NAME`: this folder is on the search path of the package, see its `__path__`.

A file in the root would do the same, but it would hide the library of that name from programs that run there.
"""
