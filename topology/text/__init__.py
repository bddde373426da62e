"""Text from outside, taken in with limits, and what it becomes: the lowest room of the mapper.

``untrusted`` decodes and quotes, ``strict_json`` parses without JSON's liberties, ``models`` has
the types with limits that pydantic reads and says its refusals in one line, ``hostlist`` and
``bitmap`` are the notations of host lists and of sets of PUs. Knows no machines, networks or plans;
raises PlacementError and nothing else. Imports errors only.
"""
