"""The settings of a run: what may be set (``settings``), and where values come from (``sources``).

To add a setting, add a field to ``RunConfig``: the command line, the environment, the TOML file and
the report of mistakes follow from it. Imports errors only: no torch, no MPI, no
files but the one that the user names.
"""
