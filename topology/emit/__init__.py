"""A plan for launchers: the files that start its ranks where it says, and the commands.

``launchers`` knows what each launcher can be told, ``files`` makes the folder and writes it. Starts
nothing. Host names reach shells from here, so they are checked again. Imports plan and what is
below it; never draw.
"""
